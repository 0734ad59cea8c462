"""The edge of a captured graph: gradients are scaled coming in, unscaled going out.

A gradient is multiplied by the loss scale S where it enters the graph (at the outputs)
and divided by S, in fp32, where it leaves (at the inputs and parameters).  In between
everything is S times its true value, so that small gradients do not underflow in fp16;
outside nobody sees S.

That stays exact however often one differentiates, because the backward of each of the
four operations is another of them:

    unscale out  x      backward: unscale      scale in  y      backward: scale
    unscale      g / S  backward: unscale out  scale     g * S  backward: scale in

(A gradient of a gradient enters with factor 1: the value it belongs to, inside, is S
times its true value already.)

Run as they are, graphs use tensor hooks on ordinary views: what a custom Function
returns could not be written to in place by whoever gets it.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch

from autoamp import compat


def scale_grad(value: torch.Tensor, loss_scale: torch.Tensor) -> torch.Tensor:
    """`value` itself; its gradient enters the graph times `loss_scale`.

    Args:
        value: a float output of the graph, any shape.
        loss_scale: S, 0-dim fp32; never written to, so that a backward that comes
            later finds what its forward was given.
    """
    if value.requires_grad:
        whole = _whole(value)
        if whole.grad_fn is None:
            compat.hook_gradient(whole, functools.partial(_scale, loss_scale))
        else:
            # After every hook on the tensor, the caller's later ones too, and after
            # `autograd.grad` has taken what it asks for.
            enter = functools.partial(_scale_one, loss_scale, whole.output_nr)
            compat.hook_node(whole.grad_fn, enter)
    return value


def unscale_grad(
    value: torch.Tensor, inv_loss_scale: torch.Tensor, found_inf: torch.Tensor
) -> torch.Tensor:
    """An alias of `value`; its gradient leaves the graph times `inv_loss_scale`.

    Args:
        value: a float input of the graph, any shape.
        inv_loss_scale: 1/S, 0-dim fp32.
        found_inf: one fp32 element, set to 1 where the gradient is not finite.
    """
    # Not `view_as`, whose backward reshapes: a gradient may be sparse.
    alias: torch.Tensor = torch.ops.aten.alias.default(value)
    if alias.requires_grad:
        unscale = _unscale if value.is_leaf else _unscale_and_pass_on
        leave = functools.partial(unscale, inv_loss_scale, found_inf)
        compat.hook_gradient(alias, leave)
    return alias


def unscale_grad_(
    value: torch.Tensor, inv_loss_scale: torch.Tensor, found_inf: torch.Tensor
) -> torch.Tensor:
    """`unscale_grad` in place: the history of `value` itself goes on from here.

    For an input that the graph writes to: what is written would bypass an alias.
    """
    whole = _whole(value)
    if whole.requires_grad:
        # The numbers stay; views alone need a new version to take the new history.
        with nullcontext() if whole is not value else compat.version_kept(value):
            _apply_unscale_in_place(whole, inv_loss_scale, found_inf)
    return value


def _whole(value: torch.Tensor) -> torch.Tensor:
    """What `value` is a view of, or itself: a view's own history does not last.

    A write to the whole, or to another view of it, makes it anew from the whole's.
    """
    return compat.whole(value)


def scaled(grad: torch.Tensor, loss_scale: torch.Tensor) -> torch.Tensor:
    """`grad` times `loss_scale`, in its own dtype also where it is 0-dim and half."""
    return (grad * loss_scale).to(grad.dtype)


def unscaled(
    grad: torch.Tensor, inv_loss_scale: torch.Tensor, found_inf: torch.Tensor
) -> torch.Tensor:
    """`grad` times `inv_loss_scale`, checked, as a new tensor of the same dtype."""
    if grad.dtype != torch.float32 or grad.layout != torch.strided:
        return plainly_unscaled(grad, inv_loss_scale, found_inf)
    return _unscaled_in_place(grad.clone(), inv_loss_scale, found_inf)


def _unscaled_in_place(
    grad: torch.Tensor, inv_loss_scale: torch.Tensor, found_inf: torch.Tensor
) -> torch.Tensor:
    try:
        compat.unscale_and_check(grad, inv_loss_scale, found_inf)
    except RuntimeError:
        if not compat.is_batch(grad):
            raise
        # Several at once, which the kernel cannot: no optimizer steps by those.
        return scaled(grad, inv_loss_scale)
    return grad


def plainly_unscaled(
    grad: torch.Tensor, inv_loss_scale: torch.Tensor, found_inf: torch.Tensor
) -> torch.Tensor:
    """`unscaled` by plain ops: any dtype and layout, and what a compiler fuses."""
    result = scaled(grad, inv_loss_scale)
    compat.check_finite(result, found_inf)
    return result


def leaving(
    wide: torch.Tensor, inv_loss_scale: torch.Tensor, found_inf: torch.Tensor
) -> torch.Tensor:
    """`wide`, the gradient of an fp32 leaf, unscaled and checked.

    In place, unless it is differentiated again: it has just been made by a conversion.
    """
    if torch.is_grad_enabled():  # create_graph=True
        return unscale_inside_grad(wide, inv_loss_scale, found_inf)
    return _unscaled_in_place(wide, inv_loss_scale, found_inf)


def passed_on(grad: torch.Tensor, found_inf: torch.Tensor) -> torch.Tensor:
    """`grad`, unscaled and checked, for what others computed: infinities become NaN.

    The weights it flows on to belong to no graph of ours, so that no flag tells of
    them, only their gradients: and `clip_grad_value_` makes a 1 of an infinity, but
    leaves a NaN.
    """
    if found_inf.device.type == "cpu" and not bool(found_inf):
        return grad
    return infinities_as_nan(grad)


def infinities_as_nan(grad: torch.Tensor) -> torch.Tensor:
    """`grad` without infinities; sparse and complex ones, which nobody clips, as is."""
    if grad.layout != torch.strided or grad.is_complex():
        return grad
    return grad.nan_to_num(torch.nan, torch.nan, torch.nan)


def unscale_inside_grad(
    grad: torch.Tensor, inv_loss_scale: torch.Tensor, found_inf: torch.Tensor
) -> torch.Tensor:
    """`unscaled`, differentiable again: for a backward with `create_graph=True`."""
    result: torch.Tensor = _apply_unscale(grad, inv_loss_scale, found_inf)
    return result


def scale_inside_grad(grad: torch.Tensor, loss_scale: torch.Tensor) -> torch.Tensor:
    """`grad` times `loss_scale`, differentiable again."""
    result: torch.Tensor = _apply_scale(grad, loss_scale)
    return result


@compat.never_captured
def _unscale(
    inv_loss_scale: torch.Tensor, found_inf: torch.Tensor, grad: torch.Tensor | None
) -> torch.Tensor | None:
    if grad is None:  # nothing flows back: a low copy has its gradient elsewhere
        return None
    if torch.is_grad_enabled():  # create_graph=True
        return unscale_inside_grad(grad, inv_loss_scale, found_inf)
    return unscaled(grad, inv_loss_scale, found_inf)


@compat.never_captured
def _unscale_and_pass_on(
    inv_loss_scale: torch.Tensor, found_inf: torch.Tensor, grad: torch.Tensor | None
) -> torch.Tensor | None:
    result = _unscale(inv_loss_scale, found_inf, grad)
    return None if result is None else passed_on(result, found_inf)


@compat.never_captured
def _scale(loss_scale: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor | None:
    if grad is None:
        return None
    if torch.is_grad_enabled():
        return scale_inside_grad(grad, loss_scale)
    return scaled(grad, loss_scale)


@compat.never_captured
def _scale_one(
    loss_scale: torch.Tensor, place: int, grads: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor | None, ...]:
    """`_scale` for one of the results of an autograd node."""
    grad = grads[place]
    if grad is None:
        return grads
    return (*grads[:place], _scale(loss_scale, grad), *grads[place + 1 :])


class _Unscale(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, grad: torch.Tensor, inv: torch.Tensor, found_inf: torch.Tensor
    ) -> torch.Tensor:
        ctx.inv, ctx.found_inf = inv, found_inf
        return unscaled(grad, inv, found_inf)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return _apply_unscale_out(grad, ctx.inv, ctx.found_inf), None, None


class UnscaleOut(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, inv: torch.Tensor, found_inf: torch.Tensor
    ) -> torch.Tensor:
        ctx.inv, ctx.found_inf = inv, found_inf
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return _unscale(ctx.inv, ctx.found_inf, grad), None, None


class _UnscaleInPlace(UnscaleOut):
    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, inv: torch.Tensor, found_inf: torch.Tensor
    ) -> torch.Tensor:
        ctx.inv, ctx.found_inf = inv, found_inf
        ctx.mark_dirty(value)
        return value

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return _unscale_and_pass_on(ctx.inv, ctx.found_inf, grad), None, None


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, loss_scale: torch.Tensor) -> torch.Tensor:
        ctx.loss_scale = loss_scale
        return scaled(grad, loss_scale)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return _apply_scale_in(grad, ctx.loss_scale), None


class ScaleIn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, loss_scale: torch.Tensor
    ) -> torch.Tensor:
        ctx.loss_scale = loss_scale
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return _scale(ctx.loss_scale, grad), None


_apply_unscale_in_place = compat.direct_apply(_UnscaleInPlace)
_apply_unscale = compat.direct_apply(_Unscale)
_apply_scale_in = compat.direct_apply(ScaleIn)
_apply_unscale_out = compat.direct_apply(UnscaleOut)
_apply_scale = compat.direct_apply(_Scale)
