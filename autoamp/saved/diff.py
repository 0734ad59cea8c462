"""Compares two saved reports: takes two documents, and returns a frozen `Diff`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autoamp.saved.align import paired_graphs, paired_ops
from autoamp.saved.document import SavedCast, SavedGraph, SavedOp, SavedReport

SCHEMA = "autoamp.diff"
SCHEMA_VERSION = 1
"""Raised when a key is removed or changes its meaning, not when a key is added."""


@dataclass(frozen=True)
class Change:
    """One op whose precision differs between the old and the new report."""

    old: SavedOp
    new: SavedOp


@dataclass(frozen=True)
class Diff:
    """The differences between two reports.

    Attributes:
        old, new: the two files.
        models: the class names of the two models.
        compute_dtypes: the short names of the two low dtypes; "" for none.
        same: number of ops that have the same precision in both reports.
        changed: ops that changed precision.
        appeared, vanished: ops that only one of the reports has.
        casts_added, casts_removed: casts that only one of the reports has.
        graphs_appeared, graphs_vanished: keys of graphs that only one of the reports
            has; their ops and casts are counted nowhere else.
    """

    old: str
    new: str
    models: tuple[str, str]
    compute_dtypes: tuple[str, str]
    same: int = 0
    changed: tuple[Change, ...] = ()
    appeared: tuple[SavedOp, ...] = ()
    vanished: tuple[SavedOp, ...] = ()
    casts_added: tuple[SavedCast, ...] = ()
    casts_removed: tuple[SavedCast, ...] = ()
    graphs_appeared: tuple[str, ...] = ()
    graphs_vanished: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether the two reports place every op and every cast alike."""
        return not (
            self.changed
            or self.appeared
            or self.vanished
            or self.casts_added
            or self.casts_removed
            or self.graphs_appeared
            or self.graphs_vanished
        )

    def to_dict(self) -> dict[str, Any]:
        """The differences as plain values, for JSON."""
        return {"schema": SCHEMA, "version": SCHEMA_VERSION, **asdict(self)}


@dataclass(frozen=True)
class GraphDiff:
    """The differences between two versions of one graph, as in `Diff`."""

    same: int
    changed: tuple[Change, ...]
    appeared: tuple[SavedOp, ...]
    vanished: tuple[SavedOp, ...]
    casts_added: tuple[SavedCast, ...]
    casts_removed: tuple[SavedCast, ...]

    @property
    def ops_differ(self) -> bool:
        """Whether an op changed precision, appeared or vanished."""
        return bool(self.changed or self.appeared or self.vanished)


def diff(old: SavedReport, new: SavedReport) -> Diff:
    """The differences between two reports.

    Example:
        >>> import os, tempfile, torch, autoamp
        >>> from autoamp.saved.diff import diff
        >>> from autoamp.saved.load import load
        >>> def saved(**options):
        ...     options |= {"precision": "bf16", "do_no_harm": False}
        ...     model, x = torch.nn.Linear(8, 8), torch.ones(4, 8)
        ...     path = os.path.join(tempfile.mkdtemp(), "precision.json")
        ...     _ = autoamp.explain(model, x, options=options).to_json(path)
        ...     return load(path)
        >>> found = diff(saved(), saved(deny=["linear"]))
        >>> [(change.old.name, change.new.precision) for change in found.changed]
        [('linear', 'fp32')]
    """
    pairs = [*paired_graphs(old.graphs, new.graphs)]
    found = [diff_graphs(a, b) for a, b in pairs if a is not None and b is not None]
    return Diff(
        old=old.path,
        new=new.path,
        models=(old.model, new.model),
        compute_dtypes=(old.compute_dtype, new.compute_dtype),
        same=sum(each.same for each in found),
        changed=tuple(op for each in found for op in each.changed),
        appeared=tuple(op for each in found for op in each.appeared),
        vanished=tuple(op for each in found for op in each.vanished),
        casts_added=tuple(cast for each in found for cast in each.casts_added),
        casts_removed=tuple(cast for each in found for cast in each.casts_removed),
        graphs_appeared=tuple(b.key for a, b in pairs if a is None and b is not None),
        graphs_vanished=tuple(a.key for a, b in pairs if b is None and a is not None),
    )


def diff_graphs(old: SavedGraph, new: SavedGraph) -> GraphDiff:
    """The differences between two versions of one graph."""
    pairs = [*paired_ops(old.ops, new.ops)]
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    changed = tuple(Change(a, b) for a, b in both if a.precision != b.precision)
    renamed = {a.name: b.name for a, b in both}
    removed, added = _unpaired_casts(old, new, renamed)
    return GraphDiff(
        same=len(both) - len(changed),
        changed=changed,
        appeared=tuple(b for a, b in pairs if a is None and b is not None),
        vanished=tuple(a for a, b in pairs if b is None and a is not None),
        casts_added=added,
        casts_removed=removed,
    )


def _unpaired_casts(
    old: SavedGraph, new: SavedGraph, renamed: dict[str, str]
) -> tuple[tuple[SavedCast, ...], tuple[SavedCast, ...]]:
    """The casts of each side that the other side lacks: removed, and added.

    A cast is identified by the op whose result is cast, or by the weight's name.  Names
    of other inputs shift, so the cast of another input is identified by its size.
    """
    vanished = {op.name: None for op in old.ops}
    olds = _keys(old.casts, {**vanished, **renamed})
    news = _keys(new.casts, {op.name: op.name for op in new.ops})
    return _beyond(old.casts, olds, news), _beyond(new.casts, news, olds)


def _keys(
    casts: Sequence[SavedCast], new_names: Mapping[str, str | None]
) -> list[Hashable]:
    """A key for each cast, equal for casts that correspond.

    Args:
        new_names: each op to its name in the new report, or None.
    """
    keys: list[Hashable] = []
    for cast in casts:
        of: Hashable = cast.value if cast.kind == "weight" else cast.bytes
        keys.append((cast.kind, cast.dtype, new_names.get(cast.value, of)))
    return keys


def _beyond(
    casts: Sequence[SavedCast], keys: Sequence[Hashable], others: Sequence[Hashable]
) -> tuple[SavedCast, ...]:
    """The casts whose keys `others` lacks, or has less often."""
    there, found = Counter(others), []
    for cast, key in zip(casts, keys, strict=True):
        if there[key] > 0:
            there[key] -= 1
        else:
            found.append(cast)
    return tuple(found)
