"""Has the backward make cheap values again, in place of keeping them.

    gelu = aten.gelu(h);  linear = aten.linear(gelu, w)

keeps `h` for the gradient of the GELU, and `gelu` for that of `w`.  In

    again = noted(gelu, aten.gelu, h)
    linear = made_again(aten.linear, [again], gelu, w)

the linear keeps the note, and the backward makes `gelu` of `h`.  A value need not be
kept if a cheap call makes it of values that are in memory anyway.

Values are chosen in graph order: when one is looked at, it is known of each operand of
its maker whether the operand stays, or is made again itself.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

from autoamp import compat
from autoamp.passes.functions import (
    attention,
    depthwise,
    index_add_,
    laid_out,
    layer_norm,
    low_uses,
    low_weight,
    low_weight_unscaled,
    low_weights,
    low_weights_unscaled,
    made_again,
    noted,
    rms_norm,
    saturating_cast,
    scale_grad,
    scaled_result,
    softmax,
    unscale_grad,
    unscale_grad_,
    unscale_half,
    unscaled_weights,
    with_dtypes,
)
from autoamp.passes.functions.made_again import OWN
from autoamp.passes.ops import aliasing_arguments, is_pointwise, is_random, mutates
from autoamp.passes.see.facts import Facts
from autoamp.passes.see.nodes import operands_in, written_values
from autoamp.passes.write.copied import copied

_ATEN = torch.ops.aten

_NORMS = frozenset(
    {
        *(_ATEN.group_norm.default, _ATEN.layer_norm.default, _ATEN.rms_norm.default),
        *(layer_norm, rms_norm),
    }
)
_CASTS = frozenset({_ATEN._to_copy.default, saturating_cast})

_SHOWS: dict[Any, slice] = {
    **dict.fromkeys((low_uses, low_weight, low_weight_unscaled), slice(1, 2)),
    **dict.fromkeys((low_weights, low_weights_unscaled, unscaled_weights), slice(None)),
    **dict.fromkeys((scale_grad, unscale_grad, unscale_half), slice(0, 1)),
    **dict.fromkeys((index_add_, unscale_grad_), slice(0, 1)),
    operator.getitem: slice(0, 1),
}
"""For functions whose results show the memory of operands, the places of these."""

_WRITERS = (index_add_, unscale_grad_)
"""Functions of ours that write to their first operand."""

_KEEP_NOTHING = frozenset(
    {*_SHOWS, _ATEN._to_copy.default, laid_out, scaled_result, with_dtypes}
) - {index_add_}

_AS_TORCH = frozenset({attention, depthwise, layer_norm, rms_norm, softmax})
"""Functions of ours that keep those operands which torch's op keeps."""

_DEEPEST = 2
"""How many calls in a row a value may be made by: a norm, and the cast of its result.

Without a bound a backward of n pointwise calls could make n values for each."""


def with_values_made_again(
    gm: fx.GraphModule,
    before: fx.GraphModule,
    facts: Facts,
    left: Collection[str] = (),
) -> fx.GraphModule:
    """`gm` with the values noted that a backward can make; itself if there are none.

    Graphs inside stay as they are: a checkpoint keeps nothing of its body.

    Args:
        before: the captured graph, which `facts` are of.
        left: names of nodes that stay as they are.
    """
    plan = _Plan(gm.graph, before.graph, facts, left)
    values = plan.chosen()
    if not values:
        return gm
    copy, new = copied(gm)
    graph = copy.graph
    notes: dict[fx.Node, fx.Node] = {}
    for value in gm.graph.nodes:
        if value not in plan.depths:
            continue
        args, kwargs = fx.map_arg(
            (value.args, value.kwargs), lambda n: notes.get(n) or new[n]
        )
        with graph.inserting_after(new[value]):
            given, name = (new[value], _named(value.target), *args), value.name
            notes[value] = graph.create_node(
                "call_function", noted, given, kwargs, f"{name}_again"
            )
    covers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for value, readers in values.items():
        for reader in readers:
            covers[reader].append(notes[value])
    for reader, known in covers.items():
        call = new[reader]
        call.args = (_named(call.target), tuple(known), *call.args)
        call.target = made_again
    return copy


def _named(target: Any) -> Any:
    """An op, or the name of a function of ours: a graph is printed with either."""
    return target if isinstance(target, compat.OpOverload) else target.__name__


class _Plan:
    """Which values are made again.

    Attributes:
        roots: for each node the nodes whose memory its result may show.
        readers: for each value the calls that may keep it.
        kept: the values that a call is known to keep.
        own: the values that their own maker keeps.
        fixed: values that stay: someone holds them whom no note reaches.
        written: values whose memory is written to.
        depths: for each value that is noted, how many calls in a row make it.
        found: the values that are made again, each with the calls that would keep it.
    """

    def __init__(
        self,
        graph: fx.Graph,
        before: fx.Graph,
        facts: Facts,
        left: Collection[str],
    ) -> None:
        self.graph, self.facts, self.left = graph, facts, left
        self.before = {n.name: n for n in before.nodes}
        self.roots: dict[fx.Node, set[fx.Node]] = {}
        self.readers: dict[fx.Node, dict[fx.Node, None]] = defaultdict(dict)
        self.kept: set[fx.Node] = set()
        self.own: set[fx.Node] = set()
        self.fixed: set[fx.Node] = set()
        self.written: set[fx.Node] = set()
        self.depths: dict[fx.Node, int] = {}
        self.found: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            self._visit(node)

    def chosen(self) -> dict[fx.Node, list[fx.Node]]:
        """The values that are made again, each with the calls that would keep it."""
        found, wanted = self.found, self.kept - self.fixed - self.own
        for node in self.graph.nodes:
            readers = [*self.readers[node]] if node in wanted else []
            spared = any(n.name in self.left for n in (node, *readers))
            if readers and not spared and self._note(node):
                found[node] = readers
        # A note that was tried for a value which stayed has no reader.
        needed, pending = set[fx.Node](), [*found]
        while pending:
            node = pending.pop()
            needed.add(node)
            pending += [n for n in node.all_input_nodes if n in self.depths]
        self.depths = {n: d for n, d in self.depths.items() if n in needed}
        return found

    def _visit(self, node: fx.Node) -> None:
        self.roots[node] = self._memory(node)
        if node.op == "output":
            self.fixed |= self._of(node.all_input_nodes)
        if node.op != "call_function":
            return
        wrote = written_values(node)
        if node.target in _WRITERS:
            wrote = node.all_input_nodes[:1]
        self.written |= self._of(wrote)
        if node.target in _KEEP_NOTHING or node.target in compat.MODE_CHANGES:
            return
        fact = self.facts.nodes.get(node.name)
        if fact is not None and not fact.requires_grad:
            return  # autograd records nothing
        kept = self._kept(node)
        reads = node.all_input_nodes if kept is None else kept
        self.kept |= self._of(kept or ())
        is_op = isinstance(node.target, compat.OpOverload)
        if wrote or not (is_op or node.target in OWN.values()):
            self.fixed |= self._of(reads)
        for value in self._of(reads):
            self.readers[value][node] = None

    def _memory(self, node: fx.Node) -> set[fx.Node]:
        """The nodes whose memory the result of a node may show; itself if of none."""
        shown: list[fx.Node] = []
        if node.target in _SHOWS:
            places = node.args[_SHOWS[node.target]]
            fx.map_arg(places, shown.append)
        elif isinstance(node.target, compat.OpOverload):
            shown = operands_in(node, aliasing_arguments(node.target))
        return self._of(shown) or {node}

    def _of(self, nodes: Collection[fx.Node]) -> set[fx.Node]:
        return set[fx.Node]().union(*(self.roots[n] for n in nodes))

    def _kept(self, node: fx.Node) -> list[fx.Node] | None:
        """The operands that autograd keeps of a call; None where that is not known."""
        was = self.before.get(node.name)
        if was is None or (was.target is not node.target) > (node.target in _AS_TORCH):
            return None
        if node.name not in self.facts.kept:
            return []
        kept = self.facts.kept[node.name]
        if kept.result:
            self.own.add(node)
        reads, rereads = list[fx.Node](), list[fx.Node]()
        fx.map_arg((was.args, was.kwargs), reads.append)
        fx.map_arg((node.args, node.kwargs), rereads.append)
        if len(reads) != len(rereads):
            return None
        pairs = zip(reads, rereads, strict=True)
        return [now for one, now in pairs if one.name in kept.operands]

    def _note(self, node: fx.Node) -> bool:
        """Whether a value can be made again; notes how deep its makers are then."""
        if node in self.depths:
            return True
        if not self._is_cheap(node) or node in self.written:
            return False
        depth = 1
        for operand in node.all_input_nodes:
            if self._stays(operand):
                continue
            # Of a value that is made again a view would have to be made as well.
            is_whole = self.roots[operand] == {operand}
            if not is_whole or not self._note(operand):
                return False
            depth = max(depth, 1 + self.depths[operand])
        if depth > _DEEPEST:
            return False
        self.depths[node] = depth
        return True

    def _is_cheap(self, node: fx.Node) -> bool:
        value, target = node.meta.get("val"), node.target
        if not isinstance(value, Tensor) or self.roots[node] != {node}:
            return False
        if target in _NORMS or target in _CASTS:
            return True
        return isinstance(target, compat.OpOverload) and (
            is_pointwise(target) and not is_random(target) and not mutates(target)
        )

    def _stays(self, operand: fx.Node) -> bool:
        """Whether the numbers of an operand are in memory until the backward."""
        if isinstance(
            operand.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat)
        ):
            return True
        roots = self.roots[operand]
        return not roots & self.written and all(map(self._is_held, roots))

    def _is_held(self, root: fx.Node) -> bool:
        if root in self.found:
            return False
        if root in self.kept or root in self.own:
            return True
        # A weight, or a copy of one; the caller may drop another input.
        is_input = root.op in ("placeholder", "get_attr")
        is_weight = root.name in self.facts.weights or root.name not in self.before
        return is_input and is_weight
