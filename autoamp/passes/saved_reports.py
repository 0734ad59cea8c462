"""Saved reports: one is read from a JSON file, and two are compared.

Nothing in a file is executed, and the type of every value is checked.  A comparison
pairs the graphs and ops of two reports.  Names are unreliable for that: an op inserted
early turns every later `add_3` into `add_4`.  So ops are aligned as sequences, like the
lines of two versions of a file.
"""

from __future__ import annotations

import itertools
import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NoReturn

from autoamp.dtypes import LOW_DTYPES
from autoamp.errors import OptionError
from autoamp.messages import printable_line
from autoamp.passes.report_rows import (
    FP32,
    SCHEMA,
    VERSION,
    CastRow,
    OpRow,
    SavedGraph,
    SavedReport,
)

MAX_BYTES = 1 << 28
"""The most bytes of a report that is read: about 400,000 ops."""

_GIVE = 'give a file that report.to_json("FILE") or `autoamp explain --json` wrote'


def _is_whole(value: object) -> bool:
    # `True` is an `int` in Python.
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_Kind = tuple[str, Callable[[Any], bool]]
"""What a value must be, in words and as a test."""

_WHOLE: _Kind = "a whole number from 0", _is_whole
_TEXT: _Kind = "a string", lambda value: isinstance(value, str)
_TEXT_OR_NULL: _Kind = "a string", lambda value: value is None or isinstance(value, str)


def _one_of(*valid: str) -> _Kind:
    return f"one of {', '.join(valid)}", lambda value: value in valid


_SECTION = {"graph": _WHOLE, "body": _TEXT}
_GRAPH = {**_SECTION, "device": _TEXT}
OP_KEYS: Mapping[str, _Kind] = {
    **_SECTION,
    "name": _TEXT,
    "op": _TEXT,
    "precision": _one_of(FP32, *LOW_DTYPES),
    "reason": _TEXT,
    "module": _TEXT,
    "source": _TEXT,
}
"""The keys of an op that are read from a file."""

CAST_KEYS: Mapping[str, _Kind] = {
    **_SECTION,
    "name": _TEXT,
    "value": _TEXT,
    "kind": _one_of("weight", "down", "up"),
    "dtype": _TEXT,
    "bytes": _WHOLE,
}
"""The keys of a cast that are read from a file."""


def load(path: str | os.PathLike[str]) -> SavedReport:
    """The report that `Report.to_json(path)` wrote.

    Raises:
        OptionError: the file cannot be read or is no report; the message names the file
            and the key.

    Example:
        >>> import os, tempfile, torch, autoamp
        >>> from autoamp.passes.saved_reports import load
        >>> report = autoamp.explain(torch.nn.Linear(8, 8), torch.ones(4, 8))
        >>> path = os.path.join(tempfile.mkdtemp(), "precision.json")
        >>> _ = report.to_json(path)
        >>> load(path).model
        'Linear'
    """
    shown = printable_line(os.fsdecode(path), 300)
    try:
        data = json.loads(_read(Path(path), shown))  # bytes: UTF-8, UTF-16, a BOM
    except OSError as error:
        raise OptionError(
            f"{shown}: cannot be read ({error.strerror}); {_GIVE}"
        ) from None
    except OptionError:  # `OptionError` is a `ValueError` too
        raise
    except RecursionError:
        _fail(shown, "it is nested too deeply to be a report")
    except ValueError as error:  # no UTF-8, no JSON, a null byte in the path
        _fail(shown, f"it is not JSON ({error})")
    return report_in(shown, data)


def report_in(where: str, data: object) -> SavedReport:
    """The report in the plain values `data`, which a file of another kind may hold.

    Args:
        where: the file, for messages and as the path of the report.

    Raises:
        OptionError: the values are no report; the message names the file and the key.
    """
    if not isinstance(data, dict) or "schema" not in data:
        _fail(where, 'it has no key "schema"')
    if data["schema"] != SCHEMA:
        _fail(where, f"its schema is {_shown(data['schema'])}, not {SCHEMA!r}")
    (version,) = _values(where, data, "", {"version": _WHOLE})
    if version > VERSION:
        raise OptionError(
            f"{where}: its version is {_shown(version)}, and this autoamp reads "
            f"{VERSION}: a newer autoamp wrote the report; upgrade autoamp, or write "
            "the report again with this version"
        )
    sections: dict[tuple[int, str], tuple[str, list[OpRow], list[CastRow]]] = {}
    for place, each in _tables(where, data, "graphs"):
        graph, body, device = _values(where, each, place, _GRAPH)
        if (graph, body) in sections:
            _fail(where, f"{place}: graph {graph} occurs twice")
        sections[graph, body] = device, [], []
    for key, kinds in (("ops", OP_KEYS), ("casts", CAST_KEYS)):
        for place, each in _tables(where, data, key):
            values = _values(where, each, place, kinds)
            graph, body = values[:2]
            if (graph, body) not in sections:
                none = f"the report has no graph {graph}, body {_shown(body)}"
                _fail(where, f"{place}: {none}")
            _, ops, casts = sections[graph, body]
            if key == "ops":
                ops.append(OpRow(*values))
            else:
                casts.append(CastRow(*values))
    for (graph, _), (_, ops, _) in sections.items():
        # Casts find their ops by name when two reports are compared.
        if len({op.name for op in ops}) < len(ops):
            _fail(where, f"two ops of graph {graph} have the same name")
    top = {"model": _TEXT, "compute_dtype": _TEXT_OR_NULL}
    model, dtype = _values(where, {"compute_dtype": None, **data}, "", top)
    return SavedReport(
        path=where,
        model=model,
        compute_dtype=dtype or "",
        graphs=tuple(
            SavedGraph(*key, device, tuple(ops), tuple(casts))
            for key, (device, ops, casts) in sections.items()
        ),
    )


def _read(path: Path, shown: str) -> bytes:
    status = path.stat()
    # The path may be anything: a pipe blocks, and `/dev/zero` never ends.
    if stat.S_ISDIR(status.st_mode):
        raise OptionError(f"{shown}: it is a directory; {_GIVE}")
    if not stat.S_ISREG(status.st_mode):
        raise OptionError(f"{shown}: it is a device or a pipe, not a file; {_GIVE}")
    if status.st_size > MAX_BYTES:
        raise OptionError(
            f"{shown}: {status.st_size:,} bytes, but a report has at most "
            f"{MAX_BYTES:,}; {_GIVE}"
        )
    return path.read_bytes()


def _tables(
    path: str, data: dict[str, Any], key: str
) -> list[tuple[str, dict[str, Any]]]:
    found = data.get(key)
    if not isinstance(found, list):
        _fail(path, f"{key} is {_shown(found)}; it must be a list")
    tables = [(f"{key}[{index}]", each) for index, each in enumerate(found)]
    for where, each in tables:
        if not isinstance(each, dict):
            _fail(path, f"{where} is {_shown(each)}; it must be an object")
    return tables


def _values(
    path: str, table: dict[str, Any], where: str, kinds: Mapping[str, _Kind]
) -> list[Any]:
    """The values of a table by the keys of `kinds`, in their order, all checked."""
    for key, (must, is_right) in kinds.items():
        place = f"{where}.{key}" if where else key
        if key not in table:
            _fail(path, f"{place} is missing; it must be {must}")
        if not is_right(table[key]):
            _fail(path, f"{place} is {_shown(table[key])}; it must be {must}")
    return [table[key] for key in kinds]


def _shown(value: object) -> str:
    """A value of the file for a message: a list may be a million entries long."""
    if isinstance(value, list | dict):
        return "an object" if isinstance(value, dict) else "a list"
    try:
        return printable_line(repr(value), 80)
    except ValueError:  # a number of 5000 digits
        return "a huge number"


def _fail(path: str, problem: str) -> NoReturn:
    raise OptionError(f"{path}: no report of autoamp: {problem}; {_GIVE}")


# -- two reports compared --------------------------------------------------------------

DIFF_SCHEMA = "autoamp.diff"
DIFF_VERSION = 1
"""Raised when a key is removed or changes its meaning, not when a key is added."""

ALIKE = 0.5
"""The least share of common ops at which two graphs may be versions of one graph."""

_KEYS: tuple[Callable[[OpRow], Hashable], ...] = (
    lambda op: (op.op, op.module, op.code),
    lambda op: (op.op, op.module),
    lambda op: (op.op, op.name),
    lambda op: op.op,
)
"""The signs that two ops are the same op, from the surest to the weakest.

Names count only where code and modules decide nothing: an op that was inserted early
may have taken the name of a later op of its kind.
"""


@dataclass(frozen=True)
class Change:
    """One op whose precision differs between the old and the new report."""

    old: OpRow
    new: OpRow


@dataclass(frozen=True)
class Diff:
    """The differences between two reports, or between two versions of one graph.

    Attributes:
        old, new: the two files; "" for graphs.
        models: the class names of the two models.
        compute_dtypes: the short names of the two low dtypes; "" for none.
        same: number of ops that have the same precision in both reports.
        changed: ops that changed precision.
        appeared, vanished: ops that only one of the reports has.
        casts_added, casts_removed: casts that only one of the reports has.
        graphs_appeared, graphs_vanished: keys of graphs that only one of the reports
            has; their ops and casts are counted nowhere else.
    """

    old: str = ""
    new: str = ""
    models: tuple[str, str] = ("", "")
    compute_dtypes: tuple[str, str] = ("", "")
    same: int = 0
    changed: tuple[Change, ...] = ()
    appeared: tuple[OpRow, ...] = ()
    vanished: tuple[OpRow, ...] = ()
    casts_added: tuple[CastRow, ...] = ()
    casts_removed: tuple[CastRow, ...] = ()
    graphs_appeared: tuple[str, ...] = ()
    graphs_vanished: tuple[str, ...] = ()

    @property
    def places_otherwise(self) -> bool:
        """Whether an op changed precision, or only one of the reports has it."""
        graphs = self.graphs_appeared or self.graphs_vanished
        return bool(self.changed or self.appeared or self.vanished or graphs)

    @property
    def is_empty(self) -> bool:
        """Whether the two reports place every op and every cast alike."""
        casts = self.casts_added or self.casts_removed
        return not (self.places_otherwise or casts)

    def to_dict(self) -> dict[str, Any]:
        """The differences as plain values, for JSON."""
        values = {f.name: _plain(getattr(self, f.name)) for f in fields(self)}
        return {"schema": DIFF_SCHEMA, "version": DIFF_VERSION, **values}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [*map(_plain, value)]
    if isinstance(value, Change):
        return {"old": _plain(value.old), "new": _plain(value.new)}
    if isinstance(value, OpRow | CastRow):
        keys = OP_KEYS if isinstance(value, OpRow) else CAST_KEYS
        return {key: getattr(value, key) for key in keys}
    return value


def diff(old: SavedReport, new: SavedReport) -> Diff:
    """The differences between two reports.

    Example:
        >>> import os, tempfile, torch, autoamp
        >>> from autoamp.passes.saved_reports import diff, load
        >>> def saved(**options):
        ...     options |= {"precision": "bf16", "do_no_harm": False}
        ...     model, x = torch.nn.Linear(8, 8), torch.ones(4, 8)
        ...     path = os.path.join(tempfile.mkdtemp(), "precision.json")
        ...     _ = autoamp.explain(model, x, **options).to_json(path)
        ...     return load(path)
        >>> found = diff(saved(), saved(deny=["linear"]))
        >>> [(change.old.name, change.new.precision) for change in found.changed]
        [('linear', 'fp32')]
    """
    pairs = [*paired_graphs(old.graphs, new.graphs)]
    found = [diff_graphs(a, b) for a, b in pairs if a is not None and b is not None]

    def together(name: str) -> tuple[Any, ...]:
        return tuple(itertools.chain(*(getattr(each, name) for each in found)))

    return Diff(
        old=old.path,
        new=new.path,
        models=(old.model, new.model),
        compute_dtypes=(old.compute_dtype, new.compute_dtype),
        same=sum(each.same for each in found),
        changed=together("changed"),
        appeared=together("appeared"),
        vanished=together("vanished"),
        casts_added=together("casts_added"),
        casts_removed=together("casts_removed"),
        graphs_appeared=tuple(b.key for a, b in pairs if a is None and b is not None),
        graphs_vanished=tuple(a.key for a, b in pairs if b is None and a is not None),
    )


def diff_graphs(old: SavedGraph, new: SavedGraph) -> Diff:
    """The differences between two versions of one graph."""
    pairs = [*paired_ops(old, new)]
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    changed = tuple(Change(a, b) for a, b in both if a.precision != b.precision)
    renamed = {a.name: b.name for a, b in both}
    olds = _cast_keys(old, {op.name: renamed.get(op.name) for op in old.ops})
    news = _cast_keys(new, {op.name: op.name for op in new.ops})
    return Diff(
        same=len(both) - len(changed),
        changed=changed,
        appeared=tuple(b for a, b in pairs if a is None and b is not None),
        vanished=tuple(a for a, b in pairs if b is None and a is not None),
        casts_added=_beyond(new.casts, news, olds),
        casts_removed=_beyond(old.casts, olds, news),
    )


def paired_ops(
    old: SavedGraph, new: SavedGraph
) -> Iterator[tuple[OpRow | None, OpRow | None]]:
    """Every op of two versions of a graph once, with its counterpart or None."""
    return _aligned(old.ops, new.ops, _KEYS)


def likeness(old: SavedGraph, new: SavedGraph) -> float:
    """The share of ops, 0 to 1, that have the same op and module on both sides."""
    most = max(len(old.ops), len(new.ops))
    if not most:
        return 1.0
    ours, theirs = (Counter((op.op, op.module) for op in g.ops) for g in (old, new))
    return (ours & theirs).total() / most


def paired_graphs(
    old: Sequence[SavedGraph], new: Sequence[SavedGraph]
) -> Iterator[tuple[SavedGraph | None, SavedGraph | None]]:
    """Every graph of either side once, with its counterpart or None.

    A graph is paired with the graph of the same key if the two are alike, else with the
    graph that is most alike, else with None.
    """
    # Equal keys first, for all graphs, so that a graph that is only similar takes no
    # other graph's partner.
    by_key = {graph.key: graph for graph in new}
    partner: dict[str, SavedGraph] = {}
    for graph in old:
        same = by_key.get(graph.key)
        if same is not None and likeness(graph, same) >= ALIKE:
            partner[graph.key] = by_key.pop(graph.key)
    for graph in old:
        if graph.key in partner or not by_key:
            continue
        best = max(by_key.values(), key=lambda each: likeness(graph, each))
        if likeness(graph, best) >= ALIKE:
            partner[graph.key] = by_key.pop(best.key)
    yield from ((graph, partner.get(graph.key)) for graph in old)
    yield from ((None, graph) for graph in new if graph.key in by_key)


def _aligned(
    old: Sequence[OpRow],
    new: Sequence[OpRow],
    keys: Sequence[Callable[[OpRow], Hashable]],
) -> Iterator[tuple[OpRow | None, OpRow | None]]:
    """Every op of either side once, with its counterpart or None, in graph order.

    Ops are aligned by the first key, and the ops between the matches by later keys.
    """
    if not (keys and old and new):
        yield from ((op, None) for op in old)
        yield from ((None, op) for op in new)
        return
    at_old = at_new = 0
    for start_old, start_new, length in _blocks(
        [keys[0](op) for op in old], [keys[0](op) for op in new]
    ):
        yield from _aligned(old[at_old:start_old], new[at_new:start_new], keys[1:])
        at_old, at_new = start_old + length, start_new + length
        yield from zip(old[start_old:at_old], new[start_new:at_new], strict=True)


def _blocks(
    old: Sequence[Hashable], new: Sequence[Hashable]
) -> Iterator[tuple[int, int, int]]:
    """Runs that both sides share, as (start, start, length); the last is empty.

    The common beginning and end are found first, because `SequenceMatcher` needs
    quadratic time for keys that repeat, as in an unrolled loop.
    """
    head = _common(old, new)
    tail = _common(old[head:][::-1], new[head:][::-1])
    yield 0, 0, head
    # With `autojunk` an op that fills 1 % of a long graph would count as noise and
    # never be matched.
    matcher = SequenceMatcher(
        None, old[head : len(old) - tail], new[head : len(new) - tail], autojunk=False
    )
    for a, b, length in matcher.get_matching_blocks():
        yield a + head, b + head, length
    yield len(old) - tail, len(new) - tail, tail


def _common(old: Sequence[Hashable], new: Sequence[Hashable]) -> int:
    """The length of the common beginning."""
    pairs = zip(old, new, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _cast_keys(
    graph: SavedGraph, new_names: Mapping[str, str | None]
) -> list[Hashable]:
    """A key for each cast of a graph, equal for casts that correspond.

    A cast is identified by the op whose result is cast, under its name in the new
    report, or by the name of the weight.  Names of other inputs shift, so the cast of
    another input is identified by its size.
    """
    keys: list[Hashable] = []
    for cast in graph.casts:
        of: Hashable = cast.value if cast.kind == "weight" else cast.bytes
        keys.append((cast.kind, cast.dtype, new_names.get(cast.value, of)))
    return keys


def _beyond(
    casts: Sequence[CastRow], keys: Sequence[Hashable], others: Sequence[Hashable]
) -> tuple[CastRow, ...]:
    """The casts whose keys `others` lacks, or has less often."""
    there, found = Counter(others), []
    for cast, key in zip(casts, keys, strict=True):
        if there[key] > 0:
            there[key] -= 1
        else:
            found.append(cast)
    return tuple(found)
