"""Finds attention that is written out: `softmax(q @ k.T * scale + mask) @ v`.

What lies between the product and the softmax is read as steps, in the order in which
they were written (`function/scores.py`): factors, numbers that are added, fills.
The op that takes the place of the calls, `autoamp::attention`, follows these steps to
the letter, so that nothing has to be known of a mask's elements.  The op computes the
scores and their softmax in fp32, a block at a time, where the calls write both to
memory and keep both for the backward.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE
from autoamp.kernels.attention.function.scores import Kind
from autoamp.kernels.attention.products import Product, is_in_order, product_of
from autoamp.kernels.attention.steps import LARGEST_FILL, Written, fills, step_of
from autoamp.kernels.shared.calls import dtype_of, is_cast, name_of, sizes_of
from autoamp.ops import mutates


@dataclass(frozen=True)
class WrittenAttention:
    """Calls that together are one attention.

    Attributes:
        nodes: the calls, in graph order; the last one makes the result.
        scores: the product of queries and keys.
        values: the product of weights and values.
        steps: the changes of the scores, in the order of the calls.
    """

    nodes: tuple[fx.Node, ...]
    scores: Product
    values: Product
    steps: tuple[Written, ...]

    @property
    def result(self) -> fx.Node:
        return self.nodes[-1]


def written_attention(graph: fx.Graph) -> Iterator[WrittenAttention]:
    """The attentions of `graph` that `autoamp::attention` computes.

    Attention that the op does not compute is left alone: with active dropout (the op
    would draw another mask), with weights that other calls read, and with trained
    numbers added to the scores.
    """
    if compat.cpu_attention() is None:
        return
    softmaxes = softmaxes_in(graph)
    if not softmaxes:
        return
    order = {node: i for i, node in enumerate(graph.nodes)}
    trained = _trained(graph)
    for softmax in softmaxes:
        found = _around(softmax, order, trained)
        if found is not None:
            yield found


def _trained(graph: fx.Graph) -> set[fx.Node]:
    """The float values that a gradient may flow through.

    A gradient flows through all values of a storage into which a trained value was
    written, under whatever name.
    """
    found: set[fx.Node] = set()
    storages: set[int] = set()
    while True:
        known = len(storages)
        for node in graph.nodes:
            value = node.meta.get("val")
            is_tensor = isinstance(value, torch.Tensor)
            if is_tensor and not value.is_floating_point():
                continue
            if is_tensor and compat.storage_id(value) in storages:
                found.add(node)
            elif _is_trained(node, found):
                found.add(node)
                is_op = isinstance(node.target, compat.OpOverload)
                if is_tensor and is_op and mutates(node.target):
                    storages.add(compat.storage_id(value))
        if len(storages) == known:
            return found


def _is_trained(node: fx.Node, found: Collection[fx.Node]) -> bool:
    if node.op in ("placeholder", "get_attr"):
        return bool(node.meta.get("autoamp_requires_grad"))
    detached = name_of(node) == "aten::detach"
    return not detached and any(n in found for n in node.all_input_nodes)


def softmaxes_in(graph: fx.Graph) -> list[fx.Node]:
    """The calls of softmax over the last dimension, in fp32."""
    found = graph.find_nodes(op="call_function", target=torch.ops.aten.softmax.int)
    return [node for node in found if _is_softmax(node)]


def _is_softmax(node: fx.Node) -> bool:
    if dtype_of(node) != HIGH_DTYPE:
        return False
    last = node.meta["val"].dim() - 1
    dtype = node.kwargs.get("dtype", node.args[2] if len(node.args) > 2 else None)
    return node.args[1] in (-1, last) and dtype in (None, HIGH_DTYPE)


def _around(
    softmax: fx.Node, order: Mapping[fx.Node, int], trained: Collection[fx.Node]
) -> WrittenAttention | None:
    """The attention whose weights `softmax` makes."""
    after = _to_values(softmax)
    before = _to_scores(softmax, trained)
    if after is None or before is None:
        return None
    calls, scores, steps = before
    values = product_of(after[-1])
    assert values is not None
    plain = is_in_order(scores.of_result) and is_in_order(values.of_left)
    if not plain or not _fits(scores, values):
        return None
    nodes = tuple(sorted({*calls, softmax, *after}, key=order.__getitem__))
    return WrittenAttention(nodes, scores, values, steps)


def _to_values(softmax: fx.Node) -> list[fx.Node] | None:
    """The calls from the softmax to its product with the values."""
    found: list[fx.Node] = []
    node = softmax
    while len(node.users) == 1:
        (reader,) = node.users
        found.append(reader)
        product = product_of(reader)
        if product is not None:
            return found if product.left is node else None
        if not _changes_nothing(reader):
            return None
        node = reader
    return None


def _changes_nothing(node: fx.Node) -> bool:
    name = name_of(node)
    if name == "aten::dropout":
        probability, is_training = node.args[1:3]
        return not probability or not is_training
    return name in ("aten::contiguous", "aten::clone") or is_cast(node)


def _to_scores(
    softmax: fx.Node, trained: Collection[fx.Node]
) -> tuple[list[fx.Node], Product, tuple[Written, ...]] | None:
    """The calls from the scores to their softmax, and what these calls do."""
    found: list[fx.Node] = []
    steps: list[Written] = []
    scale = 1.0
    node: Any = softmax.args[0]
    while isinstance(node, fx.Node) and all(u in (softmax, *found) for u in node.users):
        if dtype_of(node) != HIGH_DTYPE or node.target is torch.ops.aten.softmax.int:
            return None
        found.append(node)
        scores = product_of(node)
        if scores is not None:
            return found, scores, tuple(steps[::-1])
        step = step_of(node, trained)
        if step is not None:
            read, made = step
            if any(fill.number * scale > LARGEST_FILL for fill in fills([made])):
                return None
            if made.kind is Kind.SCALE:
                scale *= made.number
            steps.append(made)
            node = read
            continue
        if not _changes_nothing(node):
            shifting = _shifting(node)
            if shifting is None or any(s.number > -math.inf for s in fills(steps)):
                return None  # a number that is filled in later would count from there
            found += shifting
        node = node.args[0]
    return None


def _shifting(node: fx.Node) -> list[fx.Node] | None:
    """The calls that make the number that `x - x.amax(-1, keepdim=True)` subtracts.

    A softmax does not feel it.
    """
    if name_of(node) not in ("aten::sub", "aten::sub_") or len(node.args) != 2:
        return None
    scores, made = node.args
    found: list[fx.Node] = []
    while isinstance(made, fx.Node) and len(made.users) == 1 and made is not scores:
        found.append(made)
        if name_of(made) in ("aten::max", "aten::amax"):
            return found if _is_largest(made, scores) else None
        if made.target is not operator.getitem and name_of(made) != "aten::detach":
            return None
        made = made.args[0]
    return None


def _is_largest(node: fx.Node, scores: Any) -> bool:
    """Whether a call gives the largest score of each row, as a dimension of size 1."""
    of, *rest = node.args
    dimensions, keeps = (*rest, False)[:2] if rest else (None, False)
    last = scores.meta["val"].dim() - 1
    of_rows = dimensions in (-1, last, [-1], [last])
    return of is scores and of_rows and keeps is True


def _fits(scores: Product, values: Product) -> bool:
    """Whether the fused kernels take the sizes: else torch computes in 16 bits."""
    query = _sizes(scores.left, scores.of_left)
    key, value = (
        _sizes(scores.right, scores.turned),
        _sizes(values.right, values.of_right),
    )
    fitting = len(query) in (3, 4) and query[:-2] == key[:-2] and query[-1] == key[-1]
    return fitting and key == value and 0 not in (*query, *key)


def _sizes(node: fx.Node, dimensions: Sequence[int]) -> list[int | str]:
    """The sizes of an operand in the order of `dimensions`."""
    sizes = sizes_of(node.meta["val"])
    return [sizes[d] for d in dimensions]
