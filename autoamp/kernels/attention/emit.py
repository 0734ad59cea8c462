"""Puts one call in the place of attention that is written out."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.nodes import KERNEL, ForChain
from autoamp.kernels.attention.condition import replaceable
from autoamp.kernels.attention.function import WRITTEN_ATTENTION
from autoamp.kernels.attention.function.scores import Kind
from autoamp.kernels.attention.recognise import WrittenAttention
from autoamp.kernels.attention.steps import Written
from autoamp.kernels.causal_mask.recognise import (
    LOWEST,
    hides_later_keys,
    shows_no_later_keys,
)
from autoamp.kernels.shared.calls import is_of, layout_of
from autoamp.kernels.shared.condition import Allowed, exposed_storages
from autoamp.kernels.shared.positions.reading import Positions
from autoamp.kernels.shared.positions.sizes import shape_of
from autoamp.kernels.table import ATTENTION, CAUSAL_MASK

_ATEN = torch.ops.aten
_TURNS = frozenset({"aten::transpose", "aten::permute"})
_COPIES = frozenset(
    {"aten::clone", "aten::contiguous", "aten::flatten", "aten::reshape"}
)


def put_attention(
    graph: fx.Graph, mode: compat.FakeTensorMode, allowed: Allowed
) -> bool:
    """Puts a call in the place of each attention written out; whether any was put.

    A mask that is the causal one is told and not given, unless `allowed` has that off.
    """
    every = replaceable(graph, allowed)
    if not every:
        return False
    exposed = exposed_storages(graph)
    positions = None if CAUSAL_MASK in allowed.off else Positions(graph)
    put = [_put(graph, each, mode, exposed, positions) for each in every]
    return any(put)


def _put(
    graph: fx.Graph,
    found: WrittenAttention,
    mode: compat.FakeTensorMode,
    exposed: Collection[int],
    positions: Positions | None,
) -> bool:
    result = found.result
    calls = _Calls(graph, result, mode)
    is_copied = _is_copied(result, exposed)
    steps = [_told(step, found, positions) for step in found.steps]
    made = _emitted(calls, found, steps, is_copied)
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


def _told(
    step: Written, found: WrittenAttention, positions: Positions | None
) -> Written:
    """A step, told by positions if its mask hides the later keys and nothing else."""
    if positions is None or step.tensor is None:
        return step
    scores = found.scores
    rows = shape_of(scores.left)[scores.of_left[-2]]
    columns = shape_of(scores.right)[scores.of_right[-1]]
    given = (step.tensor, positions, [rows, columns])
    is_fill = step.kind is Kind.FILL
    if not (hides_later_keys if is_fill else shows_no_later_keys)(*given):
        return step
    # Every query sees the first key, beside which the lowest number has no weight.
    is_lowest = step.kind is Kind.ADD or step.number <= LOWEST
    return Written(Kind.CAUSAL, -math.inf if is_lowest else step.number)


def _emitted(
    calls: _Calls, found: WrittenAttention, steps: Sequence[Written], any_layout: bool
) -> fx.Node:
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
    tensors = [
        calls(_ATEN.unsqueeze.default, n, 1) if flat and n.meta["val"].dim() == 3 else n
        for step in steps
        if (n := step.tensor) is not None
    ]
    kinds, numbers = [int(s.kind) for s in steps], [s.number for s in steps]
    made = calls(WRITTEN_ATTENTION, query, key, value, tensors, kinds, numbers)
    made.meta[KERNEL] = ForChain(ATTENTION, len(found.nodes), widens=False)
    if flat:
        made = calls(_ATEN.squeeze.dim, made, 1)
    if not any_layout:
        # The kernels lay heads beside each other, and later calls may view the result.
        layout = torch.contiguous_format
        made = calls(_ATEN.clone.default, made, memory_format=layout)
    return calls.permuted(made, values.of_result)


def _is_copied(result: fx.Node, exposed: Collection[int]) -> bool:
    """Whether the result is only turned and copied, so that any layout will do."""
    views = [n for n in result.users if is_of(n, _TURNS)]
    copies = [n for each in (result, *views) for n in each.users if n not in views]
    return (
        bool(copies)
        and all(is_of(copy, _COPIES) for copy in copies)
        and all(_storage(node) not in exposed for node in (result, *copies))
    )


def _storage(node: fx.Node) -> int:
    return compat.storage_id(node.meta["val"])


class _Calls:
    """Inserts calls before a node, as parts of the work of that node."""

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
