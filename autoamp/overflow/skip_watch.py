"""Which op makes steps overflow: runs after a skipped step leave a trail of numbers.

A run is watched only from a skipped step on, until a step is taken.  Nothing is done,
and nothing is kept, in the steps of a training that does not overflow.
"""

from __future__ import annotations

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
"""So many watched steps in a row have to be skipped by one op for a remedy."""


_LOW_SCALE = 64.0
"""A gradient that overflows at a higher loss scale is cured by lowering the scale; at a
lower scale, small gradients would be lost."""


class SkipWatch:
    """The watch on one model's ops, from a skipped step to the next step taken.

    Attributes:
        watching: whether runs of the model leave a trail.
    """

    def __init__(self) -> None:
        self.watching = False
        self._trail: Trail | None = None
        self._judged = False
        self._last: object = None
        self._times = 0
        self._scale = 1.0
        self._proposed: set[Remedy] = set()

    def trail(self) -> Trail:
        """The trail that the next run is to continue, while runs are watched."""
        trail = self._trail
        if trail is None or self._judged or len(trail.steps) > _MOST:
            trail = self._trail = Trail()
            self._judged = False
        return trail

    def culprit(self) -> Step | None:
        """The op to blame for a step to be skipped; None if no run was watched."""
        trail = self._trail
        return None if trail is None or self._judged else harmful(trail)

    def begin(self, culprit: Step | None, scale: float) -> None:
        """Watches the runs after a skipped step.

        Args:
            culprit: what `culprit` gave for that step.
            scale: the loss scale of that step.
        """
        key = None if culprit is None else culprit.key
        same = key is not None and key == self._last
        self._times = self._times + 1 if same else int(key is not None)
        self._last, self._scale = key, scale
        self.watching = self._judged = True

    def remedy_for(
        self, culprit: Step | None, records: Iterable[Rewritten]
    ) -> Remedy | None:
        """A remedy against an op that has made steps in a row overflow, given once.

        There is none against an op that computes in fp32 already, nor against an op
        whose gradient a lower loss scale is to cure.
        """
        if culprit is None or self._times < REPEATED:
            return None
        if culprit.is_backward and self._scale > _LOW_SCALE:
            return None
        if culprit.dtype not in LOW_DTYPES.values():
            return None
        for remedy in candidates(culprit, [*records])[:1]:
            if remedy not in self._proposed:
                self._proposed.add(remedy)
                return remedy
        return None

    def end(self, scale: float) -> tuple[float, Step] | None:
        """Ends the watch after a step that is taken.

        The result is the number that came nearest to its dtype's limit in that step,
        with how many times below the limit it was, if that number tells of the overflow
        before: at the loss scale then, it would have come near to the limit.  The
        result is None where an op has been blamed already.

        Args:
            scale: the loss scale of the step.
        """
        trail, known, judged = self._trail, self._last, self._judged
        self.watching, self._trail, self._judged = False, None, False
        self._last, self._times = None, 0
        if trail is None or judged or known is not None:
            return None
        found = nearest(trail)
        if found is None or found[0] > 2 * self._scale / scale:
            return None
        return found
