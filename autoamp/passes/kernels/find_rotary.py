"""Puts one call in the place of each rotary position embedding that is written out.

A graph goes in that has its casts and is ready to run.  The chain

    slice_1 = x[..., :8];  slice_2 = x[..., 8:]
    add = x * cos + cat(-slice_2, slice_1) * sin;  add_bf16 = _to_copy(add, bf16)

becomes `add = rotary(x, cos, sin, bf16, -1, False)`, which computes in fp32 inside.
Compilers get the chain: they make one kernel of it by themselves.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE, LOW_DTYPES
from autoamp.passes.functions.rotary import rotary
from autoamp.passes.kernels.match import computed, dtype_of, layout_of, sizes_of
from autoamp.passes.kernels.table import ROTARY
from autoamp.passes.ops import has_effect
from autoamp.passes.see.nodes import KERNEL, ForChain, argument
from autoamp.passes.write.copied import edited
from autoamp.passes.write.emitted import CAST_KIND

_ATEN = torch.ops.aten

EXCHANGES = frozenset(
    {
        _ATEN.cat.default,
        _ATEN.chunk.default,
        _ATEN.flatten.using_ints,
        _ATEN.neg.default,
        _ATEN.slice.Tensor,
        _ATEN.split.Tensor,
        _ATEN.stack.default,
        _ATEN.unsqueeze.default,
        operator.getitem,
    }
)
"""The calls that may exchange the halves of a row.

Where they act within rows, with concrete numbers, they do the same to each row of a
tensor of any shape, so that a trial on rows of different numbers is a proof."""

_DIMENSIONS: Mapping[Any, tuple[str, int]] = {
    _ATEN.cat.default: ("dim", 0),
    _ATEN.chunk.default: ("dim", 0),
    _ATEN.flatten.using_ints: ("start_dim", 0),
    _ATEN.slice.Tensor: ("dim", 0),
    _ATEN.split.Tensor: ("dim", 0),
    _ATEN.stack.default: ("dim", 1),
    _ATEN.unsqueeze.default: ("dim", 1),
}
"""The argument that names the first dimension a call acts on; dimensions it adds."""


def acts_in_rows(node: fx.Node, data: fx.Node) -> bool:
    """Whether a call leaves alone all dimensions of `data` but the last."""
    if node.target not in _DIMENSIONS:
        return True  # `neg`, and the choice of a piece
    name, added = _DIMENSIONS[node.target]
    first = argument(node, name, 0)
    rank = node.all_input_nodes[0].meta["val"].dim() + added
    return bool(first % rank >= data.meta["val"].dim() - 1)


def exchanged(calls: Sequence[fx.Node], data: fx.Node) -> tuple[int, bool] | None:
    """The sign and the kind of an exchange of halves; None if the calls do another.

    The calls run on rows of numbers that are all different.
    """
    value = data.meta["val"]
    # Each dimension of another size: calls that act on a wrong one cannot pass.
    shape = (*range(2, value.dim() + 1), value.shape[-1])
    with compat.on_real_numbers():
        end = 1.0 + torch.Size(shape).numel()
        rows = torch.arange(1.0, end, dtype=torch.float64, device="cpu")
        rows = rows.view(shape)
        try:
            made = computed(calls, {data: rows})
        except (RuntimeError, IndexError, TypeError):
            return None  # the calls cannot be run on rows of another number
        # By `rotary`'s own account: the data times 0, and the exchanged halves times 1.
        # The dtype keeps whole numbers apart, of which there are less than 2 ** 24.
        zero = torch.zeros(rows.shape[-1], dtype=HIGH_DTYPE, device="cpu")
        one = torch.ones_like(zero)
        for pairs in (False, True):
            for sign in (-1, 1):
                halves = rotary(rows.float(), zero, one, HIGH_DTYPE, sign, pairs)
                if made.shape == rows.shape and made.equal(halves.double()):
                    return sign, pairs
    return None


_SIGNS: Mapping[Any, int] = {_ATEN.add.Tensor: 1, _ATEN.sub.Tensor: -1}


@dataclass(frozen=True)
class Embedding:
    """One chain.

    Attributes:
        result: the sum at its end.
        inside: the other calls, in graph order; nothing outside the chain reads them.
        data, cosine, sine: the operands.
        sign, pairs: as in `rotary`.
        cast: the only reader of the sum, if it is a cast of ours to a low dtype.
        contiguous: as in `rotary`.
    """

    result: fx.Node
    inside: tuple[fx.Node, ...]
    data: fx.Node
    cosine: fx.Node
    sine: fx.Node
    sign: int
    pairs: bool
    cast: fx.Node | None
    contiguous: bool = False

    @property
    def made(self) -> Tensor:
        """The result of the chain, as a fake tensor."""
        value = (self.cast or self.result).meta["val"]
        assert isinstance(value, Tensor)
        return value


def embeddings(graph: fx.Graph) -> Iterator[Embedding]:
    """The embeddings written out in `graph`, each of which may become one call."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    ends = [node for node in order if node.target in _SIGNS]
    if not ends:
        return
    writes = [
        i
        for node, i in order.items()
        if isinstance(node.target, compat.HigherOrderOperator) or has_effect(node)
    ]
    modes = [i for node, i in order.items() if node.target in compat.MODE_CHANGES]
    for end in ends:
        found = _ending_at(end, order)
        if found is None:
            continue
        first, last = order[found.inside[0]], order[found.cast or end]
        # Nothing but the cast reads the sum, so that nothing writes to it.
        written = any(first < at < order[end] for at in writes)
        if written or any(first < at < last for at in modes):
            continue
        laid = _laid_as_written(found)
        if laid is not None:
            yield laid


def _laid_as_written(found: Embedding) -> Embedding | None:
    """The embedding with the strides of the sum; None if no one call has them.

    A view of the sum may not be one of a tensor that lies otherwise.
    """
    data, cosine, sine = (n.meta["val"] for n in (found.data, found.cosine, found.sine))
    modes = {getattr(t, "fake_mode", None) for t in (data, cosine, sine)}
    mode = modes.pop()
    if mode is None or modes:
        return None
    how = found.made.dtype, found.sign, found.pairs
    for contiguous in (False, True):
        with mode, compat.as_traced(), torch.no_grad():
            made = rotary(data, cosine, sine, *how, contiguous)
        if layout_of(made) == layout_of(found.made) and not found.made.storage_offset():
            return replace(found, contiguous=contiguous)
    return None


def _ending_at(end: fx.Node, order: Mapping[fx.Node, int]) -> Embedding | None:
    """The embedding whose last sum or difference is `end`."""
    if dtype_of(end) != HIGH_DTYPE or len(end.args) != 2 or end.kwargs:
        return None
    both = end.all_input_nodes
    if len(both) != 2 or not all(map(_is_product, both)):
        return None
    # A sum has its two products in either order, a difference in the one.
    orders = [both, both[::-1]] if _SIGNS[end.target] > 0 else [both]
    for straight, crossed in orders:
        for data, cosine in itertools.permutations(straight.all_input_nodes):
            for other, sine in itertools.permutations(crossed.all_input_nodes):
                inside = _between(other, data)
                if not inside or not _may_be_rows(end, data, (cosine, sine)):
                    continue
                calls = sorted((straight, crossed, *inside), key=order.__getitem__)
                how = None
                in_rows = all(acts_in_rows(node, data) for node in inside)
                readers = {user for node in calls for user in node.users}
                if in_rows and readers <= {*calls, end}:
                    how = exchanged([n for n in calls if n in inside], data)
                if how is not None:
                    sign, pairs = how
                    # `x * cos - other * sin` is a rotation the other way.
                    sign *= _SIGNS[end.target]
                    cast = _only_cast(end)
                    given = data, cosine, sine
                    return Embedding(end, tuple(calls), *given, sign, pairs, cast)
    return None


def _is_product(node: fx.Node) -> bool:
    """Whether `node` is the product of two tensors."""
    is_product = node.target is _ATEN.mul.Tensor and not node.kwargs
    return is_product and len(node.all_input_nodes) == len(node.args)


def _tensor(node: fx.Node) -> Tensor | None:
    value = node.meta.get("val")
    return value if isinstance(value, Tensor) else None


def _may_be_rows(end: fx.Node, data: fx.Node, numbers: Sequence[fx.Node]) -> bool:
    """Whether `data` is a tensor of even rows, and `numbers` are broadcast to it."""
    value, result = _tensor(data), _tensor(end)
    if value is None or result is None or value.dim() < 1:
        return False
    size = value.shape[-1]
    if not isinstance(size, int) or size < 2 or size % 2:
        return False
    if value.dtype not in {HIGH_DTYPE, *LOW_DTYPES.values()}:
        return False
    tensors = [_tensor(n) for n in numbers]
    return sizes_of(value) == sizes_of(result) and all(
        t is not None and t.dtype == HIGH_DTYPE and t.dim() and t.shape[-1] == size
        for t in tensors
    )


def _between(last: fx.Node, data: fx.Node) -> set[fx.Node] | None:
    """The exchanging calls that make `last` from `data`; None if others take part."""
    if last is data:
        return None
    found: set[fx.Node] = set()
    todo = [last]
    while todo:
        node = todo.pop()
        if node is data or node in found:
            continue
        if node.target not in EXCHANGES:
            return None
        found.add(node)
        todo.extend(node.all_input_nodes)
    return found


def _only_cast(end: fx.Node) -> fx.Node | None:
    """The cast that alone reads the sum, and is one that the pass inserted."""
    (reader, *others) = end.users or (None,)
    if reader is None or others or CAST_KIND not in reader.meta:
        return None
    # A cast of the model's own is a boundary that the user drew.
    plain = reader.target is _ATEN._to_copy.default and [*reader.kwargs] == ["dtype"]
    return reader if plain and reader.meta["val"].dtype != HIGH_DTYPE else None


def with_rotary(gm: fx.GraphModule, left: Collection[str] = ()) -> fx.GraphModule:
    """`gm` with one call for each rotary embedding; `gm` itself where there is none.

    Args:
        left: names of nodes; an embedding that has one of them stays as it is.
    """

    def found(graph: fx.Graph) -> list[Embedding]:
        return [
            each
            for each in embeddings(graph)
            if not any(n.name in left for n in (each.result, *each.inside))
        ]

    def edit(graph: fx.Graph) -> None:
        for embedding in found(graph):
            node, cast = embedding.result, embedding.cast
            dtype = embedding.made.dtype
            if cast is not None:
                cast.replace_all_uses_with(node)
                node.meta = {**node.meta, "val": cast.meta["val"]}
                graph.erase_node(cast)
            node.target, node.kwargs = rotary, {}
            operands = embedding.data, embedding.cosine, embedding.sine
            how = dtype, embedding.sign, embedding.pairs, embedding.contiguous
            node.args = *operands, *how
            calls = 1 + len(embedding.inside)
            node.meta[KERNEL] = ForChain(ROTARY, calls, widens=False)
            for call in reversed(embedding.inside):
                graph.erase_node(call)

    return edited(gm, edit, finds=found)
