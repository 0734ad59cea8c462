"""Puts one call in the place of attention written out: `softmax(q @ k.T + mask) @ v`.

The calls between the product and the softmax are read as steps, in the order in which
they were written (`functions/attention.py`): factors, numbers that are added, fills.
The op that takes the place of the calls, `autoamp::attention`, follows these steps to
the letter, so that nothing has to be known of a mask's elements.  The op computes the
scores and their softmax in fp32, a block at a time, where the calls write both to
memory and keep both for the backward.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE, LOW_DTYPES
from autoamp.passes.decide.devices import Device
from autoamp.passes.functions.attention import FILLS, WRITTEN_ATTENTION, Kind
from autoamp.passes.kernels.causal_mask import ATTENTION as TORCH_ATTENTION
from autoamp.passes.kernels.causal_mask import LOWEST, Masks
from autoamp.passes.kernels.match import (
    Allowed,
    dtype_of,
    exposed_storages,
    is_cast,
    is_of,
    layout_of,
    name_of,
    number_of,
    sizes_of,
)
from autoamp.passes.kernels.table import ATTENTION, CAUSAL_MASK
from autoamp.passes.ops import base_name, mutates
from autoamp.passes.options import PassOptions
from autoamp.passes.see.nodes import KERNEL, ForChain, tensors_of, written_values

Dimensions = tuple[int, ...]
"""An order of a tensor's dimensions, as `permute` takes it."""


@dataclass(frozen=True)
class Product:
    """A product of matrices: `left.permute(rows) @ right.permute(columns)`, permuted.

    Attributes:
        left, right: the operands.
        of_left: the dimensions of `left` as batch, rows, inner.
        of_right: the dimensions of `right` as batch, inner, columns.
        of_result: the dimensions of that product, in the order of the result.
    """

    left: fx.Node
    right: fx.Node
    of_left: Dimensions
    of_right: Dimensions
    of_result: Dimensions

    @property
    def turned(self) -> Dimensions:
        """The dimensions of `right` as batch, columns, inner."""
        *batch, inner, columns = self.of_right
        return (*batch, columns, inner)


def is_in_order(dimensions: Dimensions) -> bool:
    """Whether to permute by `dimensions` changes nothing."""
    return dimensions == tuple(range(len(dimensions)))


def product_of(node: fx.Node) -> Product | None:
    """The product that a call computes; None where it computes none of batches."""
    if not isinstance(node.target, compat.OpOverload) or node.kwargs:
        return None
    name = base_name(node.target)
    if name in ("aten::matmul", "aten::bmm"):
        return _plain_product(*node.args[:2])
    if name == "aten::einsum" and len(node.args) == 2:
        return _of_equation(*node.args)
    return None


def _plain_product(left: Any, right: Any) -> Product | None:
    sizes = [node.meta["val"].dim() for node in (left, right)]
    # `matmul` would broadcast batches, which the kernel does not.
    if sizes[0] != sizes[1] or sizes[0] < 3:
        return None
    ordered = tuple(range(sizes[0]))
    return Product(left, right, ordered, ordered, ordered)


def _of_equation(equation: Any, operands: Any) -> Product | None:
    """The product of an equation in which each letter names one dimension."""
    if not isinstance(equation, str) or equation.count("->") != 1 or len(operands) != 2:
        return None
    given, result = equation.split("->")
    if given.count(",") != 1:
        return None
    sides = [re.findall(r"\.\.\.|[a-zA-Z]", part) for part in given.split(",")]
    values = [node.meta["val"] for node in operands]
    more = max(
        value.dim() - len(side) + 1 if "..." in side else 0
        for side, value in zip(sides, values, strict=True)
    )
    every = [*sides, re.findall(r"\.\.\.|[a-zA-Z]", result)]
    left, right, after = (_with_names(side, more) for side in every)
    if [len(left), len(right)] != [value.dim() for value in values]:
        return None  # an ellipsis stands for fewer dimensions on one side
    return _of_letters(operands, left, right, after)


def _with_names(letters: list[str], more: int) -> list[str]:
    """`letters` with a name for each of the `more` dimensions of an ellipsis."""
    rest = [f"...{i}" for i in range(more)]
    return [name for x in letters for name in (rest if x == "..." else [x])]


def _of_letters(
    operands: Sequence[fx.Node], left: list[str], right: list[str], after: list[str]
) -> Product | None:
    if any(len(set(part)) != len(part) for part in (left, right, after)):
        return None  # a diagonal
    batch = [x for x in after if x in left and x in right]
    rows, columns = ([x for x in after if x not in other] for other in (right, left))
    inner = [x for x in left if x in right and x not in after]
    if not len(rows) == len(columns) == len(inner) == 1 or not batch:
        return None
    if set(left) | set(right) != {*after, *inner}:
        return None  # a dimension of one operand alone that is summed
    product = [*batch, *rows, *columns]
    return Product(
        operands[0],
        operands[1],
        tuple(left.index(x) for x in (*batch, *rows, *inner)),
        tuple(right.index(x) for x in (*batch, *inner, *columns)),
        tuple(product.index(x) for x in after),
    )


_FLOATS = (HIGH_DTYPE, *LOW_DTYPES.values())

LARGEST_FILL = -1e4
"""The largest number that is filled in.  Scores filled with a larger one may well have
a weight, and the kernel would be run in vain."""


@dataclass(frozen=True)
class Written:
    """A step, as `functions.attention.Step` is one, with a node for its tensor."""

    kind: Kind
    number: float = 0.0
    tensor: fx.Node | None = None


def fills(steps: Sequence[Written]) -> list[Written]:
    """The steps that fill in a number."""
    return [step for step in steps if step.kind in FILLS]


def step_of(
    node: fx.Node, trained: Collection[fx.Node]
) -> tuple[fx.Node, Written] | None:
    """The scores that a call reads, and the change that the call makes to them.

    Args:
        trained: the values that a gradient may flow through.
    """
    factor = _factor(node)
    if factor is not None:
        scaled = Written(Kind.SCALE, factor)
        # A factor of 0 or below turns the order of the scores about, and a fill of -inf
        # into one of +inf or NaN.
        return (node.args[0], scaled) if 0 < factor < math.inf else None  # type: ignore[return-value]
    found = _added(node, trained) or _filled(node)
    if found is None:
        return None
    before, after = found[0].meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return None
    alike = before.dtype == after.dtype and sizes_of(before) == sizes_of(after)
    return found if alike else None


def _added(
    node: fx.Node, trained: Collection[fx.Node]
) -> tuple[fx.Node, Written] | None:
    """A call that adds numbers which need no gradient to scores."""
    name, args = name_of(node), node.args
    if name.removesuffix("_") != "aten::add" or len(args) != 2 or node.kwargs:
        return None
    if not all(isinstance(n, fx.Node) for n in args):
        return None
    one, other = args
    # `mask + scores` is written too; `add_` writes to its first operand, which then are
    # the scores.
    turned = name == "aten::add" and (
        other in trained if one not in trained else _size(other) > _size(one)
    )
    scores, numbers = (other, one) if turned else (one, other)
    value = numbers.meta.get("val")  # type: ignore[union-attr]
    # The op gives no gradient to what is added: a trained bias stays with its calls.
    is_float = isinstance(value, torch.Tensor) and value.dtype in _FLOATS
    if not is_float or numbers in trained:
        return None
    return scores, Written(Kind.ADD, 0.0, numbers)  # type: ignore[return-value, arg-type]


def _size(node: Any) -> int:
    """How many dimensions of a tensor are not of size 1."""
    value = node.meta.get("val")
    is_tensor = isinstance(value, torch.Tensor)
    return sum(size != 1 for size in sizes_of(value)) if is_tensor else -1


def _filled(node: fx.Node) -> tuple[fx.Node, Written] | None:
    """A call that fills scores with one number where a mask says so."""
    name, args = name_of(node).removesuffix("_"), node.args
    if name == "aten::masked_fill":
        places = [(0, 1, 2, Kind.FILL)]
    elif name == "aten::where" and len(args) == 3:
        # `where` may have the scores on either side.
        places = [(1, 0, 2, Kind.KEEP), (2, 0, 1, Kind.FILL)]
    else:
        return None
    for scores, mask, value, kind in places:
        number = number_of(args[value])
        if number is not None and all(
            isinstance(args[at], fx.Node) for at in (scores, mask)
        ):
            return args[scores], Written(kind, number, args[mask])  # type: ignore[return-value, arg-type]
    return None


def _factor(node: fx.Node) -> float | None:
    """The number by which a call multiplies its first operand."""
    name = name_of(node)
    if name not in ("aten::mul", "aten::mul_", "aten::div", "aten::div_"):
        return None
    if len(node.args) != 2 or node.kwargs:
        return None
    number = number_of(node.args[1])
    if number is None or not isinstance(node.args[0], fx.Node):
        return None
    if name.startswith("aten::mul"):
        return number
    return 1 / number if number else None


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
    """The float values that a gradient may flow through."""
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
                # A gradient flows through all values of a storage into which a trained
                # value was written, under whatever name.
                if is_tensor and is_op and mutates(node.target):
                    storages.add(compat.storage_id(value))
        # Again until no storage is new: a write makes earlier names of its storage
        # trained.
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
    # Told another dtype, the softmax computes in that one, and the op in fp32.
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
    # The softmax goes over the last dimension of the product as it lies.
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
            # Read from the softmax backwards, so that `scale` is of the factors behind
            # the fill.
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


def leave_out(
    device: Device, options: PassOptions, *, own_ops: bool
) -> tuple[str, ...]:
    """The kernels that are left out of a graph because of where and how it runs.

    `autoamp::attention` has a kernel for CPUs alone.  The backward of torch's kernels
    for other devices has an error of its own, which has yet to be held against
    autocast's.

    Args:
        own_ops: whether the graph may call ops of autoamp's.
    """
    slow = device.attends_by_products and options.objective != "memory"
    has_kernel = own_ops and device.type == "cpu"
    return () if has_kernel and not slow else (ATTENTION,)


def replaceable(graph: fx.Graph, allowed: Allowed) -> list[WrittenAttention]:
    """The attentions written out that may each become one call."""
    if ATTENTION in allowed.off:
        return []
    found = written_attention(graph)
    return [e for e in found if allowed.takes(e.nodes) and _may_be_one(graph, e)]


def _may_be_one(graph: fx.Graph, found: WrittenAttention) -> bool:
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

    # The one call reads its operands at the place of the last of the calls.
    if any(parts(node) for node in order[first:last] if node not in own):
        return False
    # Numbers that are added may not be written to later either: a sum does not keep
    # them for its backward, and the one call does.
    added = [s.tensor for s in found.steps if s.kind is Kind.ADD and s.tensor]
    kept = _storages(added)
    later = (written_values(node) for node in order[last:])
    return kept.isdisjoint(_storages(n for written in later for n in written))


def _storages(nodes: Iterable[fx.Node]) -> set[int]:
    values = (tensor for node in nodes for tensor in tensors_of(node.meta.get("val")))
    return {compat.storage_id(value) for value in values}


def attention_at(node: fx.Node, own: Callable[..., Any]) -> Any:
    """The function to call at a node: `own` for torch's attention in 16 bits on CPUs.

    Returns:
        The node's own target everywhere else.
    """
    if node.target is not TORCH_ATTENTION:
        return node.target
    value = node.meta["val"]
    is_low = value.dtype in LOW_DTYPES.values()
    return own if is_low and value.device.type == "cpu" else node.target


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
    masks = None if CAUSAL_MASK in allowed.off else Masks()
    put = [_put(graph, each, mode, exposed, masks) for each in every]
    return any(put)


def _put(
    graph: fx.Graph,
    found: WrittenAttention,
    mode: compat.FakeTensorMode,
    exposed: Collection[int],
    masks: Masks | None,
) -> bool:
    result = found.result
    calls = _Calls(graph, result, mode)
    is_copied = _is_copied(result, exposed)
    steps = [_told(step, found, masks) for step in found.steps]
    made = _emitted(calls, found, steps, is_copied)
    # Dynamo has traced the rest for these strides: a later `view` would raise on
    # others.
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


def _told(step: Written, found: WrittenAttention, masks: Masks | None) -> Written:
    """A step, told by positions if its mask hides the later keys and nothing else."""
    if masks is None or step.tensor is None:
        return step
    scores = found.scores
    rows = sizes_of(scores.left.meta["val"])[scores.of_left[-2]]
    columns = sizes_of(scores.right.meta["val"])[scores.of_right[-1]]
    hides = step.kind is Kind.FILL
    if not masks.shows_no_later_keys(step.tensor, [rows, columns], hides=hides):
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
            # Keys are mostly written transposed: two transpositions are none, and the
            # kernel reads rows.
            count = len(dimensions)
            if {d % count for d in turned} == {one, other}:  # type: ignore[operator]
                return source  # type: ignore[return-value]
        return self(_ATEN.permute.default, node, list(dimensions))
