"""What would change one op: the other precision with its cost, and the options."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from autoamp.analyse.pins import kept_by
from autoamp.analyse.verdict import GAVE_UP
from autoamp.errors import PlacementError
from autoamp.inspect.rows import allow_in_fp32
from autoamp.pass_options import PassOptions
from autoamp.pipeline.run import placed_again
from autoamp.place.mincut import Again
from autoamp.place.problem import contradiction_of, held, promised_casts
from autoamp.place.two_sides import Group
from autoamp.rewrite.rewritten import Rewritten
from autoamp.rules import Category


@dataclass(frozen=True)
class Flip:
    """The best placement in which some nodes are forced into a precision.

    Attributes:
        low: the nodes that would be low.
        extra_cost: cost above the placement in force, rewards included.
        extra_estimate: `extra_cost` without rewards, in units of 0.1 ns or bytes.
        extra_allow_in_fp32: how many more allow ops would be in fp32.
        appear, vanish: casts that would be added or removed, as (value, "down" or
            "up"), in graph order.
        along: other nodes that would change precision too, in graph order.
    """

    low: frozenset[str]
    extra_cost: int
    extra_estimate: int
    extra_allow_in_fp32: int
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
        others = (assignment.low ^ placed).difference(names)
        return Flip(
            low=placed,
            extra_cost=extra,
            extra_estimate=extra - prices.reward * more_left,
            extra_allow_in_fp32=more_left,
            appear=tuple(c for c in after if c not in self._casts),
            vanish=tuple(c for c in self._casts if c not in after),
            along=tuple(n for n in assignment.decisions if n in others),
        )


def contradiction(error: PlacementError) -> str:
    """The chain of constraints that forbids a flip, without advice to rule authors."""
    chain = str(error).removeprefix("contradictory constraints: ")
    return chain.removesuffix(" Drop one of the two.")


class FlipsAlone:
    """The cost of changing one op and nothing else, from the terms that name the op.

    It is an upper bound on the cost of the flip (rewards included).
    """

    def __init__(self, rewritten: Rewritten) -> None:
        assignment = rewritten.assignment
        problem = assignment.problem
        self._problem, self._low = problem, assignment.low
        self._reward = assignment.prices.reward
        self._verdicts = rewritten.classified.verdicts
        self._groups: dict[str, list[Group]] = defaultdict(list)
        for group in problem.groups:
            for variable in dict.fromkeys((group.value, *group.readers)):
                self._groups[variable].append(group)
        self._tied = {v for a, b, _ in problem.ties if a != b for v in (a, b)}
        self._follows: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for reader, value, _ in problem.follows:
            self._follows[reader].append((reader, value))
            self._follows[value].append((reader, value))

    def of(self, name: str) -> tuple[int, int] | None:
        """The cost without rewards, and how many more allow ops would be in fp32.

        None where the op cannot change alone.
        """

        def after(variable: str) -> bool:
            return (variable in self._low) != (variable == name)

        if name in self._tied or any(
            after(reader) and not after(value) for reader, value in self._follows[name]
        ):
            return None
        prices = self._problem.unary[name]
        extra = prices[after(name)] - prices[name in self._low]
        for group in self._groups[name]:
            cost = cast_cost(group, after)
            if cost is None:
                return None
            extra += cost - (cast_cost(group, self._low.__contains__) or 0)
        more = 0
        if self._verdicts[name].category is Category.ALLOW:
            more = 1 if name in self._low else -1
        return extra - self._reward * more, more


def cast_cost(group: Group, is_low: Callable[[str], bool]) -> int | None:
    """The cost of the cast that a labelling needs in a group; None if forbidden.

    The source side of the problem is low (`place/problem.py`).
    """
    if is_low(group.value):
        return group.to_sink if any(not is_low(r) for r in group.readers) else 0
    return group.to_source if any(is_low(r) for r in group.readers) else 0


# -- options ---------------------------------------------------------------------------

_Change: TypeAlias = tuple[dict[str, Any], list[str]]
"""Options to change, and the words for the change."""


@dataclass(frozen=True)
class Remedy:
    """Options under which the passes make one node low, and their effect.

    Attributes:
        words: the options, written as the present options were: keywords or variables.
        extra: the predicted cost above that of the present placement, without rewards.
        along: other nodes that would change precision too, in graph order.
    """

    words: str
    extra: int
    along: tuple[str, ...]


def remedy_for(rewritten: Rewritten, name: str) -> Remedy | None:
    """The fewest options under which fp32 node `name` is low, or None; tries them."""
    verdicts, given = rewritten.classified.verdicts, rewritten.options
    given_up = {n: v.reason for n, v in verdicts.items() if v.origin == GAVE_UP}
    for changes, words in candidates(rewritten, name):
        try:
            found = placed_again(rewritten, given.replace(**changes), given_up)
        except Exception:  # noqa: BLE001, S112  # options that fail are no remedy
            continue
        low = found.assignment.low
        if name in low:
            changed = (rewritten.assignment.low ^ low) - {name}
            return Remedy(
                words=" and ".join(words),
                extra=_estimate(found) - _estimate(rewritten),
                along=tuple(n for n in found.facts.nodes if n in changed),
            )
    return None


def _estimate(rewritten: Rewritten) -> int:
    """The predicted cost of a placement, without rewards."""
    placed = rewritten.assignment
    return placed.cost - placed.prices.reward * allow_in_fp32(rewritten, placed.low)


def candidates(rewritten: Rewritten, name: str) -> Iterator[_Change]:
    """Options to try, the fewest changes first; each with the words for it."""
    options = rewritten.options or PassOptions()
    fact = rewritten.facts.nodes[name]
    op = fact.base.removeprefix("aten::")
    first: dict[str, Any] = {}  # user options that hold the op in fp32 come off first
    said: list[str] = []
    for option, dropped in (
        ("keep", [k for k in options.keep if kept_by([k], fact.modules)]),
        # A user may list an op with its namespace and its overload.
        ("deny", [d for d in options.deny if _bare(d) == op]),
    ):
        if dropped:
            given = getattr(options, option)
            first[option] = tuple(each for each in given if each not in dropped)
            said.append(f"leaving out {options.advice(option, dropped)}")
    allow = [*options.allow, op]
    named: _Change = {"allow": tuple(allow)}, [options.advice("allow", allow)]
    forced: _Change = {"do_no_harm": False}, [options.advice("do_no_harm", False)]
    allowed = rewritten.classified.verdicts[name].category is Category.ALLOW
    can_allow = bool(op) and not allowed  # `allow=` cannot name a branch or a loop
    steps: list[list[_Change]] = [[]] if first else []
    steps += [[named]] * can_allow
    if options.do_no_harm:
        steps += [[forced]]
        steps += [[named, forced]] * can_allow
    for step in steps:
        changes, words = dict(first), []
        for change, text in step:
            changes |= change
            words += text
        yield changes, words + said


def _bare(listed: str) -> str:
    return listed.rpartition("::")[2].partition(".")[0]
