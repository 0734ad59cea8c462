"""Finds the parts of a graph that may be one kernel: chains with one result.

A chain reads one tensor, and besides it at most vectors along the last dimension (the
weight and bias of a norm).  No call outside a chain reads a value of the chain but its
result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE
from autoamp.kernels.shared.calls import dtype_of, is_cast, is_of, sizes_of
from autoamp.ops import mutates
from autoamp.rules import family

MOST_OPS = 16
"""The most ops of a chain.  The longest known, a layer norm written out, has 12."""

_MOST_IN_LINE = 4
"""The most ops at the end of a chain that form a line.  No kernel computes a mere line
of ops: each reads some value twice, such as `x * sigmoid(x)`."""

_REACH = 8
"""The most calls from the one that notices a chain to the end of the chain."""


@dataclass(frozen=True)
class Chain:
    """Calls that together compute one result.

    Attributes:
        nodes: the calls, in graph order; the last one makes the result.
        data: the tensor that the chain reads.
        vectors: the other tensors that the chain reads, each of the length of the last
            dimension of `data`.
        calls_inside: the calls in the graphs of a custom Function; 0 for no Function.
    """

    nodes: tuple[fx.Node, ...]
    data: fx.Node
    vectors: tuple[fx.Node, ...]
    calls_inside: int = 0

    @property
    def calls(self) -> int:
        """The number of calls the model made."""
        return self.calls_inside or len(self.nodes)

    @property
    def result(self) -> fx.Node:
        return self.nodes[-1]

    @property
    def is_pointwise(self) -> bool:
        """Whether each element of the result is made from one element of `data`."""
        return not self.vectors and all(
            torch.Tag.pointwise in node.target.tags or is_cast(node)  # type: ignore[union-attr]
            for node in self.nodes
        )


def chains_in(graph: fx.Graph) -> Iterator[list[Chain]]:
    """The chains that end at one call, the longest first, for each call they end at.

    Chains are sought behind the ops of the family `notices_a_chain`, such as `tanh`.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    breaks = [i for node, i in order.items() if _orders(node)]
    ends: set[fx.Node] = set()
    for node in graph.nodes:
        if is_of(node, family("notices_a_chain")):
            ends |= _reached_from(node)
    for end in sorted(ends, key=order.__getitem__, reverse=True):
        found = [
            chain
            for chain in _ending_at(end, order)
            if not _is_broken(chain, order, breaks)
        ]
        if found:
            yield found[::-1]


def _shape(node: fx.Node) -> tuple[int | str, ...]:
    return sizes_of(node.meta["val"])


def _may_join(node: fx.Node) -> bool:
    """Whether a call is a smooth function of elements or rows, in fp32."""
    return dtype_of(node) == HIGH_DTYPE and (
        is_of(node, family("in_chains")) or is_cast(node)
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
        vectors = [n for n in outside if _is_vector(n, shape)]
        data = [n for n in outside if n not in vectors]
        in_line &= len(data) < 2
        if not in_line and len(data) == 1 and len(vectors) <= 2:
            several = sum(not is_cast(n) for n in inside) > 1
            if several and _reads_as(data[0], shape):
                nodes = tuple(sorted(inside, key=order.__getitem__))
                vectors.sort(key=order.__getitem__)
                yield Chain(nodes, data[0], tuple(vectors))
        joining = [n for n in data if _joins(n, inside, shape)]
        if not joining or (in_line and len(inside) > _MOST_IN_LINE):
            return
        last = max(joining, key=order.__getitem__)
        inside.add(last)
        del outside[last]
        outside |= dict.fromkeys(last.all_input_nodes)


def _is_vector(node: fx.Node, shape: Sequence[Any]) -> bool:
    is_float = dtype_of(node) == HIGH_DTYPE
    return is_float and len(shape) > 1 and _shape(node) == (shape[-1],)


def _reads_as(node: fx.Node, shape: tuple[Any, ...]) -> bool:
    return dtype_of(node) == HIGH_DTYPE and _shape(node) == shape


def _joins(node: fx.Node, inside: Collection[fx.Node], shape: tuple[Any, ...]) -> bool:
    """Whether a call that is read inside a chain may be part of the chain."""
    if not _may_join(node) or not all(user in inside for user in node.users):
        return False
    return _shape(node) in (shape, (*shape[:-1], 1))


def _orders(node: fx.Node) -> bool:
    """Whether calls may not be moved past a call: it writes, or changes a mode."""
    if isinstance(node.target, compat.OpOverload):
        return mutates(node.target)
    opaque = isinstance(node.target, compat.HigherOrderOperator)
    return opaque or node.target in compat.MODE_CHANGES


def _is_broken(
    chain: Chain, order: Mapping[fx.Node, int], breaks: Sequence[int]
) -> bool:
    """Whether a write or a change of mode lies between the calls of a chain."""
    first, last = order[chain.nodes[0]], order[chain.result]
    return any(first < at < last for at in breaks)
