"""Uses of low copies whose gradients are summed in fp32.

Autograd sums the gradients of a value's readers in the dtype of the value.  A low copy
must not take that sum, because torch.autocast, which casts for each use, sums in fp32.
Each use of a weight therefore gets an autograd node of its own (`low_weight`), and all
uses of any other value share one node (`low_uses`); the sum is then made in fp32.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import fx

from autoamp.analyse.classified import Classified
from autoamp.analyse.facts import NodeFacts
from autoamp.rewrite.emitted import Emitted, dtype_of

MANY_USES = 8
"""The number of uses of one value above which each use has its own autograd node.

A shared node keeps the gradients of all uses until the last gradient arrives."""

Copies = dict[tuple[str, torch.dtype, int, int], fx.Node]
"""Shared casts by (value, dtype, region, epoch); epochs count writes to the value."""


class Uses:
    """Gives each reader its use of a low copy, and repeats weight views for uses."""

    def __init__(
        self,
        emitted: Emitted,
        classified: Classified,
        lowered: frozenset[str],
        low: torch.dtype,
        copies: Copies,
    ) -> None:
        """Keeps `copies` itself, because the caller adds casts to it later."""
        self._emitted = emitted
        self._facts = facts = classified.facts
        self._verdicts = classified.verdicts
        self._low = low
        self._copies = copies
        self._weight_storage = {facts.nodes[w].storage for w in facts.weights}
        self._low_reads = _count_low_reads(classified, lowered)
        self._shared: dict[tuple[str, int, int], Iterator[fx.Node]] = {}

    def use_of_copy(
        self, value: str, copy: fx.Node, reader: NodeFacts, epoch: int
    ) -> fx.Node:
        """The node for one reader: low `copy` of `value`, or a use of `copy`."""
        if not (self._facts.nodes[value].requires_grad and reader.requires_grad):
            return copy
        key = (value, reader.region, epoch)
        uses = self._low_reads[key]
        if uses < 2:
            return copy
        of_weight = self._facts.nodes[value].storage in self._weight_storage
        if of_weight or uses > MANY_USES:
            return self._emitted.use_of(value, copy)
        if key not in self._shared:
            self._shared[key] = iter(self._emitted.uses_of(value, copy, uses))
        return next(self._shared[key])

    def view_of_weight(self, value: str, reader: NodeFacts) -> fx.Node | None:
        """A fresh view chain for one use of a low view of a weight, or None.

        The gradients of `w.t()`, computed once and used often, would be summed in low
        precision.  Repeating the view for each use moves no data and lets the gradients
        be summed in fp32.
        """
        fact = self._facts.nodes[value]
        if (
            fact.storage not in self._weight_storage
            or not (fact.requires_grad and reader.requires_grad)
            or fact.storage in self._facts.mutated
            or self._low_reads[value, fact.region, 0] < 2
            or dtype_of(self._emitted.new[value]) != self._low
        ):
            return None
        return self._again(value)

    def _again(self, value: str) -> fx.Node | None:
        """A repetition of low view `value`; None if `value` cannot be repeated."""
        facts, emitted = self._facts, self._emitted
        view = facts.element_of.get(value, value)  # of one piece: the `chunk` op
        operands = facts.nodes[view].operands
        maker = emitted.new[view]
        if (
            len(operands) != 1
            or view not in self._verdicts
            or maker.op != "call_function"
        ):
            return None
        again = self._repeated(view, operands[0].value)
        if view == value:
            return again
        args = (again, *emitted.old[value].args[1:])
        return emitted.insert(operator.getitem, args, {}, value, emitted.new[value])

    def _repeated(self, view: str, below: str) -> fx.Node:
        """A repetition of `view` of `below`, down to a new use of the cast value."""
        emitted = self._emitted
        if dtype_of(emitted.new[below]) == self._low:
            source = self._again(below) or emitted.new[below]
        else:
            region = self._facts.nodes[view].region  # region of the view's own cast
            copy = self._copies[below, self._low, region, 0]
            source = emitted.use_of(below, copy)

        def swap(node: fx.Node) -> fx.Node:
            return source if node.name == below else emitted.new[node.name]

        old = emitted.old[view]
        args, kwargs = fx.map_arg((old.args, old.kwargs), swap)
        return emitted.insert(old.target, args, kwargs, old.name, emitted.new[view])


def _count_low_reads(
    classified: Classified, lowered: frozenset[str]
) -> Mapping[tuple[str, int, int], int]:
    """How many reads of each value, per region and epoch, are in the low dtype."""
    counts: Counter[tuple[str, int, int]] = Counter()
    for name in lowered & classified.verdicts.keys():
        region = classified.facts.nodes[name].region
        for operand, mode in classified.reads(name):
            if mode in ("same", "follow"):
                counts[operand.value, region, operand.epoch] += 1
    return counts
