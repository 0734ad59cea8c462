"""Takes masks of attention away that are causal, which is told, or hide no key.

Captured, a model of transformers makes its masks from index numbers, and the attention
reads the mask, widens it and keeps it for the backward.  A kernel that is told
`is_causal=True` needs no mask, and skips the products that the mask hides.  A mask of
an encoder that hides no key says nothing; on GPUs it may lead to the attention
that torch computes by products in fp32, where there is none such without a mask.

A mask that calls make of sizes and numbers alone is computed, and looked at.  Where a
size is symbolic, or the mask is large, a small mask is computed in its place, which
stands for all sizes (`_SmallMask`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from autoamp import compat
from autoamp.passes.kernels.match import (
    Allowed,
    calls_from_sizes,
    computed,
    is_size,
    name_of,
    sizes_of,
    written_storages,
)
from autoamp.passes.kernels.table import CAUSAL_MASK, NO_MASK
from autoamp.passes.see.nodes import KERNEL, ForChain, argument

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
MASK, DROPOUT, CAUSAL = 3, 4, 5
"""The positions of `attn_mask`, `dropout_p` and `is_causal` among the arguments."""

LOWEST = torch.finfo(torch.float32).min
"""A number that hides a key where it is added: the sum with any score below 1e31 is
this number again, in fp32, and has no weight beside a score that is shown."""

_LARGEST = 2**22
"""The most elements of a mask that is computed as it is."""


def without_masks(graph: fx.Graph, _: compat.FakeTensorMode, allowed: Allowed) -> bool:
    """Takes masks away that attention can do without; whether there was any."""
    calls = graph.find_nodes(op="call_function", target=ATTENTION)
    masks = Masks()
    found = False
    for node in calls:
        mask = node.args[MASK] if len(node.args) > MASK else None
        if not isinstance(mask, fx.Node) or not allowed.takes([node]):
            continue
        if len(node.args) > CAUSAL and node.args[CAUSAL]:
            name = None
        else:
            operands: Sequence[Any] = node.args
            lengths = [sizes_of(operands[at].meta["val"])[-2] for at in (0, 1)]
            if masks.shows_no_later_keys(mask, lengths):
                name = CAUSAL_MASK
            else:
                name = NO_MASK if masks.shows_all_keys(mask) else None
        if name is not None and name not in allowed.off:
            dropout = node.args[DROPOUT] if len(node.args) > DROPOUT else 0.0
            # A mask of all keys said nothing; of a causal mask the flag says all.
            node.args = (*node.args[:MASK], None, dropout, name == CAUSAL_MASK)
            _note(node, name)
            found = True
        elif NO_MASK not in allowed.off and allowed.takes([mask]):
            bias = _bias_alone(graph, mask, masks)
            if bias is not None:
                args = (*node.args[:MASK], bias, *node.args[MASK + 1 :])
                with graph.inserting_before(node):
                    call = graph.call_function(ATTENTION, args, node.kwargs)
                call.meta = dict(node.meta)
                _note(call, NO_MASK)
                node.replace_all_uses_with(call)
                graph.erase_node(node)
                found = True
    return found


_CHOICES = (torch.ops.aten.where.self, torch.ops.aten.where.ScalarOther)


def _bias_alone(graph: fx.Graph, mask: fx.Node, masks: Masks) -> fx.Node | None:
    """The bias that a mask is wherever a mask that hides no key says so.

    Captured, encoders with a bias by distance make `where(shown, bias, lowest)` for
    each layer, as large as the scores of all texts; the bias is one for all of them.
    """
    if mask.target not in _CHOICES:
        return None
    shown, bias = mask.args[:2]
    if not isinstance(shown, fx.Node) or not isinstance(bias, fx.Node):
        return None
    value, made = bias.meta["val"], mask.meta["val"]
    one, other = sizes_of(value), sizes_of(made)
    broadcasts = len(one) == len(other) and one[-2:] == other[-2:]
    if value.dtype != made.dtype or not broadcasts or not masks.shows_all_keys(shown):
        return None
    # The call would read, and keep for its backward, what a write makes of the bias.
    is_written = compat.storage_id(value) in written_storages(graph.nodes)
    return None if is_written else bias


def _note(attention: fx.Node, name: str) -> None:
    known = attention.meta.get(KERNEL)
    calls = 2 if known is None else known.calls + 1
    named = name if known is None else known.kernel
    attention.meta[KERNEL] = ForChain(named, calls, widens=False)


class Masks:
    """The keys that the masks of a graph show; each mask is computed once."""

    def __init__(self) -> None:
        self._shown: dict[fx.Node, Tensor | None] = {}

    def shows_no_later_keys(
        self, mask: fx.Node, scores: list[int | str], *, hides: bool = False
    ) -> bool:
        """Whether a query sees the keys up to its own position, and only these.

        Args:
            mask: bools, True where a key is shown, or numbers that are added.
            scores: the numbers of queries and keys.
            hides: whether the bools are True where a key is hidden.
        """
        # A mask that broadcasts over queries hides the same keys from each: it is not
        # causal.
        if [*sizes_of(mask.meta["val"])[-2:]] != scores:
            return False
        shown = self._of(mask)
        if shown is None:
            return False
        # From the upper left corner, as `is_causal` counts, also where there are more
        # keys than queries.
        lower = torch.ones(shown.shape[-2:], dtype=torch.bool, device="cpu").tril()
        return bool((shown == (~lower if hides else lower)).all())

    def shows_all_keys(self, mask: fx.Node) -> bool:
        shown = self._of(mask)
        return shown is not None and bool(shown.all())

    def _of(self, mask: fx.Node) -> Tensor | None:
        """Where a mask shows a key, for sizes that tell how it is for all sizes."""
        if mask not in self._shown:
            calls = calls_from_sizes(mask)
            with compat.on_real_numbers():
                try:
                    self._shown[mask] = None if calls is None else _shown(calls)
                except Exception:  # noqa: BLE001 - then the mask stays as it is
                    self._shown[mask] = None
        return self._shown[mask]


def _shown(calls: list[fx.Node]) -> Tensor | None:
    """Where the last one of some calls shows a key, of bools or numbers to be added."""
    is_small = all(isinstance(node.meta["val"], Tensor) for node in calls) and all(
        isinstance(size, int) for size in calls[-1].meta["val"].shape
    )
    if is_small and math.prod(calls[-1].meta["val"].shape) <= _LARGEST:
        made = computed(calls)
    else:
        made = _SmallMask().made(calls)
    if made.dtype == torch.bool:
        return made
    shown = made == 0
    # Numbers in between, such as distances, weaken a key and do not hide it: taken for
    # a mask they gave results 0.9 off.
    return shown if bool((shown | (made <= LOWEST)).all()) else None


class _UnknownError(Exception):
    """Nothing tells that a mask of a small size stands for all sizes."""


class _Elements(NamedTuple):
    """A bound on the elements of a tensor, in terms of the positions of their place.

    Attributes:
        positions: the most positions that an element adds or subtracts; 0 for a tensor
            that holds a few numbers, each in a region.
        number: the largest size of the number added to the positions.
    """

    positions: int
    number: float = 0.0


_SIZES = ("end", "size", "shape")
"""The arguments that hold sizes, and tell the value of no element."""

_AS_LONG_AS_IT_IS = 2**31
_SMALL, _APART, _MOST_NUMBERS, _MOST_DIMENSIONS = 67, 4, 15, 4
_EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)
"""The dtypes that hold all positions, and so round none."""

_FILLED = (
    *("ones", "zeros", "full", "scalar_tensor", "new_ones", "new_zeros", "new_full"),
    *("ones_like", "zeros_like", "full_like"),
)
_SAME = ("to", "_to_copy", "type_as", "clone", "contiguous", "detach", "alias")
_SHOWN = ("expand", "expand_as", "permute", "transpose", "t")
_RESIZED = ("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze")
_COMPARED = ("le", "lt", "ge", "gt", "eq", "ne")
_CALCULATED = ("add", "sub", "rsub", "neg")
_BY_ELEMENT = ("__and__", "__or__", "where", "masked_fill", "lift_fresh_copy")


class _SmallMask:
    """A mask of small sizes that is the causal one only if it is so for all sizes.

    Each element is made of the positions `i`, `j`, ... of its place, by comparisons of
    `i - j`, `i + j` or `i` with numbers of which none is larger than n, by choices
    between a few numbers, and by nothing else: no size takes part.  So an element only
    depends on which of these comparisons hold.  Shorten every gap between 0 and the
    positions of a place, in their order, to n + 1: each comparison is as before, and
    the place now lies among the first d * (n + 1) of each of d dimensions.  What holds
    at all these places, of the mask or of `j <= i`, holds at all places of any size.

    So every size that is symbolic, or large, becomes a size above d * (n + 1); smaller
    ones stay.  A call that may do anything else raises `_UnknownError`.
    """

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._values: dict[fx.Node, Tensor] = {}
        self._elements: dict[fx.Node, _Elements] = {}
        self._numbers = 0.0

    def made(self, calls: list[fx.Node]) -> Tensor:
        """The small mask, which the last call makes."""
        for node in calls:
            if is_size(node):
                continue
            assert isinstance(node.target, compat.OpOverload)
            names = compat.argument_names(node.target)
            args = [self._given(*each) for each in zip(names, node.args, strict=False)]
            kwargs = {name: self._given(name, v) for name, v in node.kwargs.items()}
            value: Tensor = node.target(*args, **kwargs)
            sizes = [self._size(size) for size in node.meta["val"].shape]
            # The call gives another shape than the sizes stand for: some literal was a
            # size.
            if [*value.shape] != sizes or len(sizes) > _MOST_DIMENSIONS:
                raise _UnknownError
            self._values[node] = value
            self._elements[node] = self._read(node)
        if self._elements[calls[-1]].positions or not self._numbers <= _MOST_NUMBERS:
            raise _UnknownError
        return self._values[calls[-1]]

    def _given(self, name: str, value: Any) -> Any:
        """An argument as the small call has it; an error for a size anywhere else."""
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if name in _SIZES:
            return fx.node.map_aggregate(value, self._size)
        return fx.map_arg(value, self._values.__getitem__)

    def _size(self, size: Any) -> Any:
        """A small size for a symbolic or large one, the same for the same one."""
        if isinstance(size, fx.Node):
            size = size.meta["val"]
        if size is None or (
            isinstance(size, int) and not _SMALL <= size < _AS_LONG_AS_IT_IS
        ):
            return size
        # By the text of the size: what was one symbol stays one size, and two stay
        # apart.
        return self._sizes.setdefault(str(size), _SMALL + _APART * len(self._sizes))

    def _read(self, node: fx.Node) -> _Elements:
        name = name_of(node).removeprefix("aten::")
        if name in _FILLED:
            return _Elements(0)
        if name == "arange":
            return self._arange(node)
        tensors = [n for n in node.all_input_nodes if n in self._elements]
        first = self._elements[tensors[0]]
        if name in _SHOWN:
            return first
        if name in _RESIZED:
            before, after = (
                [s for s in sizes_of(n.meta["val"]) if s != 1]
                for n in (tensors[0], node)
            )
            return first if before == after else self._unknown()
        if name in ("slice", "select", "tril", "triu"):
            return self._shifted(node, name, first)
        if name == "index":
            return self._at_positions(node, first)
        if name == "diff":
            return self._steps(node, first)
        if name == "cumsum" and not self._values[tensors[0]].any():
            return _Elements(0)  # a sum of zeros, at places of any size
        if not any(self._elements[n].positions for n in tensors):
            tags = node.target.tags  # type: ignore[union-attr]
            known = torch.Tag.pointwise in tags or name in (*_BY_ELEMENT, *_SAME)
            return _Elements(0) if known else self._unknown()
        return self._of_positions(node, name, first)

    def _unknown(self) -> _Elements:
        raise _UnknownError

    def _arange(self, node: fx.Node) -> _Elements:
        start = argument(node, "start", 0)
        exact = self._values[node].dtype in _EXACT
        # Positions in bf16 are rounded from 257 on, so that a large mask differs from a
        # small one.
        if not exact or argument(node, "step", 1) != 1 or not isinstance(start, int):
            raise _UnknownError
        return _Elements(1, abs(start))

    def _shifted(self, node: fx.Node, name: str, first: _Elements) -> _Elements:
        """A part that begins elsewhere, or a triangle under a diagonal."""
        key = {"slice": "start", "select": "index"}.get(name, "diagonal")
        by = argument(node, key, 0) or 0
        is_part = name in ("slice", "select")
        # A negative begin counts from the end, and takes the size part.
        if not isinstance(by, int) or (is_part and by < 0):
            raise _UnknownError
        if name == "slice" and argument(node, "step", 1) != 1:
            raise _UnknownError
        self._numbers += abs(by)
        return _Elements(first.positions, first.number + (abs(by) if is_part else 0))

    def _at_positions(self, node: fx.Node, first: _Elements) -> _Elements:
        """Elements of another place, each of whose positions is one of this place."""
        for index in filter(None, argument(node, "indices")):
            is_own = self._elements[index] == _Elements(1)
            if not is_own or bool((self._values[index] < 0).any()):
                raise _UnknownError
        return first

    def _steps(self, node: fx.Node, first: _Elements) -> _Elements:
        """The difference of each element and the one before; of the first, another."""
        before = argument(node, "prepend", None)
        other = None if argument(node, "n", 1) != 1 else before
        if not isinstance(other, fx.Node) or argument(node, "append", None) is not None:
            raise _UnknownError
        there, dim = self._elements[other], argument(node, "dim", -1)
        if self._values[other].shape[dim] != 1:
            raise _UnknownError
        self._numbers += 1  # the first place is told from the others
        number = first.number + there.number + 1
        return _Elements(first.positions + there.positions, number)

    def _of_positions(self, node: fx.Node, name: str, first: _Elements) -> _Elements:
        """Sums, differences and comparisons of positions, and casts of them."""
        if name in _SAME:
            exact = self._values[node].dtype in _EXACT
            return first if exact else self._unknown()
        if name not in (*_COMPARED, *_CALCULATED) or argument(node, "alpha", 1) != 1:
            raise _UnknownError
        operands: list[Any] = [
            self._values[a] if isinstance(a, fx.Node) else a for a in node.args
        ]
        if len(operands) == 2:
            dtype = torch.result_type(*operands)  # in which the kernel compares
        else:
            dtype = self._values[node].dtype
        parts = [self._operand(each) for each in node.args]
        positions = sum(part.positions for part in parts)
        number = sum(part.number for part in parts)
        if dtype not in _EXACT or positions > 2:
            raise _UnknownError
        if name in _CALCULATED:
            return _Elements(positions, number)
        self._numbers += number
        return _Elements(0)

    def _operand(self, value: Any) -> _Elements:
        """What an operand adds: positions, or a number of a few."""
        if not isinstance(value, fx.Node):
            return _Elements(0, abs(value))
        found = self._elements[value]
        if found.positions:
            return found
        return _Elements(0, float(self._values[value].double().abs().max()))
