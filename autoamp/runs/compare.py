"""Compares two recorded runs step by step: where they part, and what differs first."""

from __future__ import annotations

import dataclasses
import math
import os

from autoamp.errors import OptionError
from autoamp.runs.comparison import Comparison, Pair, Row
from autoamp.runs.headers import changed, parameters, same_model
from autoamp.runs.law import Law, apart, together
from autoamp.runs.read import NUMBERS, Recording, Step, read

_FACTS = ("batch", "rng", "taken", "scale", "calls", "losses", "optimizer")
_BEFORE, _AFTER = 3, 2
"""The steps that are shown around a parting."""


def compare(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    rank: int | None = None,
    tolerance: float | None = None,
) -> Comparison:
    """The comparison of the rank that parts first; of the lowest if none does.

    Args:
        a, b: folders of recorders, each with one run.
        rank: compare this rank alone.
        tolerance: the relative difference to allow at each step, in place of the law.

    Raises:
        OptionError: a folder holds no run, or several; the runs are of different
            models, or have no rank or step in common.
    """
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise OptionError(f"a tolerance of {tolerance} is none: give 0 or more")
    ours, theirs = read(a), read(b)
    common = [each for each in sorted(ours) if each in theirs]
    if rank is not None:
        common = [each for each in common if each == rank]
    if not common:
        asked = "" if rank is None else f" {rank}"
        has = [", ".join(map(str, sorted(each))) for each in (ours, theirs)]
        raise OptionError(
            f"the runs have no rank{asked} in common: A has {has[0]}, B {has[1]}"
        )
    found = [compare_ranks(ours[n], theirs[n], tolerance) for n in common]
    first = min(found, key=lambda each: (each.parted is None, each.parted or 0))
    alone = sorted({*ours} ^ {*theirs})
    notes = first.notes
    if alone and rank is None:
        notes += (f"Only one of the runs has rank {', '.join(map(str, alone))}.",)
    return dataclasses.replace(first, ranks=tuple(common), notes=notes)


def compare_ranks(
    a: Recording, b: Recording, tolerance: float | None = None
) -> Comparison:
    """The comparison of two rings.

    Raises:
        OptionError: they are of different models, or have no step in common.
    """
    same_model(a, b)
    steps = sorted({*a.steps} & {*b.steps})
    if not steps:
        raise OptionError(
            f"the runs have no step in common: A has {_span(a)}, B {_span(b)}"
        )
    rows, blind = _rows(a, b, steps, tolerance)
    same_torch = a.header.get("torch") == b.header.get("torch")
    reasons = ((row, _why(row, same_torch=same_torch)) for row in rows)
    first, why = next(((row, why) for row, why in reasons if why), (None, ""))
    beyond = () if first is None else tuple(p for p in first.pairs if p.parts)
    return Comparison(
        label=a.label,
        rank=a.rank,
        paths=(str(a.path), str(b.path)),
        precisions=(a.precision, b.precision),
        steps=(steps[0], steps[-1]),
        parted=None if first is None else first.step,
        why=why,
        start=why == "numbers" and first is rows[0] and "batch" not in first.other,
        unequal=next((row.step for row in rows if not row.equal), None),
        beyond=tuple(sorted(beyond, key=lambda p: -p.apart)),
        op=None if first is None else next((p for p in first.ops if p.parts), None),
        blind=blind,
        firsts=_firsts(rows),
        changed=changed(a, b),
        around=_around(rows, first),
        notes=_notes(a, b, steps),
        tolerance=tolerance,
    )


def _why(row: Row, *, same_torch: bool) -> str:
    """Why the runs part at a step, the surest reason first; "" where they do not."""
    # Another torch may add the numbers of a hash in another order.
    if "batch" in row.other and same_torch:
        return "data"
    if "calls" in row.other or "losses" in row.other:
        return "calls"
    if "taken" in row.other:
        return "skipped"
    return "numbers" if any(p.parts for p in (*row.pairs, *row.ops)) else ""


def _rows(
    a: Recording, b: Recording, steps: list[int], tolerance: float | None
) -> tuple[list[Row], int | None]:
    """Each common step, and the first one at which the law allows any number."""
    unit = together(a.precision, b.precision)
    deep = max(parameters(a), parameters(b))
    pairs = {n: _shared(a.steps[n], b.steps[n]) for n in steps}
    total = sum(map(len, pairs.values()))
    laws: dict[str, Law] = {}
    rows, blind, equal_at = [], None, 0
    for n in steps:
        found = []
        for name, (one, other) in pairs[n].items():
            depth = 2 * deep if name == "gradient" else deep
            law = laws.setdefault(name, Law(unit, depth, total, tolerance))
            found.append(
                Pair(name, one, other, apart(one, other), law.allowed(n - equal_at))
            )
            law.seen(found[-1].apart, n - equal_at)
        numbers = tuple(each for each in found if each.name in NUMBERS)
        ops = tuple(each for each in found if each.name not in NUMBERS)
        rows.append(Row(n, numbers, ops, _other(a.steps[n], b.steps[n])))
        if rows[-1].equal and found:
            equal_at = n
        if blind is None and tolerance is None and found:
            blind = n if all(each.allowed >= 1 for each in found) else None
    return rows, blind


def _shared(a: Step, b: Step) -> dict[str, tuple[float, float]]:
    """The numbers that both have of a step, by the names of `Pair`."""
    found = {
        name: (a.numbers[name], b.numbers[name])
        for name in NUMBERS
        if name in a.numbers and name in b.numbers
    }
    for name, both in a.ops.items():
        if name in b.ops:
            for part, word in enumerate(("largest", "mean")):
                found[f"{name} ({word})"] = both[part], b.ops[name][part]
    return found


def _other(a: Step, b: Step) -> dict[str, list[object]]:
    """The facts that both have, and that differ."""
    return {
        name: [a.facts[name], b.facts[name]]
        for name in _FACTS
        if name in a.facts and name in b.facts and a.facts[name] != b.facts[name]
    }


def _firsts(rows: list[Row]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in rows:
        for name in row.other:
            found.setdefault(name, row.step)
    return found


def _around(rows: list[Row], first: Row | None) -> tuple[Row, ...]:
    if first is None:
        return tuple(rows[-_BEFORE - _AFTER - 1 :])
    at = rows.index(first)
    return tuple(rows[max(0, at - _BEFORE) : at + _AFTER + 1])


def _notes(a: Recording, b: Recording, steps: list[int]) -> tuple[str, ...]:
    found = [
        f"The ring of {name} has {each.torn} torn records, which a kill has left; they "
        "are not compared."
        for name, each in (("A", a), ("B", b))
        if each.torn
    ]
    missing = steps[-1] - steps[0] + 1 - len(steps)
    if missing:
        found.append(f"{missing} steps between are not in both rings.")
    if steps[0] > 1:
        found.append(
            f"The rings have both runs from step {steps[0]} on; the runs may have "
            "parted before."
        )
    return tuple(found)


def _span(recording: Recording) -> str:
    if not recording.steps:
        return "none"
    return f"steps {min(recording.steps)} to {max(recording.steps)}"
