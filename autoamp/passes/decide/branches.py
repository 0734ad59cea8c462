"""Branches of one low value that meet again in an fp32 op: they are fp32 throughout.

A classified graph goes in; the nodes on such branches come out.  In

    linear = linear(x, weight);  y = softplus(linear) - relu(linear)

softplus is denied and the difference is fp32.  Were `relu` low, the gradient of the
difference would be rounded for this branch alone, before both gradients are added up;
where the branches cancel the error of the rounding would be all that is left.  (Under
`torch.autocast` every branch starts from one rounded gradient, or from none.)  With
`relu` in fp32 as well, the sum is made in fp32 and rounded once, at `linear`.

No branch goes through an allow op: a product rounds its gradients in any case, as it
does under autocast.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping

from autoamp.passes.decide.verdict import CEILING, Classified
from autoamp.passes.rules import Category

WHY = "meets another branch of the same value in fp32, where both gradients are summed"
"""Why a node on a branch is fp32."""


def on_branches(classified: Classified) -> frozenset[str]:
    """The free nodes on branches of one free value that meet again in an fp32 op.

    A gradient flows through each of them.
    """
    branches = _Branches(classified)
    # The last value first: a node that is found may be where earlier branches meet.
    for value in reversed(branches.readers):
        if len(branches.readers[value]) > 1 and branches.is_free(value):
            branches.follow(value)
    return frozenset(branches.found)


class _Branches:
    """The branches of a graph.

    Attributes:
        readers: each value, with the nodes that read it and pass a gradient back.
        found: the free nodes that are to be fp32.
    """

    def __init__(self, classified: Classified) -> None:
        self.facts, self.verdicts = classified.facts, classified.verdicts
        self.order = {name: at for at, name in enumerate(self.verdicts)}
        self.readers: dict[str, list[str]] = defaultdict(list)
        self.found: set[str] = set()
        self._names = [*self.order]
        self._elements: dict[str, list[str]] = defaultdict(list)
        for value, maker in self.facts.element_of.items():
            self._elements[maker].append(value)
        for name in self.order:
            fact = self.facts.nodes[name]
            if fact.passes_gradient:
                for value in dict.fromkeys(o.value for o in fact.operands):
                    self.readers[value].append(name)

    def is_free(self, value: str) -> bool:
        """Whether `value` may be low, and a gradient flows into it."""
        maker = self.facts.producer(value)
        verdict = self.verdicts.get(maker)
        is_free = verdict is not None and not verdict.pinned and maker not in self.found
        return is_free and self.facts.nodes[value].requires_grad

    def follow(self, value: str) -> None:
        """Adds to `found` the free nodes on those branches of `value` that meet."""
        pending = [self.order[name] for name in self.readers[value]]
        waiting = set(pending)
        heapq.heapify(pending)
        # For each node on a branch the branches that lead to it, and the nodes on them
        # that it reads.
        on: dict[str, frozenset[str]] = {}
        before: dict[str, list[str]] = {}
        while pending:
            name = self._names[heapq.heappop(pending)]
            verdict = self.verdicts[name]
            if verdict.category is Category.ALLOW and not verdict.pinned:
                continue
            read = [operand.value for operand in self.facts.nodes[name].operands]
            makers = {self.facts.maker(each) for each in read if each != value}
            before[name] = [maker for maker in makers if maker in on]
            ways = {on[maker] for maker in before[name]}
            if value in read:
                ways.add(frozenset({name}))
            on[name] = frozenset().union(*ways)
            if len(ways) > 1 and (verdict.pinned or name in self.found):
                self._find(name, before)
            # A node that alone is left is where all branches have met.
            for made in self._elements.get(name, (name,)) if pending else ():
                for reader in self.readers.get(made, ()):
                    if self.order[reader] not in waiting:
                        waiting.add(self.order[reader])
                        heapq.heappush(pending, self.order[reader])

    def _find(self, meeting: str, before: Mapping[str, list[str]]) -> None:
        """Adds the free nodes of `before` that lead to `meeting`.

        Without a denied op among them every gradient is rounded as under autocast: the
        two products of a rotary embedding are fp32 for their fp32 factors alone.
        """
        steps, known = [meeting], {meeting}
        while steps:
            for name in before[steps.pop()]:
                if name not in known:
                    known.add(name)
                    steps.append(name)
        pinned = {name for name in known if self.verdicts[name].pinned}
        denied = any(self.verdicts[name].origin != CEILING for name in pinned)
        if denied or known & self.found:
            self.found |= known - pinned
