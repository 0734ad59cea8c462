"""`index_add`, which keeps nothing of what it adds.

The sum of a graph's messages, or of the experts' results, is an `index_add` of a source
that is larger than the result as a rule.  Torch keeps the whole source for the
backward, and reads no more of it there than its sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from autoamp import compat

_ATEN = torch.ops.aten


class _IndexAdd(torch.autograd.Function):
    """`aten.index_add`.  Kept for the backward: the index, and the source's sizes."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        data: Tensor,
        dim: int,
        index: Tensor,
        source: Tensor,
        alpha: float,
        in_place: bool,
    ) -> Tensor:
        ctx.dim, ctx.alpha, ctx.sizes = dim, alpha, source.shape
        ctx.save_for_backward(index)
        op: Any = _ATEN.index_add.default
        if in_place:
            op = _ATEN.index_add_.default
            ctx.mark_dirty(data)
        return op(data, dim, index, source, alpha=alpha)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (index,) = ctx.saved_tensors
        of_source = None
        if ctx.needs_input_grad[3]:
            of_source = grad.index_select(ctx.dim, index).expand(ctx.sizes)
            if ctx.alpha != 1:
                of_source = of_source * ctx.alpha
        return grad, None, None, of_source, None, None


_apply_index_add = compat.direct_apply(_IndexAdd)


def index_add(
    data: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1
) -> Tensor:
    """`aten.index_add`, whose backward keeps no source.

    Args:
        data: any shape of at least one dimension, any dtype.
        dim: the dimension along which rows are added.
        index: whole numbers, one for each row of `source`: the row of `data`.
        source: as `data`, but for the number of its rows.
        alpha: the factor of `source`.

    Returns:
        A tensor of the shape and dtype of `data`.

    Example:
        >>> rows, index = torch.ones(3, 2), torch.tensor([0, 1, 0])
        >>> index_add(torch.zeros(2, 2), 0, index, rows)
        tensor([[2., 2.],
                [1., 1.]])
    """
    return _apply_index_add(data, dim, index, source, alpha, False)


def index_add_(
    data: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1
) -> Tensor:
    """As `index_add`, and writes the sums to `data`, which it returns."""
    return _apply_index_add(data, dim, index, source, alpha, True)


_OWN: dict[Any, Callable[..., Tensor]] = {
    _ATEN.index_add.default: index_add,
    _ATEN.index_add_.default: index_add_,
}


def index_add_at(node: fx.Node) -> Any:
    """The function to call at a node: its own target, or one that keeps no source."""
    value = node.meta.get("val")
    # A single number takes a source of other dimensions than its own.
    has_rows = isinstance(value, Tensor) and value.dim() > 0
    return _OWN.get(node.target, node.target) if has_rows else node.target
