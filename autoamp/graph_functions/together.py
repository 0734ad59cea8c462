"""Uses of several weights as one call, whose backward casts all gradients at once.

Each weight of a layer costs a GPU one kernel for the cast of its gradient, in fp16 a
second one that unscales and checks, and a call of Python's.  A hundred small kernels
take longer to start than to run; one kernel takes a list of tensors.
"""

from __future__ import annotations

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
        ctx.edge, ctx.given = (inv, found_inf), len(given)
        ctx.kinds = tuple(map(_Kind.of, given[:count]))
        return tuple(each.detach() for each in given[-count:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        there = [(at, grad) for at, grad in enumerate(grads) if grad is not None]
        kinds = [ctx.kinds[at] for at, _ in there]
        wide = _wide([grad for _, grad in there], kinds, *ctx.edge)
        found: list[Tensor | None] = [None] * ctx.given
        for (at, _), grad in zip(there, wide, strict=True):
            found[at] = grad
        return (None, None, None, *found)


_apply: Any = compat.direct_apply(_Together)


def _wide(
    grads: list[Tensor],
    kinds: list[_Kind],
    inv: Tensor | None,
    found_inf: Tensor | None,
) -> list[Tensor]:
    """Gradients as their weights want them; with `inv` unscaled and checked too."""
    if torch.is_grad_enabled() or not all(map(_is_ordinary, grads, kinds)):
        wide = [*map(as_the_weight, grads, kinds)]
        if inv is None or found_inf is None:
            return wide
        wide = [unscaled_grad(each, inv, found_inf) for each in wide]
    else:
        wide = [
            torch.empty_like(
                grad,
                dtype=kind.dtype,
                memory_format=(
                    torch.contiguous_format if kind.plain else torch.preserve_format
                ),
            )
            for grad, kind in zip(grads, kinds, strict=True)
        ]
        compat.copy_all(wide, grads)
        if inv is None or found_inf is None:
            return wide
        compat.unscale_and_check(wide, inv, found_inf)
    return [
        each if kind.is_leaf else passed_on(each, found_inf)
        for each, kind in zip(wide, kinds, strict=True)
    ]


def _is_ordinary(grad: Tensor, kind: _Kind) -> bool:
    return (
        type(grad) is Tensor
        and kind.dtype == torch.float32
        and grad.layout == torch.strided
        and not compat.is_batch(grad)
    )


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
