"""Uses of several weights as one call, whose backward casts all gradients at once.

Each weight of a layer costs a GPU one kernel for the cast of its gradient, in fp16 a
second one that unscales and checks, and a call of Python's.  A hundred small kernels
take longer to start than to run; one kernel takes a list of tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autoamp import compat
from autoamp.graph_functions.casts import as_the_weight, low_weight, low_weight_unscaled
from autoamp.graph_functions.edge import passed_on, unscale_grad, unscaled_grad


class _Kind(NamedTuple):
    """What the gradient of a weight is to be: of what dtype, in what layout."""

    dtype: torch.dtype
    plain: bool
    is_leaf: bool

    @classmethod
    def of(cls, weight: Tensor) -> _Kind:
        return cls(weight.dtype, weight.is_contiguous(), weight.is_leaf)


class _Together(torch.autograd.Function):
    """As a call of one weight for each of several weights.

    The results are the copies, or the weights themselves where there are none.  A
    gradient is cast once all gradients of the group are there.
    """

    @staticmethod
    def forward(
        ctx: Any,
        count: int,
        inv: Tensor | None,
        found_inf: Tensor | None,
        *given: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        weights = given[:count]
        ctx.edge, ctx.given = (inv, found_inf), len(given)
        ctx.kinds = None if _are_usual(weights) else tuple(map(_Kind.of, weights))
        return tuple(map(Tensor.detach, given[-count:]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        rest = (None,) * (ctx.given - len(grads))
        there = [grad for grad in grads if grad is not None]
        if ctx.kinds is None and not torch.is_grad_enabled() and _are_ordinary(there):
            wide: list[Tensor | None] = [*_all_wide(there, *ctx.edge)]
            if len(wide) < len(grads):
                left = iter(wide)
                wide = [None if grad is None else next(left) for grad in grads]
        else:
            kinds = ctx.kinds or (_USUAL,) * len(grads)
            wide = [
                None if grad is None else _wide(grad, kind, *ctx.edge)
                for grad, kind in zip(grads, kinds, strict=True)
            ]
        return (None, None, None, *wide, *rest)


_apply: Any = compat.direct_apply(_Together)

_USUAL = _Kind(torch.float32, plain=True, is_leaf=True)


def _are_usual(weights: Sequence[Tensor]) -> bool:
    """Whether each of `weights` is of the kind `_USUAL`: asked at every call."""
    return (
        all(map(Tensor.is_contiguous, weights))
        and all(map(_IS_LEAF, weights))
        and {*map(_DTYPE, weights)} == {_USUAL.dtype}
    )


def _are_ordinary(grads: Sequence[Tensor]) -> bool:
    """Whether all of `grads` are plain tensors, with memory of their own."""
    return (
        {*map(type, grads)} == {Tensor}
        and {*map(_LAYOUT, grads)} == {torch.strided}
        and not (compat.any_batch(grads) or compat.forward_mode())
    )


_IS_LEAF, _DTYPE, _LAYOUT = map(operator.attrgetter, ("is_leaf", "dtype", "layout"))


def _all_wide(
    grads: Sequence[Tensor], inv: Tensor | None, found_inf: Tensor | None
) -> list[Tensor]:
    """Gradients in fp32; with `inv` unscaled and checked too.  One op for all."""
    plain = torch.contiguous_format
    wide = [
        torch.empty_like(grad, dtype=_USUAL.dtype, memory_format=plain)
        for grad in grads
    ]
    compat.copy_all(wide, grads)
    if inv is not None and found_inf is not None:
        compat.unscale_and_check(wide, inv, found_inf)
    return wide


def _wide(
    grad: Tensor, kind: _Kind, inv: Tensor | None, found_inf: Tensor | None
) -> Tensor:
    """One gradient as its weight wants it; with `inv` unscaled and checked too."""
    wide = as_the_weight(grad, kind)
    if inv is None or found_inf is None:
        return wide
    wide = unscaled_grad(wide, inv, found_inf)
    return wide if kind.is_leaf else passed_on(wide, found_inf)


def low_weights(*given: Tensor) -> tuple[Tensor, ...]:
    """`low_weight` of several weights, with one autograd node.

    Args:
        given: the weights, each as for `low_weight`, and then their copies in the same
            order.  The weights and copies are on one device.

    Returns:
        A use of each weight.
    """
    count = len(given) // 2
    if _stay_apart():
        return tuple(map(low_weight, given[:count], given[count:]))
    result: tuple[Tensor, ...] = _apply(count, None, None, *given)
    return result


def low_weights_unscaled(
    inv_loss_scale: Tensor, found_inf: Tensor, *given: Tensor
) -> tuple[Tensor, ...]:
    """`low_weight_unscaled` of several weights, with one autograd node.

    Args:
        inv_loss_scale, found_inf: as for `low_weight_unscaled`.
        given: as for `low_weights`.
    """
    count = len(given) // 2
    if _stay_apart():
        return tuple(
            low_weight_unscaled(weight, copy, inv_loss_scale, found_inf)
            for weight, copy in zip(given[:count], given[count:], strict=True)
        )
    result: tuple[Tensor, ...] = _apply(count, inv_loss_scale, found_inf, *given)
    return result


def unscaled_weights(
    inv_loss_scale: Tensor, found_inf: Tensor, *weights: Tensor
) -> tuple[Tensor, ...]:
    """`unscale_grad` of several weights that ops read in fp32, with one autograd node.

    Args:
        inv_loss_scale, found_inf: as for `unscale_grad`.
        weights: fp32 tensors on one device, to which the graph does not write.
    """
    if _stay_apart():
        return tuple(unscale_grad(each, inv_loss_scale, found_inf) for each in weights)
    edge = inv_loss_scale, found_inf
    result: tuple[Tensor, ...] = _apply(len(weights), *edge, *weights)
    return result


def _stay_apart() -> bool:
    """Whether each gradient has to arrive by itself.

    Where ranks train together, DDP sends gradients while later ones are computed, and
    FSDP takes a module's gradients as soon as the module's backward ends.  Functorch's
    transforms know each use by itself.
    """
    return compat.has_ranks() or compat.transforms_active()
