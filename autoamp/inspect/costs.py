"""The cost of each placement of a graph, to show that the chosen one costs least.

Under `do_no_harm=False` the price of an allow op in fp32 includes a *reward* for
converting the op, larger than all other prices together.  The certificate needs costs
with rewards, because the solver minimised these costs; a reader wants the predicted
time.  `Placement` has both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoamp.place.assign import legal_energy
from autoamp.place.cost import UNIT_NS
from autoamp.place.policies import POLICIES, project
from autoamp.rewrite.rewritten import Rewritten
from autoamp.rules import Category

OURS, ALL_FP32 = "ours", "all fp32"


@dataclass(frozen=True)
class Placement:
    """The cost of one placement of a graph.

    Attributes:
        cost: the total that was minimised, rewards included.
        estimate: the total without rewards: predicted time or bytes.
        allow_in_fp32: number of allow ops that the placement leaves in fp32.
    """

    cost: int
    estimate: int
    allow_in_fp32: int


@dataclass(frozen=True)
class Costs:
    """The costs of one graph, in units of 0.1 ns or of bytes.

    Attributes:
        placements: `OURS`, `ALL_FP32` or another policy's name, to its cost.
        optimal_cost: the least cost of any legal placement.
        reward: the cost added by each allow op left in fp32; 0 with do_no_harm.
        in_bytes: whether the unit is bytes kept for the backward, not time.
        device: the device from whose figures the prices are computed.
    """

    placements: Mapping[str, Placement]
    optimal_cost: int
    reward: int
    in_bytes: bool
    device: str

    @property
    def ours(self) -> Placement:
        return self.placements[OURS]

    @property
    def regret(self) -> dict[str, int]:
        """Policy to its cost above the optimum, rewards included."""
        return {
            name: placement.cost - self.optimal_cost
            for name, placement in self.placements.items()
            if name in POLICIES
        }


def costs_of(rewritten: Rewritten) -> Costs:
    """The costs of one graph under the prices that its placement used."""
    assignment = rewritten.assignment
    prices = assignment.prices

    def placement(cost: int, low: frozenset[str]) -> Placement:
        left = allow_in_fp32(rewritten, low)
        return Placement(cost, cost - prices.reward * left, left)

    placements = {
        OURS: placement(assignment.cost, assignment.low),
        ALL_FP32: placement(assignment.all_high_cost, frozenset()),
    }
    for name, policy in POLICIES.items():
        low = project(assignment.problem, policy(rewritten.classified))
        placements[name] = placement(legal_energy(assignment.problem, low), low)
    return Costs(
        placements=placements,
        optimal_cost=assignment.optimal_cost,
        reward=prices.reward,
        in_bytes=prices.in_bytes,
        device=prices.device.name,
    )


def in_fp32(rewritten: Rewritten, name: str) -> int:
    """The price of an op in fp32, without the reward for lowering it."""
    prices = rewritten.assignment.prices
    high, _ = prices.ops[name]
    is_allow = rewritten.classified.verdicts[name].category is Category.ALLOW
    return high - (prices.reward if is_allow else 0)


def titles(costs: Costs) -> dict[str, str]:
    """The title of each placement, in the order in which placements are shown."""
    known = {
        OURS: "this one",
        ALL_FP32: "all fp32",
        "tensorflow": "TensorFlow's passes",
        "promote": "autocast's type promotion",
        "forced": "allow ops alone",
    }
    rest = {name: name for name in costs.placements if name not in known}
    return {**known, **rest}


def allow_in_fp32(rewritten: Rewritten, low: frozenset[str]) -> int:
    """The number of allow ops that are not in `low`."""
    classified = rewritten.classified
    return len({*filter(classified.is_allowed, classified.verdicts)} - low)


def amount(units: int, in_bytes: bool, *, signed: bool = False) -> str:
    """`units` as text: `1.25 ms`, `+310 ns`, `4.1 kB`."""
    sign = "-" if units < 0 else "+" if signed else ""
    size = abs(units)
    if in_bytes:
        return f"{sign}{in_si(size, ('B', 'kB', 'MB', 'GB'))}"
    return f"{sign}{in_si(size * UNIT_NS, ('ns', 'µs', 'ms', 's'))}"


def in_si(value: float, names: tuple[str, ...]) -> str:
    """`value` with three figures and the unit of `names` that fits its size."""
    step = 0
    while value >= 999.5 and step < len(names) - 1:
        value, step = value / 1000, step + 1
    digits = 0 if step == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {names[step]}"


def seconds_text(seconds: float) -> str:
    """A time as text: `1.25 ms`."""
    return in_si(seconds * 1e9, ("ns", "µs", "ms", "s"))


def bytes_text(count: int) -> str:
    """A number of bytes as text: `4.1 kB`."""
    return in_si(count, ("B", "kB", "MB", "GB"))
