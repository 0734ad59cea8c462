"""Applies an assignment to a graph: casts each operand to the dtype its reader needs.

A classified ATen graph and its `Assignment` go in; a new graph with casts comes out.
Readers of one value share a cast, made before the first of them, if they stand in one
region (grad mode, autocast) and no write to the value's storage lies between them.

Before, with `linear` low and `exp` fp32:

    linear = linear(x, weight);  exp = exp(linear)

after:

    x_bf16 = _to_copy(x, bf16);  weight_bf16 = _to_copy(weight, bf16)
    linear = linear(x_bf16, weight_bf16)
    linear_fp32 = _to_copy(linear, fp32);  exp = exp(linear_fp32)
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE, largest
from autoamp.errors import PassError
from autoamp.passes.decide.assign import Assignment
from autoamp.passes.decide.known_numbers import scales
from autoamp.passes.decide.verdict import GAVE_UP, Classified
from autoamp.passes.functions import WITH_FP32_STATE
from autoamp.passes.ops import base_name, is_out_variant, is_view
from autoamp.passes.rules import family
from autoamp.passes.see.facts import NodeFacts
from autoamp.passes.write.emitted import Cast, Emitted, dtype_of

MANY_USES = 8
"""The number of uses of one value above which each use has its own autograd node.

A shared node keeps the gradients of all uses until the last gradient arrives."""

Copies = dict[tuple[str, torch.dtype, int, int], fx.Node]
"""Shared casts by (value, dtype, region, epoch); epochs count writes to the value."""


def insert_casts(
    gm: fx.GraphModule,
    classified: Classified,
    assignment: Assignment,
    low: torch.dtype,
    fake_mode: compat.FakeTensorMode,
) -> tuple[fx.GraphModule, list[Cast]]:
    """A new module with `assignment` applied, and its inserted casts, in graph order.

    `gm` is not changed; the new module shares the parameters and sub-modules of `gm`.
    """
    emitted = Emitted(gm, classified, fake_mode)
    emitter = _Emitter(emitted, classified, assignment, low)
    for node in gm.graph.nodes:
        try:
            emitter.emit(node)
        except Exception as error:
            raise PassError.at(node.name, error) from error
    rewritten = compat.graph_module(gm, emitted.graph)
    rewritten.meta.update(gm.meta)
    return rewritten, emitted.casts


class _Emitter:
    def __init__(
        self,
        emitted: Emitted,
        classified: Classified,
        assignment: Assignment,
        low: torch.dtype,
    ) -> None:
        self.emitted = emitted
        self.new = emitted.new
        self.facts = classified.facts
        self.verdicts = classified.verdicts
        self.classified = classified
        self.promoted = classified.promoted
        self.assignment = assignment
        self.low = low
        self.copies: Copies = {}
        self.uses = Uses(emitted, classified, assignment.low, low, self.copies)
        self.returned_from: dict[str, fx.Node] = {}

    def emit(self, node: fx.Node) -> None:
        graph = self.emitted.graph
        if node.op == "output":
            result = fx.map_arg(node.args[0], self._returned)
            graph.output(result).meta = dict(node.meta)
            return
        if node.name not in self.verdicts:
            new = graph.node_copy(node, lambda n: self.new[n.name])
            new.meta = dict(node.meta)
            if node.name in self.facts.element_of:
                # The call that it is an element of may give another dtype now.
                source, index = new.args
                assert isinstance(source, fx.Node)
                assert isinstance(index, int)
                new.meta["val"] = source.meta["val"][index]
        elif self.verdicts[node.name].origin == GAVE_UP:
            new = self._emit_as_it_was(node)
        else:
            new = self._emit_op(node)
        self.new[node.name] = new
        if node.name in self.assignment.returned_inside and dtype_of(new) == self.low:
            self.new[node.name] = self.emitted.cast(node.name, HIGH_DTYPE)
            # Readers inside hang on the returned fp32 tensor: on the low one
            # `autograd.grad(loss, value)` would be None (Grad-CAM).
            self.returned_from[node.name] = new

    # -- ops -----------------------------------------------------------------------

    def _emit_as_it_was(self, node: fx.Node) -> fx.Node:
        """Copies the node so that it reads fp32 operands, and changes nothing else.

        A check failed on this node before, so the rewrite does as little as possible.
        """
        region = self.facts.nodes[node.name].region
        epochs = {o.value: o.epoch for o in self.facts.nodes[node.name].operands}

        def operand(leaf: fx.Node) -> fx.Node:
            at = self.new[leaf.name]
            if dtype_of(leaf) != HIGH_DTYPE or dtype_of(at) == HIGH_DTYPE:
                return at
            return self._copy(leaf.name, HIGH_DTYPE, region, epochs[leaf.name])

        new = self.emitted.graph.node_copy(node, operand)
        new.meta = dict(node.meta)
        return new

    def _emit_op(self, node: fx.Node) -> fx.Node:
        fact = self.facts.nodes[node.name]
        is_low = node.name in self.assignment.low
        reads = self.classified.reads(node.name)

        def operand(leaf: fx.Node) -> fx.Node:
            if dtype_of(leaf) != HIGH_DTYPE:
                return self.new[leaf.name]
            read, mode = next(reads)
            wanted = self.low if is_low and mode != "high" else HIGH_DTYPE
            if mode == "any":
                # Type promotion would round the gradient inside the op.
                is_branch = node.name in self.promoted
                if not (
                    is_branch and self.uses.are_summed(leaf.name, fact, read.epoch)
                ):
                    return self.new[leaf.name]
                wanted = HIGH_DTYPE
            return self._in_dtype(leaf.name, wanted, fact, read.epoch)

        args = tuple(fx.map_arg(a, operand) for a in node.args)
        kwargs = {k: fx.map_arg(v, operand) for k, v in node.kwargs.items()}
        args, kwargs = self._adapt_literals(node, args, kwargs, is_low)
        target: Any = node.target
        keeps_state = is_low and fact.keeps_state
        if keeps_state:
            # A state rounded at every step costs a deep GRU more than 1.1 times
            # autocast's error.
            target = WITH_FP32_STATE.get(target, target)
        graph = self.emitted.graph
        new = compat.quick_node(graph, node.op, target, args, kwargs, node.name)
        new.meta.update(node.meta)
        if is_low and fact.makes_floats and not keeps_state:
            new.meta["val"] = self._low_result(node.meta["val"])
        if self.emitted.casts and self._is_copy_by_layout(node, fact):
            return self.emitted.clone(new)
        return new

    def _is_copy_by_layout(self, node: fx.Node, fact: NodeFacts) -> bool:
        """Whether an op like `reshape` copies here and the copy is written or returned.

        A cast lays a tensor out anew, without gaps.  On the cast `reshape` could give a
        view instead of a copy, and a write to the view would reach every reader of the
        cast.
        """
        if not isinstance(node.meta["val"], torch.Tensor):
            return False  # the results of `unbind` and its kin are never copies
        apart = self.facts.mutated | {
            self.facts.nodes[v].storage for v in self.facts.returned
        }
        return (
            fact.storage in apart
            and len(fact.operands) == 1
            and isinstance(node.args[0], fx.Node)
            and self.facts.nodes[fact.operands[0].value].storage != fact.storage
            and isinstance(node.target, compat.OpOverload)
            and is_view(node.target)
        )

    def _adapt_literals(
        self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], is_low: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Adapts dtype arguments to the precision, and numbers to a low op's range."""
        if not isinstance(node.target, compat.OpOverload):
            return args, kwargs
        if is_low:
            # A fill of `finfo(float32).min` is a Python number here, which no cast can
            # clamp. A factor may not be cut: beyond the range its op stays fp32.
            cut = not scales(node.target, self.verdicts[node.name].category)
            args = tuple(self._adapt(a, cut=cut) for a in args)
            kwargs = {k: self._adapt(v, cut=cut) for k, v in kwargs.items()}
        makes_data = base_name(node.target) in family("factory", "noise")
        # `out=` decides the dtype, and has no `dtype` keyword.
        makes_data &= not is_out_variant(node.target)
        if makes_data and self.facts.nodes[node.name].makes_floats:
            given = {**kwargs, "dtype": self.low if is_low else HIGH_DTYPE}
            # In the schema's order, as a tracer writes keywords: a second run of the
            # pass on its own result then changes nothing.
            order = compat.argument_names(node.target)
            kwargs = {name: given[name] for name in sorted(given, key=order.index)}
        return args, kwargs

    def _adapt(self, value: Any, *, cut: bool) -> Any:
        if value is HIGH_DTYPE:
            return self.low
        # An infinity is meant as one; only a finite number may not become one.
        if cut and isinstance(value, float) and math.isfinite(value):
            return max(-largest(self.low), min(largest(self.low), value))
        return value

    def _low_result(self, value: Any) -> Any:
        """The fake low result of an op whose fp32 result was `value`."""
        if isinstance(value, (list, tuple)):
            return type(value)(self._low_result(item) for item in value)
        if isinstance(value, torch.Tensor) and value.dtype == HIGH_DTYPE:
            return self.emitted.fake(value, self.low)
        return value

    # -- operands and results ------------------------------------------------------

    def _in_dtype(
        self, value: str, dtype: torch.dtype, reader: NodeFacts, epoch: int
    ) -> fx.Node:
        """`value` in `dtype`, for one read by `reader`."""
        at = self.new[value]
        if dtype_of(at) == dtype:
            if dtype == self.low and self.uses.are_summed(value, reader, epoch):
                wide = self._copy(value, HIGH_DTYPE, reader.region, epoch)
                return self.uses.use_beside(value, wide, at, reader, epoch)
            return self.uses.view_of_weight(value, reader) or at
        if value in self.returned_from and dtype == self.low:
            return self.emitted.use_of(value, self.returned_from[value])
        copy = self._copy(value, dtype, reader.region, epoch)
        if dtype == HIGH_DTYPE:
            return copy
        return self.uses.use_of_copy(value, copy, reader, epoch)

    def _returned(self, node: fx.Node) -> fx.Node:
        new = self.new[node.name]
        fact = self.facts.nodes[node.name]
        if fact.is_value and dtype_of(new) != HIGH_DTYPE:
            # The graph promises fp32 results; region and epoch -1 are those of no
            # reader, so that no cast inside a `no_grad` region is shared with the
            # result.
            return self._copy(node.name, HIGH_DTYPE, -1, -1)
        return new

    def _copy(self, value: str, dtype: torch.dtype, region: int, epoch: int) -> fx.Node:
        key = (value, dtype, region, epoch)
        if key not in self.copies:
            self.copies[key] = self.emitted.cast(value, dtype)
        return self.copies[key]


# -- uses of low copies ----------------------------------------------------------------


class Uses:
    """Gives each reader its use of a low copy, and repeats weight views for uses.

    Autograd sums the gradients of a value's readers in the dtype of the value.  A low
    copy must not take that sum, because torch.autocast, which casts for each use, sums
    in fp32. Each use of a weight therefore gets an autograd node of its own
    (`low_weight`), and all uses of any other value share one node (`low_uses`); the sum
    is then made in fp32.

    A low value that an fp32 op reads through a cast gets its sum in fp32 as well: the
    gradients of its other readers flow to the cast, which rounds their sum once.  Each
    branch rounded by itself would leave the errors of both where the branches cancel.
    """

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
        self._low_reads, self._wide_reads = _count_reads(classified, lowered)
        # A view is one node for its readers in all regions; casts are not.
        self._reads_of_views: Counter[str] = Counter()
        for (value, _, _), reads in self._low_reads.items():
            self._reads_of_views[value] += reads
        self._shared: dict[tuple[str, int, int], Iterator[fx.Node]] = {}

    def use_of_copy(
        self, value: str, copy: fx.Node, reader: NodeFacts, epoch: int
    ) -> fx.Node:
        """The node for one reader: low `copy` of `value`, or a use of `copy`."""
        # No gradient arrives, so there is no sum to keep in fp32.
        if not (self._facts.nodes[value].requires_grad and reader.passes_gradient):
            return copy
        # Autocast has one low value here, and sums its gradients in its dtype.
        if value in self._facts.low_outside:
            return copy
        key = (value, reader.region, epoch)
        uses = self._low_reads[key]
        if uses < 2:
            return copy
        of_weight = self._facts.nodes[value].storage in self._weight_storage
        # `low_uses` keeps all gradients until the last one arrives: for a tied
        # embedding that would be a gradient as large as the table for each use.
        if of_weight or uses > MANY_USES:
            return self._emitted.use_of(value, copy)
        if key not in self._shared:
            wide = self._emitted.new[value]
            self._shared[key] = iter(self._emitted.uses_of(wide, copy, uses))
        return next(self._shared[key])

    def are_summed(self, value: str, reader: NodeFacts, epoch: int) -> bool:
        """Whether the gradient of a low `value` is summed at its cast to fp32.

        A write goes to the value itself, and not to its cast.
        """
        fact = self._facts.nodes[value]
        return (
            fact.requires_grad
            and reader.passes_gradient
            and (value, reader.region, epoch) in self._wide_reads
            and fact.storage not in self._facts.mutated | self._weight_storage
        )

    def use_beside(
        self, value: str, wide: fx.Node, low: fx.Node, reader: NodeFacts, epoch: int
    ) -> fx.Node:
        """The node for one reader of `low`; the gradient flows to `wide`, its cast."""
        key = (value, reader.region, epoch)
        if key not in self._shared:
            uses = self._low_reads[key]
            self._shared[key] = iter(self._emitted.uses_of(wide, low, uses))
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
            or self._reads_of_views[value] < 2
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


_Place = tuple[str, int, int]
"""A value, a region, and an epoch."""


def _count_reads(
    classified: Classified, lowered: frozenset[str]
) -> tuple[Mapping[_Place, int], frozenset[_Place]]:
    """How many low reads each value has in a place, and what is cast to fp32 there.

    Only reads by ops that pass a gradient back count.
    """
    low: Counter[_Place] = Counter()
    wide: set[_Place] = set()
    for name in classified.verdicts:
        fact = classified.facts.nodes[name]
        if not fact.passes_gradient:
            continue
        for operand, mode in classified.reads(name):
            place = operand.value, fact.region, operand.epoch
            # A read as "high" takes fp32 and one as "any" takes the value as it is:
            # neither reads the low copy.
            if mode != "any" and (mode == "high" or name not in lowered):
                wide.add(place)
            elif mode != "any":
                low[place] += 1
    return low, frozenset(wide)
