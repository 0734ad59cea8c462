"""The predicted time of a step in fp32 and as placed, and the limit on the speed-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoamp.dtypes import HIGH_DTYPE
from autoamp.inspect.costs import in_fp32
from autoamp.inspect.rows import Section
from autoamp.place.cost import UNIT_NS, kind_of_product
from autoamp.place.devices import NEUTRAL, Device
from autoamp.place.flops import flops_of
from autoamp.rewrite.rewritten import Rewritten

PRODUCTS, OTHERS, CASTS = (
    "matrix products, convolutions, attention",
    "all other float ops",
    "casts",
)


SECONDS = UNIT_NS * 1e-9
"""A unit of prices in seconds."""


@dataclass(frozen=True)
class TimeOfClass:
    """Predicted times of one class of ops: `PRODUCTS`, `OTHERS` or `CASTS`.

    Attributes:
        title: the class.
        ops: number of ops, or of casts.
        fp32: seconds with every op in fp32.
        placed: seconds as placed.
        may_be_low: the part of `fp32` in ops that may run in low precision.
    """

    title: str
    ops: int
    fp32: float
    placed: float
    may_be_low: float


@dataclass(frozen=True)
class Prediction:
    """Predicted times of one run of all graphs, forward, and backward where recorded.

    The price model of `place/cost.py` gives each op a launch plus the larger of bytes
    over bandwidth and flops over peak.  Work outside of graphs (the optimizer's step,
    the loading of data) does not count.

    Attributes:
        device: the device whose figures are used.
        classes: the times of the classes of ops.
        units_fp32, units_placed: the time with every op in fp32, and as placed with the
            casts, in units of 0.1 ns.
    """

    device: str
    classes: tuple[TimeOfClass, ...]
    units_fp32: int
    units_placed: int

    @property
    def fp32(self) -> float:
        """Seconds with every op in fp32."""
        return self.units_fp32 * SECONDS

    @property
    def placed(self) -> float:
        """Seconds as placed, casts included."""
        return self.units_placed * SECONDS

    @property
    def casts(self) -> float:
        """Seconds of the casts."""
        return sum(each.placed for each in self.classes if each.title == CASTS)

    @property
    def speed_up(self) -> float:
        """How many times faster than fp32 the graphs are predicted to be."""
        return self.fp32 / self.placed if self.placed else 1.0

    @property
    def share_that_may_be_low(self) -> float:
        """The share of the fp32 time in ops that may run in low precision, 0 to 1."""
        touched = sum(each.may_be_low for each in self.classes)
        return touched / self.fp32 if self.fp32 else 0.0

    @property
    def limit(self) -> float:
        """The speed-up if ops that may be low took no time at all (Amdahl's law)."""
        rest = 1 - self.share_that_may_be_low
        return 1 / rest if rest else float("inf")


def predict(sections: Sequence[Section]) -> Prediction | None:
    """The prediction for all sections; a loop's body counts as run once.

    None without graphs, under `objective="memory"`, and where low precision is slower
    on the device but `do_no_harm=False` converts all the same: then the prices belong
    to no device.
    """
    if not sections or not all(map(has_times, sections)):
        return None
    totals = {title: [0, 0, 0, 0] for title in (PRODUCTS, OTHERS, CASTS)}
    for section in sections:
        rewritten = section.rewritten
        _add_ops(section, totals)
        whole = section.costs.ours.estimate
        placed = sum(
            as_placed(rewritten, name) for name in rewritten.assignment.decisions
        )
        totals[CASTS][0] += sum(cast.every_call for cast in section.casts)
        totals[CASTS][2] += whole - placed
    classes = tuple(
        TimeOfClass(title, ops, fp32 * SECONDS, placed * SECONDS, low * SECONDS)
        for title, (ops, fp32, placed, low) in totals.items()
    )
    _, all_high, ours, _ = map(sum, zip(*totals.values(), strict=True))
    return Prediction(_hardware(sections), classes, all_high, ours)


_KINDS = {
    "matmul": "matrix products",
    "batched": "matrix products",
    "conv": "convolutions",
    "channelwise": "convolutions",
    "rnn": "recurrent layers",
}


def _hardware(sections: Sequence[Section]) -> str:
    """The device of the prices, and the products that fp32 computes in TF32 there."""
    device = sections[0].rewritten.assignment.prices.device
    kinds = {
        kind_of_product(node, fact)
        for section in sections
        for name in section.rewritten.assignment.decisions
        if flops_of(
            node := section.before[name], fact := section.rewritten.facts.nodes[name]
        )
    }
    met = [word for kind, word in _KINDS.items() if kind in kinds & _in_tf32(device)]
    told = f", fp32 {' and '.join(dict.fromkeys(met))} in TF32" if met else ""
    return device.name + told


def _in_tf32(device: Device) -> set[str]:
    return {kind for kind in _KINDS if device.allows_tf32(kind)}


def has_times(section: Section) -> bool:
    """Whether the prices of a section are times on a device, and not bytes."""
    return pays(section) and not section.rewritten.assignment.prices.in_bytes


def pays(section: Section) -> bool:
    """Whether low precision is faster than fp32 on the device of a section."""
    return section.rewritten.assignment.prices.device is not NEUTRAL


def kept_for_backward(section: Section, low: frozenset[str]) -> int:
    """Bytes of operands that the backward may read if the ops `low` run low."""
    rewritten = section.rewritten
    facts = ((n, rewritten.facts.nodes[n]) for n in rewritten.assignment.decisions)
    return sum(
        (rewritten.low if name in low else HIGH_DTYPE).itemsize * fact.read_numel
        for name, fact in facts
        if fact.requires_grad
    )


def _add_ops(section: Section, totals: dict[str, list[int]]) -> None:
    rewritten = section.rewritten
    pinned = rewritten.assignment.pinned
    for name in rewritten.assignment.decisions:
        is_product = flops_of(section.before[name], rewritten.facts.nodes[name]) > 0
        total = totals[PRODUCTS if is_product else OTHERS]
        high = in_fp32(rewritten, name)
        total[0] += 1
        total[1] += high
        total[2] += as_placed(rewritten, name)
        total[3] += 0 if name in pinned else high


def as_placed(rewritten: Rewritten, name: str) -> int:
    """The price of an op in its precision, without the reward for lowering it."""
    if name in rewritten.assignment.low:
        return rewritten.assignment.prices.ops[name][1]
    return in_fp32(rewritten, name)
