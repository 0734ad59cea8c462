"""The cost of giving one node the other precision: the min-marginal of the node."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from autoamp.errors import PlacementError
from autoamp.inspect.costs import allow_in_fp32
from autoamp.place.again import Again
from autoamp.place.problem import contradiction_of, held, promised_casts
from autoamp.rewrite.rewritten import Rewritten


@dataclass(frozen=True)
class Flip:
    """The best placement in which some nodes are forced into a precision.

    Attributes:
        low: the nodes that would be low.
        extra_cost: cost above the placement in force, rewards included.
        extra_estimate: `extra_cost` without rewards, in units of 0.1 ns or bytes.
        extra_allow_in_fp32: how many more allow ops would be in fp32.
        in_bytes: whether the unit is bytes.
        appear, vanish: casts that would be added or removed, as (value, "down" or
            "up"), in graph order.
        along: other nodes that would change precision too, in graph order.
    """

    low: frozenset[str]
    extra_cost: int
    extra_estimate: int
    extra_allow_in_fp32: int
    in_bytes: bool
    appear: tuple[tuple[str, str], ...]
    vanish: tuple[tuple[str, str], ...]
    along: tuple[str, ...]


def flip(rewritten: Rewritten, name: str) -> Flip:
    """Solves the placement again with node `name` forced into its other precision.

    Raises:
        PlacementError: the constraints forbid that; the message is their chain.
    """
    return Flips(rewritten).of(name)


class Flips:
    """Computes flips of one graph; all share the set-up of the graph's solver."""

    def __init__(self, rewritten: Rewritten) -> None:
        self._rewritten = rewritten
        assignment = rewritten.assignment
        self._again = Again(assignment.problem)
        self._casts = promised_casts(assignment.problem, assignment.low)
        self._left = allow_in_fp32(rewritten, assignment.low)

    def of(self, name: str) -> Flip:
        """`flip` of one node.

        Raises:
            PlacementError: the constraints forbid that; the message is their chain.
        """
        return self.of_all((name,), low=name not in self._rewritten.assignment.low)

    def of_all(self, names: Collection[str], *, low: bool) -> Flip:
        """Solves the placement again with all nodes `names` forced into one precision.

        Raises:
            PlacementError: the constraints forbid that; the message is their chain.
        """
        assignment = self._rewritten.assignment
        problem, prices = assignment.problem, assignment.prices
        solution = self._again.held(names, at_source=low)
        if solution is None:
            raise contradiction_of(held(problem, names, low=low, why="asked for"))
        placed = solution.source
        extra = solution.cost - assignment.cost
        more_left = allow_in_fp32(self._rewritten, placed) - self._left
        after = promised_casts(problem, placed)
        changed = assignment.low ^ placed
        others = changed.difference(names)
        return Flip(
            low=placed,
            extra_cost=extra,
            extra_estimate=extra - prices.reward * more_left,
            extra_allow_in_fp32=more_left,
            in_bytes=prices.in_bytes,
            appear=tuple(c for c in after if c not in self._casts),
            vanish=tuple(c for c in self._casts if c not in after),
            along=tuple(n for n in assignment.decisions if n in others),
        )


def contradiction(error: PlacementError) -> str:
    """The chain of constraints that forbids a flip, without advice to rule authors."""
    chain = str(error).removeprefix("contradictory constraints: ")
    return chain.removesuffix(" Drop one of the two.")
