"""Tells whether calls exchange the halves of a row, as a rotary embedding does."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autoamp import compat
from autoamp.analyse.nodes import argument
from autoamp.dtypes import HIGH_DTYPE
from autoamp.kernels.rotary.function import rotary

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
    shape = (*range(2, value.dim() + 1), value.shape[-1])
    with compat.on_real_numbers():
        end = 1.0 + torch.Size(shape).numel()
        rows = torch.arange(1.0, end, dtype=torch.float64, device="cpu")
        rows = rows.view(shape)
        values: dict[fx.Node, Any] = {data: rows}
        try:
            for node in calls:
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                assert callable(node.target)
                values[node] = node.target(*args, **kwargs)
        except (RuntimeError, IndexError, TypeError):
            return None  # the calls cannot be run on rows of another number
        made = values[calls[-1]]
        for pairs in (False, True):
            for sign in (-1, 1):
                if made.shape == rows.shape and made.equal(_other(rows, sign, pairs)):
                    return sign, pairs
    return None


def _other(rows: Tensor, sign: int, pairs: bool) -> Tensor:
    """The exchanged halves by `rotary`'s own account: data times 0 and `other` times 1.

    The dtype keeps whole numbers apart, of which there are less than 2 ** 24.
    """
    zero = torch.zeros(rows.shape[-1], dtype=HIGH_DTYPE, device="cpu")
    one = torch.ones_like(zero)
    return rotary(rows.float(), zero, one, HIGH_DTYPE, sign, pairs).double()
