"""The remedies that might keep a number in its range, the narrowest first."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from autoamp.dtypes import LOW_DTYPES
from autoamp.messages import advice
from autoamp.passes.graph_record import Rewritten
from autoamp.passes.ops import parse_op_name
from autoamp.training.blame.culprit import harmful, nearest
from autoamp.training.blame.trail import OP, Location, Step, Trail, location_of, readers
from autoamp.training.options import Options

EVERYTHING = "*"
"""The pattern of `keep=` that keeps a whole model in fp32."""


@dataclass(frozen=True)
class Remedy:
    """Options of `convert` that would keep a number in its range.

    Attributes:
        deny: ops that stay in fp32.
        keep: modules that stay in fp32.
    """

    deny: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.advice(by_variables=False)

    def advice(self, *, by_variables: bool) -> str:
        """The remedy as text: keyword arguments, or environment variables."""
        parts = [("deny", self.deny), ("keep", self.keep)]
        given = [(name, [*names]) for name, names in parts if names]
        each = [advice(name, names, by_variables=by_variables) for name, names in given]
        return (" and " if by_variables else ", ").join(each)

    def __add__(self, other: Remedy) -> Remedy:
        kept = tuple(dict.fromkeys((*self.keep, *other.keep)))
        return Remedy(
            tuple(dict.fromkeys((*self.deny, *other.deny))),
            tuple(path for path in kept if not _is_inside(path, kept)),
        )

    def on(self, options: Options) -> Options:
        """`options` with this remedy; denied ops leave `allow`, `infer`, `clear`."""
        denied = set(map(parse_op_name, self.deny))

        def without(names: Sequence[str]) -> tuple[str, ...]:
            return tuple(n for n in names if parse_op_name(n) not in denied)

        return options.replace(
            deny=(*options.deny, *self.deny),
            keep=(*options.keep, *self.keep),
            allow=without(options.allow),
            infer=without(options.infer),
            clear=without(options.clear),
        )


class Fault(NamedTuple):
    """A call that still fails.

    Attributes:
        step: the step to blame; None where it is not known.
        records: the records of the graphs that ran.
    """

    step: Step | None
    records: Sequence[Rewritten]


def cure(
    fault: Fault,
    attempt: Callable[[Remedy], Fault | None],
    tries: Iterable[object],
) -> Remedy | None:
    """The remedy that puts the fewest low ops back into fp32, among those that cure.

    Remedies are tried in the order of their size.  Where a remedy moves the fault to
    another step, the remedies for that step are added to it; so the first one that
    cures is the smallest.

    Args:
        fault: the call without a remedy.
        attempt: makes the call under a remedy: None if it cures.
        tries: one value for each remedy that may be tried.

    Returns:
        The remedy; None where none of those tried cures.
    """
    queue: list[tuple[int, bool, int, Remedy, Step]] = []
    seen: set[tuple[frozenset[str], ...]] = set()

    def add(remedy: Remedy, left: Fault) -> None:
        if left.step is None:
            return
        for each in candidates(left.step, left.records):
            wider = remedy + each
            # Two remedies in either order are one, and are tried once.
            key = frozenset(wider.deny), frozenset(wider.keep)
            if key not in seen:
                seen.add(key)
                size = _put_back(wider, fault.records)
                entry = size, bool(wider.keep), len(seen), wider, left.step
                heapq.heappush(queue, entry)

    add(Remedy(), fault)
    widest = max(queue, default=None)
    for _ in tries:
        if not queue:
            return None
        *_, remedy, before = heapq.heappop(queue)
        before_at = before.key, before.is_cast
        left = attempt(remedy)
        if left is None:
            return remedy
        after = left.step
        if after is not None and (after.key, after.is_cast) != before_at:
            add(remedy, left)
    # The tries are over, but the widest remedy may still cure.
    if widest in queue and widest is not None and attempt(widest[3]) is None:
        return widest[3]
    return None


def candidates(step: Step, records: Sequence[Rewritten]) -> list[Remedy]:
    """Remedies for the ops that compute with the number at `step`, the narrowest first.

    A remedy is narrower the fewer low ops it puts back into fp32.
    """
    counts: dict[Remedy, int] = {}
    for node, location in _computing(step):
        # The records name the module that a shared graph was captured in.
        known = location if node is None else location_of(node)
        named = zip(location.modules, known.modules, strict=False)
        each = {Remedy(keep=(path,)): Remedy(keep=(noted,)) for path, noted in named}
        if "::" in location.op:
            name = parse_op_name(location.op).partition(".")[0]
            each[Remedy(deny=(name,))] = Remedy(deny=(name,))
        counts |= {
            remedy: _put_back(as_noted, records) for remedy, as_noted in each.items()
        }
    # A remedy that puts no low op back changes nothing.
    counts = {remedy: count for remedy, count in counts.items() if count}
    return sorted(counts, key=lambda remedy: (counts[remedy], bool(remedy.keep)))


def _computing(step: Step) -> list[tuple[fx.Node | None, Location]]:
    """The ops that compute in low precision with the number at `step`.

    Each comes with its node, where that tells more than the location.
    """
    if step.node is not None and (step.is_cast or step.is_given):
        read: list[tuple[fx.Node | None, Location]] = [
            (node, location_of(node, step.here)) for node in readers(step.node)
        ]
        if step.location.kind == OP:
            read.append((_node_of(step), step.location))
        return read
    return [(_node_of(step), step.location)]


def _node_of(step: Step) -> fx.Node | None:
    """The node that the location of a step is read from."""
    while step.operands and (step.is_cast or step.is_backward):
        step = step.operands[0]
    return step.node


def _put_back(remedy: Remedy, records: Sequence[Rewritten]) -> int:
    """How many low ops, in bodies too, a remedy puts back into fp32."""
    low = (
        each.facts.nodes[name]
        for record in records
        for each in record.with_bodies()
        for name, decision in each.assignment.decisions.items()
        if decision.low
    )
    return sum(
        fact.base in remedy.deny
        or fact.module in remedy.keep
        or _is_inside(fact.module, remedy.keep)
        for fact in low
    )


def _is_inside(path: str, others: Iterable[str]) -> bool:
    return any(path.startswith(f"{other}.") for other in others)


# -- while a model trains --------------------------------------------------------------

_MOST = 100_000
"""Steps of a trail after which a new trail begins: a script may call the model without
ever taking a step."""

REPEATED = 3
"""A remedy is proposed once one op overflowed in so many watched steps in a row."""


_LOW_SCALE = 64.0
"""A gradient that overflows at a higher loss scale is cured by lowering the scale; at a
lower scale, small gradients would be lost."""


class SkipWatch:
    """The watch on one model's ops, from a skipped step to the next step taken.

    Attributes:
        watching: whether runs of the model leave a trail.
        asks_fp32: whether watched runs are to compute in fp32, too, what leaves the
            range of its dtype.
        records: the graphs of the runs that left the trail.
    """

    def __init__(self) -> None:
        self.watching = self.asks_fp32 = False
        self.records: list[Rewritten] = []
        self._trail: Trail | None = None
        self._judged = False
        self._by, self._passed = 0, set[int]()
        self._last: object = None
        self._times = 0
        self._scale: float | None = 1.0
        self._proposed: set[Remedy] = set()

    def trail(self, record: Rewritten | None = None) -> Trail:
        """The trail that the next run, of the graph `record`, is to continue."""
        trail = self._trail
        if trail is None or self._judged or len(trail.steps) > _MOST:
            trail = self._trail = Trail()
            self._judged, self.records = False, []
        if record is not None and all(record is not each for each in self.records):
            self.records.append(record)
        return trail

    def culprit(self) -> Step | None:
        """The op to blame for a skipped step; None if no run was watched.

        Several optimizers may skip their steps after one backward: all blame one op.
        """
        return None if self._trail is None else harmful(self._trail)

    def begin(self, culprit: Step | None, scale: float | None, by: int = 0) -> None:
        """Watches the runs after a skipped step.

        Args:
            culprit: the result of `culprit()` for the skipped step.
            scale: the loss scale of the skipped step; None for a model without one.
            by: the `id` of the optimizer that skipped the step.
        """
        self.watching, self._by = True, by
        self._passed.clear()
        if self._judged and culprit is not None:
            return  # another optimizer has skipped its step after the same backward
        key = None if culprit is None else culprit.key
        same = key is not None and key == self._last
        self._times = self._times + 1 if same else int(key is not None)
        self._last, self._scale = key, scale
        # A number that leaves the range of bf16 mostly leaves that of fp32 as well.
        self.asks_fp32 = scale is None and self._times + 1 >= REPEATED
        self._judged = True

    def remedy_for(
        self, culprit: Step | None, records: Iterable[Rewritten]
    ) -> Remedy | None:
        """A remedy for an op that has made steps in a row overflow, proposed once.

        None for an op that computes in fp32 already, for a gradient that a lower loss
        scale will bring back into range, and, without a loss scale, for an op that is
        not known to give finite numbers in fp32.
        """
        if culprit is None or self._times < REPEATED:
            return None
        if self._scale is None:
            # An op whose result is infinite in fp32 as well is not cured by fp32.
            if culprit.wide is None or not math.isfinite(culprit.wide):
                return None
        # The loss scale is still on its way down, and will cure this by itself.
        elif culprit.is_backward and self._scale > _LOW_SCALE:
            return None
        if culprit.dtype not in LOW_DTYPES.values():
            return None
        for remedy in candidates(culprit, [*records])[:1]:
            if remedy not in self._proposed:
                self._proposed.add(remedy)
                return remedy
        return None

    def end(self, scale: float, by: int = 0) -> tuple[float, Step] | None:
        """Ends the watch after a step that is taken.

        An optimizer of other weights than the one that skipped its step may take a step
        after the same backward, so that only its second step ends the watch.

        Args:
            scale: the loss scale of the step that is taken.
            by: the `id` of the optimizer that takes the step.

        Returns:
            The limit over the magnitude, and the step, of the number that came nearest
            to its dtype's limit; None if an op was blamed already, or if even at the
            loss scale of the skipped step the number would have been small.
        """
        trail, known, judged = self._trail, self._last, self._judged
        if by != self._by and by not in self._passed:
            self._passed.add(by)
            return None
        self.watching = self.asks_fp32 = False
        self._passed.clear()
        self._trail, self._judged, self.records = None, False, []
        self._last, self._times = None, 0
        if trail is None or self._scale is None or judged or known is not None:
            return None
        found = nearest(trail)
        # Gradients follow the scale: at the skipped step's scale the number was larger
        # by the ratio of the scales, and may have overflowed only if that reaches its
        # limit (within a factor of two, for another batch).
        if found is None or found[0] > 2 * self._scale / scale:
            return None
        return found
