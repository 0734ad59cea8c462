"""Finds the chains of calls that are one kernel, and puts the kernel in their place.

A chain has one result, and reads one tensor, and besides it at most vectors along the
last dimension (the weight and bias of a norm).  No call outside a chain reads a value
of the chain but its result.  `spelled.py` tells which kernel a chain computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE, LOW_DTYPES
from autoamp.passes.functions.norms import softmax
from autoamp.passes.kernels.match import (
    Allowed,
    Chain,
    dtype_of,
    exposed_storages,
    is_cast,
    is_of,
    layout_of,
    name_of,
    sizes_of,
)
from autoamp.passes.kernels.normal_forms import OPS
from autoamp.passes.kernels.spelled import Recognised, functions_in, recognised
from autoamp.passes.ops import mutates
from autoamp.passes.rules import family
from autoamp.passes.see.nodes import KERNEL, ForChain

MOST_OPS = 16
"""The most ops of a chain.  The longest known, a layer norm written out, has 12."""

_MOST_IN_LINE = 4
"""The most ops at the end of a chain that form a line.  No kernel computes a mere line
of ops: each reads some value twice, such as `x * sigmoid(x)`."""

_REACH = 8
"""The most calls from the one that notices a chain to the end of the chain."""


def chains_in(graph: fx.Graph) -> Iterator[list[Chain]]:
    """The chains that end at one call, the longest first, for each call they end at.

    Chains are sought behind the ops of the family `notices_a_chain`, such as `tanh`.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    # A kernel stands where the chain ended: it would read what a write in between has
    # left.
    breaks = [i for node, i in order.items() if _orders(node)]
    ends: set[fx.Node] = set()
    for node in graph.nodes:
        if is_of(node, family("notices_a_chain")):
            ends |= _reached_from(node)
    for end in sorted(ends, key=order.__getitem__, reverse=True):
        chains = [
            chain
            for chain in _ending_at(end, order)
            if not any(order[chain.nodes[0]] < at < order[end] for at in breaks)
        ]
        if chains:
            # A long chain before its parts: a layer norm is one kernel, not a variance
            # and a rest.
            yield chains[::-1]


def _shape(node: fx.Node) -> tuple[int | str, ...]:
    return sizes_of(node.meta["val"])


def _may_join(node: fx.Node) -> bool:
    """Whether a call is an op that chains are made of, in fp32."""
    return dtype_of(node) == HIGH_DTYPE and (
        name_of(node).removeprefix("aten::") in OPS or is_cast(node)
    )


def _reached_from(node: fx.Node) -> set[fx.Node]:
    """The calls that a chain through `node` may end at."""
    found, front = {node}, [node]
    for _ in range(_REACH):
        front = [u for n in front for u in n.users if u not in found and _may_join(u)]
        found.update(front)
    return {n for n in found if _may_join(n) and not is_cast(n)}


def _ending_at(end: fx.Node, order: Mapping[fx.Node, int]) -> Iterator[Chain]:
    """The chains that end at one call, shorter ones first."""
    shape = _shape(end)
    if not shape:
        return
    inside, outside = {end}, dict.fromkeys(end.all_input_nodes)
    in_line = True
    while len(inside) <= MOST_OPS:
        vectors = [
            n
            for n in outside
            if len(shape) > 1
            and dtype_of(n) == HIGH_DTYPE
            and _shape(n) == (shape[-1],)
        ]
        data = [n for n in outside if n not in vectors]
        in_line &= len(data) < 2
        # One tensor and a weight and bias are all that any kernel takes.
        if not in_line and len(data) == 1 and len(vectors) <= 2:
            several = sum(not is_cast(n) for n in inside) > 1
            is_high = dtype_of(data[0]) == HIGH_DTYPE
            if several and is_high and _shape(data[0]) == shape:
                nodes = tuple(sorted(inside, key=order.__getitem__))
                vectors.sort(key=order.__getitem__)
                yield Chain(nodes, data[0], tuple(vectors))
        # A call joins that nothing outside reads: an element of the result, or a number
        # of each row.
        joining = [
            n
            for n in data
            if _may_join(n)
            and all(user in inside for user in n.users)
            and _shape(n) in (shape, (*shape[:-1], 1))
        ]
        if not joining or (in_line and len(inside) > _MOST_IN_LINE):
            return
        # The latest call first, so that all readers of a call are inside before the
        # call joins.
        last = max(joining, key=order.__getitem__)
        inside.add(last)
        del outside[last]
        outside |= dict.fromkeys(last.all_input_nodes)


def _orders(node: fx.Node) -> bool:
    """Whether calls may not be moved past a call: it writes, or changes a mode."""
    if isinstance(node.target, compat.OpOverload):
        return mutates(node.target)
    opaque = isinstance(node.target, compat.HigherOrderOperator)
    return opaque or node.target in compat.MODE_CHANGES


@dataclass(frozen=True)
class Replacement:
    """A chain, the kernel for it, and the note to leave."""

    chain: Chain
    kernel: Recognised
    note: ForChain


def replaceable(
    graph: fx.Graph, mode: compat.FakeTensorMode, allowed: Allowed
) -> list[Replacement]:
    """The chains to replace; no two share a call."""
    taken: set[fx.Node] = set()
    layouts = _Layouts(mode)
    replacements: list[Replacement] = []
    chains = itertools.chain.from_iterable(chains_in(graph))
    candidates: Iterator[tuple[Chain, Callable[[], Recognised | None]]] = (
        itertools.chain(
            functions_in(graph), ((c, partial(recognised, c)) for c in chains)
        )
    )
    for chain, recognise in candidates:
        if not taken.isdisjoint(chain.nodes) or not allowed.takes(chain.nodes):
            continue
        kernel = recognise()
        if kernel is None or kernel.kernel.name in allowed.off:
            continue
        # A result with other strides than the chain's could not be viewed as the
        # chain's is.
        if layouts.of(chain, kernel) != layout_of(chain.result.meta["val"]):
            continue
        widens = any(map(allowed.widens, chain.nodes))
        note = ForChain(kernel.kernel.name, chain.calls, widens)
        taken.update(chain.nodes)
        replacements.append(Replacement(chain, kernel, note))
    # Softmax keeps its result for the backward; a later write to it would raise there.
    if any(r.kernel.kernel.keeps_result for r in replacements):
        exposed = exposed_storages(graph)
        replacements = [
            r
            for r in replacements
            if not r.kernel.kernel.keeps_result
            or compat.storage_id(r.chain.result.meta["val"]) not in exposed
        ]
    return replacements


class _Layouts:
    """The layouts of kernels' results, asked of fake tensors once for each layout."""

    def __init__(self, mode: compat.FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[Any, tuple[int | str, ...]] = {}

    def of(self, chain: Chain, kernel: Recognised) -> tuple[int | str, ...]:
        """The shape and strides of the kernel's result."""
        data: torch.Tensor = chain.data.meta["val"]
        layout = layout_of(data)
        # The layers of a network ask the same: one fake call answers for all.
        key = (kernel, data.dim(), layout)
        if key in self._known:
            return self._known[key]
        with self._mode, compat.outside_trace(), torch.no_grad():
            made = kernel(data, [n.meta["val"] for n in chain.vectors])
        found = layout_of(made)
        self._known[key] = found
        return found


def put_kernels(graph: fx.Graph, mode: compat.FakeTensorMode, allowed: Allowed) -> bool:
    """Puts a kernel in the place of each chain of `graph`; whether any was put."""
    found = replaceable(graph, mode, allowed)
    made: dict[fx.Node, fx.Node] = {}
    for replacement in found:
        chain, known = replacement.chain, replacement.kernel
        # A chain may read the result of one that has just been replaced and erased.
        data, *vectors = (made.get(n, n) for n in (chain.data, *chain.vectors))
        weight = None if known.weight is None else vectors[known.weight]
        bias = None if known.bias is None else vectors[known.bias]
        size = chain.data.meta["val"].shape[-1]
        kernel = known.kernel
        with graph.inserting_before(chain.result):
            rest = kernel.arguments(size, weight, bias, known.epsilon)
            args = (data, *rest)
            node = graph.call_function(kernel.op, args, dict(kernel.keywords))
        node.meta = {**chain.result.meta, KERNEL: replacement.note}
        chain.result.replace_all_uses_with(node)
        made[chain.result] = node
        for each in reversed(chain.nodes):
            graph.erase_node(each)
    return bool(found)


_SOFTMAX = torch.ops.aten.softmax.int


def softmax_at(node: fx.Node) -> Any:
    """The function to call at a node: ours for a low softmax that stands for a chain.

    A softmax that the model calls itself is torch's, as it is under autocast.

    Returns:
        The node's own target everywhere else.
    """
    if node.target is not _SOFTMAX or node.meta.get(KERNEL) is None:
        return node.target
    is_low = node.meta["val"].dtype in LOW_DTYPES.values()
    return softmax if is_low else node.target
