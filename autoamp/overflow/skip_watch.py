"""Finds the op that makes steps overflow: runs after a skipped step leave a trail.

Runs are watched from a skipped step until the next step that is taken.  A training that
does not overflow is never watched, and keeps nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from autoamp.dtypes import LOW_DTYPES
from autoamp.overflow.culprit import harmful, nearest
from autoamp.overflow.remedy import Remedy, candidates
from autoamp.overflow.trail import Step, Trail
from autoamp.rewrite.rewritten import Rewritten

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
            if culprit.wide is None or not math.isfinite(culprit.wide):
                return None
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
        if found is None or found[0] > 2 * self._scale / scale:
            return None
        return found
