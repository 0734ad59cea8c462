"""What a comparison of two runs has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autoamp.flight.ring import plain


@dataclass(frozen=True)
class Pair:
    """One number in both runs.

    Attributes:
        name: `loss`, `gradient`, `result`, or an op as `module.path:op`, with
            ` (largest)` or ` (mean)`.
        apart: the relative difference.
        allowed: the largest difference that is rounding at this step.
    """

    name: str
    a: float
    b: float
    apart: float
    allowed: float

    @property
    def parts(self) -> bool:
        """Whether the difference is beyond rounding."""
        return self.apart > self.allowed


@dataclass(frozen=True)
class Row:
    """One step in both runs.

    Attributes:
        pairs: the numbers that both have.
        ops: the magnitudes of ops that both have, in the order of the forward.
        other: `{FACT: [IN A, IN B]}` where the runs differ: `batch`, `rng`, `taken`,
            `scale`, `calls`, `losses`, `optimizer`.
    """

    step: int
    pairs: tuple[Pair, ...]
    ops: tuple[Pair, ...]
    other: dict[str, list[Any]]

    @property
    def equal(self) -> bool:
        """Whether all numbers are the same to the bit."""
        return not any(each.apart for each in (*self.pairs, *self.ops))


@dataclass(frozen=True)
class Comparison:
    """Two runs, on one rank of `ranks`.

    Attributes:
        label: the name of the model's class.
        paths, precisions: of A and B.
        steps: the first and the last step that both rings have.
        parted: the first step at which the runs part, or None.
        why: `data`, `calls`, `skipped`, `numbers`; or "" where they do not part.
        start: whether the first step of both trainings has parted already, with the
            same data: the weights at the start differ, or the ops do.
        unequal: the first step at which a number differs at all, or None.
        beyond: the numbers that part at that step, the worst first.
        op: the first op that parts at that step; None where no op was noted, or no op
            parts.
        blind: the first step from which the law allows any number, or None.
        firsts: the first step of each fact that differs, by `Row.other`'s names.
        changed: options and versions that differ, `{NAME: [IN A, IN B]}`.
        around: the steps around the parting; else the last ones.
        notes: torn records, and what else a reader should know.
    """

    label: str
    rank: int
    paths: tuple[str, str]
    precisions: tuple[str, str]
    steps: tuple[int, int]
    parted: int | None
    why: str
    start: bool
    unequal: int | None
    beyond: tuple[Pair, ...]
    op: Pair | None
    blind: int | None
    firsts: dict[str, int]
    changed: dict[str, list[str]]
    around: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = (0,)
    tolerance: float | None = None

    @property
    def status(self) -> int:
        """The exit status: 1 if the runs part."""
        return int(self.parted is not None)

    def as_dict(self) -> dict[str, Any]:
        """The comparison for programs; numbers that are not finite are text."""
        whole = {
            **{name: getattr(self, name) for name in _PLAIN},
            "beyond": [_pair(each) for each in self.beyond],
            "op": None if self.op is None else _pair(self.op),
            "around": [
                {
                    "step": row.step,
                    "numbers": [_pair(each) for each in row.pairs],
                    "ops": [_pair(each) for each in row.ops],
                    "other": row.other,
                }
                for row in self.around
            ],
        }
        found: dict[str, Any] = plain(whole)
        return found


_PLAIN = (
    *("label", "rank", "ranks", "paths", "precisions", "steps", "parted", "why"),
    *("start", "unequal", "blind", "firsts", "changed", "notes", "tolerance"),
)


def _pair(pair: Pair) -> dict[str, Any]:
    names = ("name", "a", "b", "apart", "allowed", "parts")
    return {name: getattr(pair, name) for name in names}
