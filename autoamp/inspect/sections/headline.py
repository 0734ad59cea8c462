"""The main figures of a report: the ops that run low, and the gain in time and memory.

`print(report)`, the page and the JSON read the figures from here, so that all of them
show the same figures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autoamp.inspect.costs import in_fp32
from autoamp.inspect.rows import OpRow, Section
from autoamp.inspect.sections.prediction import (
    SECONDS,
    Prediction,
    has_times,
    kept_for_backward,
    pays,
)
from autoamp.inspect.text import op_title
from autoamp.place.cost import TRAINING_FACTOR, UNIT_NS
from autoamp.place.policies import POLICIES, project

AUTOCAST = "promote"
"""The policy that places casts as the type promotion of `torch.autocast` does."""


@dataclass(frozen=True)
class Stayed:
    """Ops that stayed in fp32 for one reason.

    Attributes:
        reason: a clause whose subject is the ops.
        rows: the ops, the costliest first.
        ops: the short names of the ops, the costliest first.
        seconds: their predicted time together; None where no time is predicted.
        bytes: fp32 bytes that they read and write.
    """

    reason: str
    rows: tuple[OpRow, ...]
    ops: tuple[str, ...]
    seconds: float | None
    bytes: int

    @property
    def count(self) -> int:
        """The number of the ops."""
        return len(self.rows)

    @property
    def costliest(self) -> OpRow:
        """The op with the largest part of the time, or else of the bytes."""
        return self.rows[0]


@dataclass(frozen=True)
class Headline:
    """The figures of the summary, over all graphs of a report.

    Predicted times are of one run of all graphs: a forward, and a backward where
    gradients are recorded.

    Attributes:
        low_ops, float_ops: the number of ops in low precision, and of all float ops.
        share_of_time_low: the share of the predicted fp32 time in the ops that run low,
            0 to 1; None where no time is predicted.
        trains: whether any op records gradients.
        pays: whether low precision is faster than fp32 on the device; if not, ops run
            low only because of `do_no_harm=False`, and no time is predicted.
        device: the device for which times are predicted; "" where no time is.
        seconds_fp32, seconds_autocast, seconds: the predicted time with every op in
            fp32, with the ops placed as `torch.autocast` would place them, and as
            placed; None where no time is predicted.
        seconds_of_launches: the part of `seconds_fp32` in which ops are only started.
        kept_fp32, kept_autocast, kept: bytes of operands that the backward may read, in
            the same three ways; 0 where no gradient is recorded.
    """

    low_ops: int
    float_ops: int
    share_of_time_low: float | None
    trains: bool
    pays: bool
    device: str
    seconds_fp32: float | None
    seconds_autocast: float | None
    seconds: float | None
    seconds_of_launches: float | None
    kept_fp32: int
    kept_autocast: int
    kept: int

    @property
    def speed_up(self) -> float | None:
        """How many times as fast as fp32; None where no time is predicted."""
        return _ratio(self.seconds_fp32, self.seconds)

    @property
    def speed_up_over_autocast(self) -> float | None:
        """How many times as fast as with autocast's placement; None as `speed_up`."""
        return _ratio(self.seconds_autocast, self.seconds)

    def figures(self) -> dict[str, Any]:
        """Every figure by its name."""
        ratios = ("speed_up", "speed_up_over_autocast")
        return {**asdict(self), **{name: getattr(self, name) for name in ratios}}


def _ratio(before: float | None, after: float | None) -> float | None:
    if before is None or after is None:
        return None
    return before / after if after else 1.0


def headline_of(sections: Sequence[Section], predicted: Prediction | None) -> Headline:
    """The figures of all sections; a body of a loop counts as run once."""
    ops = [row for section in sections for row in section.ops]
    autocast = high_of_low = launches = 0
    kept = [0, 0, 0]
    for section in sections:
        rewritten = section.rewritten
        assignment = rewritten.assignment
        by_autocast = project(
            assignment.problem, POLICIES[AUTOCAST](rewritten.classified)
        )
        for place, low in enumerate((frozenset[str](), by_autocast, assignment.low)):
            kept[place] += kept_for_backward(section, low)
        if predicted:
            autocast += section.costs.placements[AUTOCAST].estimate
            high_of_low += sum(in_fp32(rewritten, name) for name in assignment.low)
            launches += _launches(section)
    share = None
    if predicted:
        share = high_of_low / predicted.units_fp32 if predicted.units_fp32 else 0.0
    return Headline(
        low_ops=sum(row.is_low for row in ops),
        float_ops=len(ops),
        share_of_time_low=share,
        trains=kept[0] > 0,
        pays=all(pays(section) for section in sections),
        device=predicted.device if predicted else "",
        seconds_fp32=predicted.fp32 if predicted else None,
        seconds_autocast=autocast * SECONDS if predicted else None,
        seconds=predicted.placed if predicted else None,
        seconds_of_launches=launches * SECONDS if predicted else None,
        kept_fp32=kept[0],
        kept_autocast=kept[1],
        kept=kept[2],
    )


def _launches(section: Section) -> int:
    """The price of starting every op in fp32, in the forward and in the backward."""
    rewritten = section.rewritten
    start = round(rewritten.assignment.prices.device.launch_ns / UNIT_NS)
    facts = rewritten.facts.nodes
    times = {n: TRAINING_FACTOR if facts[n].requires_grad else 1 for n in facts}
    return sum(
        min(in_fp32(rewritten, name), start * times[name])
        for name in rewritten.assignment.decisions
    )


def stayed_groups(sections: Sequence[Section]) -> tuple[Stayed, ...]:
    """The ops in fp32 by reason, the reason that costs most first."""
    seconds = _seconds_of_ops(sections)
    groups: dict[str, list[OpRow]] = defaultdict(list)
    for row in (row for section in sections for row in section.ops):
        if not row.is_low:
            groups[row.heading].append(row)
    found = [_stayed(reason, rows, seconds) for reason, rows in groups.items()]
    return tuple(sorted(found, key=lambda g: (-(g.seconds or 0), -g.bytes)))


_Key = tuple[int, str, str]


def _seconds_of_ops(sections: Sequence[Section]) -> Mapping[_Key, float] | None:
    """The predicted time in fp32 of each op; None where no time is predicted."""
    if not all(map(has_times, sections)):
        return None
    return {
        (section.graph, section.body, name): in_fp32(section.rewritten, name) * SECONDS
        for section in sections
        for name in section.rewritten.assignment.decisions
    }


def _stayed(
    reason: str, rows: Sequence[OpRow], seconds: Mapping[_Key, float] | None
) -> Stayed:
    def weight(row: OpRow) -> tuple[float, int]:
        time = seconds[row.graph, row.body, row.name] if seconds else 0.0
        return time, row.bytes

    totals: dict[str, tuple[float, int]] = {}
    for row in rows:
        name, (time, size) = op_title(row.op), weight(row)
        before = totals.get(name, (0.0, 0))
        totals[name] = before[0] + time, before[1] + size
    return Stayed(
        reason=reason,
        rows=tuple(sorted(rows, key=weight, reverse=True)),
        ops=tuple(sorted(totals, key=lambda name: totals[name], reverse=True)),
        seconds=sum(t for t, _ in totals.values()) if seconds is not None else None,
        bytes=sum(row.bytes for row in rows),
    )
