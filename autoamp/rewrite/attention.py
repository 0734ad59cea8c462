"""Puts torch's attention in the place of attention that is written out."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.nodes import KERNEL, ForChain, tensors_of, written_values
from autoamp.dtypes import HIGH_DTYPE, LOW_DTYPES
from autoamp.kernels.attention import WrittenAttention
from autoamp.kernels.chains import layout_of
from autoamp.kernels.hiding import Hidden
from autoamp.kernels.masks import ATTENTION as KERNEL_OP
from autoamp.kernels.table import ATTENTION
from autoamp.op_names import base_name

_ATEN = torch.ops.aten
_COPIES = frozenset(
    {"aten::clone", "aten::contiguous", "aten::flatten", "aten::reshape"}
)


def with_attention(
    graph: fx.Graph,
    every: Sequence[WrittenAttention],
    mode: compat.FakeTensorMode,
    exposed: Collection[int],
) -> bool:
    """Puts a call of attention in the place of each of `every`; whether any was put.

    Args:
        exposed: storages that somebody may write to.
    """
    put = [_put(graph, each, mode, exposed) for each in every]
    return any(put)


def may_be_one(graph: fx.Graph, found: WrittenAttention) -> bool:
    """Whether no change of mode, and no write to an operand, lies between the calls."""
    own = set(found.nodes)
    read = {n for node in found.nodes for n in node.all_input_nodes} - own
    storages = _storages(read)
    order = list(graph.nodes)
    first, last = (order.index(found.nodes[at]) for at in (0, -1))

    def parts(node: fx.Node) -> bool:
        if not isinstance(node.target, compat.OpOverload):
            return node.target is not operator.getitem and node.op != "get_attr"
        return not storages.isdisjoint(_storages(written_values(node)))

    return not any(parts(node) for node in order[first:last] if node not in own)


def _storages(nodes: Iterable[fx.Node]) -> set[int]:
    values = (tensor for node in nodes for tensor in tensors_of(node.meta.get("val")))
    return {compat.storage_id(value) for value in values}


def _put(
    graph: fx.Graph,
    found: WrittenAttention,
    mode: compat.FakeTensorMode,
    exposed: Collection[int],
) -> bool:
    result = found.result
    calls = _Calls(graph, result, mode)
    is_copied = _is_copied(result, exposed)
    made = _emitted(calls, found, is_copied)
    layouts = [layout_of(node.meta["val"]) for node in (made, result)]
    if layouts[0] != layouts[1] and not is_copied:
        for node in reversed(calls.made):
            graph.erase_node(node)
        return False
    made.meta["val"] = result.meta["val"]  # the storage that views of the result view
    result.replace_all_uses_with(made)
    for node in reversed(found.nodes):
        graph.erase_node(node)
    return True


def _emitted(calls: _Calls, found: WrittenAttention, any_layout: bool) -> fx.Node:
    """The calls that compute an attention; the last one has its result."""
    scores, values = found.scores, found.values
    query = calls.permuted(scores.left, scores.of_left)
    key = calls.permuted(scores.right, scores.turned)
    value = calls.permuted(values.right, values.of_right)
    flat = len(scores.of_left) == 3
    if flat:  # a batch of heads is a batch with one head each
        query, key, value = (
            calls(_ATEN.unsqueeze.default, n, 1) for n in (query, key, value)
        )
    mask = _mask(calls, found.masks, len(scores.of_left))
    args = (query, key, value, mask, 0.0, False)
    made = calls(KERNEL_OP, *args, scale=found.scale)
    made.meta[KERNEL] = ForChain(ATTENTION, len(found.nodes), widens=False)
    if flat:
        made = calls(_ATEN.squeeze.dim, made, 1)
    if not any_layout:
        # The kernels lay heads beside each other; what follows may view the result.
        layout = torch.contiguous_format
        made = calls(_ATEN.clone.default, made, memory_format=layout)
    return calls.permuted(made, values.of_result)


def _mask(calls: _Calls, masks: Sequence[Hidden], dimensions: int) -> fx.Node | None:
    """One mask that hides all that `masks` hide, of 2 or 4 dimensions."""
    totals = [m for m in masks if m.is_total]
    added = [_numbers(calls, m) for m in masks if not m.is_total]
    made: fx.Node | None = None
    for numbers in added:
        made = numbers if made is None else calls(_ATEN.add.Tensor, made, numbers)
    for total in totals:
        if added:
            drop = _negated(calls, total.mask) if total.keeps else total.mask
            made = calls(_ATEN.masked_fill.Scalar, made, drop, -math.inf)
        else:
            keep = total.mask if total.keeps else _negated(calls, total.mask)
            both = _ATEN.logical_and.default
            made = keep if made is None else calls(both, made, keep)
    return None if made is None else _as_many(calls, made, dimensions)


def _numbers(calls: _Calls, mask: Hidden) -> fx.Node:
    """What is added to the scores, so that a key is hidden."""
    if mask.value is None:
        return mask.mask
    hidden = _negated(calls, mask.mask) if mask.keeps else mask.mask
    wide = calls(_ATEN._to_copy.default, hidden, dtype=HIGH_DTYPE)
    return calls(_ATEN.mul.Tensor, wide, mask.value)


def _negated(calls: _Calls, mask: fx.Node) -> fx.Node:
    return calls(_ATEN.logical_not.default, mask)


def _as_many(calls: _Calls, mask: fx.Node, dimensions: int) -> fx.Node:
    """A mask of 2 or 4 dimensions; the scores have `dimensions`."""
    own = mask.meta["val"].dim()
    if own < 2:
        return calls(_ATEN.unsqueeze.default, mask, 0) if own else mask
    if own == 3:  # of scores of 3 dimensions the second is to be the heads
        return calls(_ATEN.unsqueeze.default, mask, 1 if dimensions == 3 else 0)
    return mask


def _is_copied(result: fx.Node, exposed: Collection[int]) -> bool:
    """Whether the result is only turned and copied, so that any layout will do."""
    views = [n for n in result.users if _is(n, "aten::transpose", "aten::permute")]
    copies = [n for each in (result, *views) for n in each.users if n not in views]
    return (
        bool(copies)
        and all(_is(copy, *_COPIES) for copy in copies)
        and all(_storage(node) not in exposed for node in (result, *copies))
    )


def _is(node: fx.Node, *names: str) -> bool:
    is_op = isinstance(node.target, compat.OpOverload)
    return is_op and base_name(node.target) in names  # type: ignore[arg-type]


def _storage(node: fx.Node) -> int:
    return compat.storage_id(node.meta["val"])


class _Calls:
    """Inserts calls before a node, as parts of what it does."""

    def __init__(
        self, graph: fx.Graph, before: fx.Node, mode: compat.FakeTensorMode
    ) -> None:
        self.graph = graph
        self.before = before
        self.mode = mode
        self.made: list[fx.Node] = []

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(target, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode, compat.outside_trace(), torch.no_grad():
            value = target(*values[0], **values[1])
        node.meta = {**self.before.meta, "val": value}
        self.made.append(node)
        return node

    def permuted(self, node: fx.Node, dimensions: Sequence[int]) -> fx.Node:
        if list(dimensions) == sorted(dimensions):
            return node
        *_, one, other = dimensions
        if node.target is _ATEN.transpose.int and one > other:
            source, *turned = node.args
            count = len(dimensions)
            if {d % count for d in turned} == {one, other}:  # type: ignore[operator]
                return source  # type: ignore[return-value]
        return self(_ATEN.permute.default, node, list(dimensions))


def with_own_attention(
    gm: fx.GraphModule, written: Callable[..., Any], other: Callable[..., Any] | None
) -> None:
    """Lets attention be differentiated as truly and as often as it was before.

    Args:
        written: called for attention that was written out.
        other: called for other attention in 16 bits on CPUs; None leaves it to torch.
    """
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.find_nodes(op="call_function", target=KERNEL_OP):
            note = node.meta.get(KERNEL)
            if note is not None and note.kernel == ATTENTION:
                node.target = written
            elif other is not None and _is_low_on_cpu(node):
                node.target = other
        module.recompile()


def _is_low_on_cpu(node: fx.Node) -> bool:
    value = node.meta["val"]
    return value.device.type == "cpu" and value.dtype in LOW_DTYPES.values()
