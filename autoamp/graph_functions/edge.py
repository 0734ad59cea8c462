"""The edge of a captured graph: gradients are scaled coming in, unscaled going out.

A gradient is multiplied by the loss scale S where it enters the graph (at the outputs)
and divided by S, in fp32, where it leaves (at the inputs and parameters).  Inside the
graph every gradient is S times its true value, so that small gradients do not underflow
in fp16; outside the graph every gradient has its true value.

Gradients of any order are exact, because the backward of each of the four
operations is another of the four:

    unscale out  x      backward: unscale      scale in  y      backward: scale
    unscale      g / S  backward: unscale out  scale     g * S  backward: scale in

(A gradient of a gradient enters with factor 1, because the inner gradient to which the
outer one belongs is already S times its true value.)

Graphs that run without a compiler use tensor hooks on ordinary views, because callers
could not write in place to a result of a custom Function.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from autoamp import compat


def scale_grad(value: Tensor, loss_scale: Tensor) -> Tensor:
    """`value` itself; its gradient is multiplied by `loss_scale` on entering the graph.

    Args:
        value: a float output of the graph, any shape.
        loss_scale: S, 0-dim fp32; nobody writes to this tensor, so that a later
            backward finds the S that its forward used.
    """
    if value.requires_grad:
        whole = compat.whole(value)
        if not whole.requires_grad:  # a rank's part of a DTensor shows its memory
            whole = value
        if whole.grad_fn is None:
            compat.hook_gradient(whole, functools.partial(_scale, loss_scale))
        else:
            # A hook on the node runs after every hook on the tensor, the caller's later
            # ones too, and after `autograd.grad` has taken the gradients asked for.
            scale_in = functools.partial(_scale_one, loss_scale, whole.output_nr)
            compat.hook_node(whole.grad_fn, scale_in)
    return value


def unscale_grad(value: Tensor, inv_loss_scale: Tensor, found_inf: Tensor) -> Tensor:
    """An alias of `value`; its gradient is multiplied by `inv_loss_scale` on leaving.

    Args:
        value: a float input of the graph, any shape.
        inv_loss_scale: 1/S, 0-dim fp32.
        found_inf: one fp32 element, set to 1 where the gradient is not finite.
    """
    # `view_as` would not do: its backward reshapes, and a gradient may be sparse.
    alias: Tensor = torch.ops.aten.alias.default(value)
    if alias.requires_grad:
        unscale = _unscale if value.is_leaf else _unscale_and_pass_on
        unscale_out = functools.partial(unscale, inv_loss_scale, found_inf)
        compat.hook_gradient(alias, unscale_out)
    return alias


def unscale_grad_(value: Tensor, inv_loss_scale: Tensor, found_inf: Tensor) -> Tensor:
    """`unscale_grad` in place: the unscaling joins the history of `value` itself.

    This is for an input that the graph writes to, because writes bypass an alias.
    """
    whole = compat.whole(value)
    if whole.requires_grad:
        # No number changes, so the version is kept, except of a view, which takes the
        # new history only with a new version.
        with nullcontext() if whole is not value else compat.version_kept(value):
            _apply_unscale_in_place(whole, inv_loss_scale, found_inf)
    return value


def scaled(grad: Tensor, loss_scale: Tensor) -> Tensor:
    """`grad` times `loss_scale`, in the dtype of `grad`, even a 0-dim half `grad`."""
    if compat.is_distributed(grad):  # a product of DTensors might add parts up first
        return compat.with_memory(grad, scaled(compat.own_memory(grad), loss_scale))
    return (grad * loss_scale).to(grad.dtype)


def unscaled(grad: Tensor, inv_loss_scale: Tensor, found_inf: Tensor) -> Tensor:
    """`grad` times `inv_loss_scale`, as a new tensor of the same dtype.

    `found_inf` is set to 1 where the product is not finite.
    """
    if grad.dtype != torch.float32 or grad.layout != torch.strided:
        return plainly_unscaled(grad, inv_loss_scale, found_inf)
    return _unscaled_in_place(grad.clone(), inv_loss_scale, found_inf)


def _unscaled_in_place(
    grad: Tensor, inv_loss_scale: Tensor, found_inf: Tensor
) -> Tensor:
    if compat.forward_mode():  # the kernel would leave tangents as they are
        return scaled(grad, inv_loss_scale)
    try:
        # Of a DTensor each rank looks at its own part, and optimizer steps agree.
        compat.unscale_and_check([compat.own_memory(grad)], inv_loss_scale, found_inf)
    except RuntimeError:
        if not compat.is_batch(grad):
            raise
        # The kernel takes no batch of gradients; no optimizer steps by a batch, so it
        # needs no check.
        return scaled(grad, inv_loss_scale)
    return grad


def plainly_unscaled(grad: Tensor, inv_loss_scale: Tensor, found_inf: Tensor) -> Tensor:
    """`unscaled` by plain ops, which take any dtype and layout and which fuse."""
    result = scaled(grad, inv_loss_scale)
    # No optimizer steps by a batch or a tangent.
    if not (compat.is_batch(grad) or compat.forward_mode()):
        compat.check_finite(result, found_inf)
    return result


def leaving(wide: Tensor, inv_loss_scale: Tensor, found_inf: Tensor) -> Tensor:
    """`wide`, the gradient of an fp32 leaf, unscaled and checked.

    The work is done in place, because a conversion has just made `wide`, unless the
    result is differentiated again.
    """
    if torch.is_grad_enabled():  # create_graph=True
        return unscale_inside_grad(wide, inv_loss_scale, found_inf)
    return _unscaled_in_place(wide, inv_loss_scale, found_inf)


def passed_on(grad: Tensor, found_inf: Tensor) -> Tensor:
    """`grad`, unscaled and checked, for code outside the graph: infinities become NaN.

    The gradient flows on to weights of no rewritten graph.  No found_inf covers these
    weights, so an overflow must show in their gradients.  An infinity would not do,
    because `clip_grad_value_` turns an infinity into a 1 but leaves a NaN.
    """
    if found_inf.device.type == "cpu" and not bool(found_inf):
        return grad
    return infinities_as_nan(grad)


def infinities_as_nan(grad: Tensor) -> Tensor:
    """`grad` with NaN for infinities; nobody clips sparse or complex gradients.

    Sparse and complex gradients are therefore returned unchanged.
    """
    if grad.layout != torch.strided or grad.is_complex():
        return grad
    if compat.is_distributed(grad):
        part = infinities_as_nan(compat.own_memory(grad))
        return compat.with_memory(grad, part)
    return grad.nan_to_num(torch.nan, torch.nan, torch.nan)


def unscale_inside_grad(
    grad: Tensor, inv_loss_scale: Tensor, found_inf: Tensor
) -> Tensor:
    """`unscaled` in differentiable form, for a backward with `create_graph=True`."""
    edge = inv_loss_scale, found_inf
    return compat.on_whole_batch(_apply_unscale, grad, *edge)


def scale_inside_grad(grad: Tensor, loss_scale: Tensor) -> Tensor:
    """`grad` times `loss_scale` in differentiable form."""
    return compat.on_whole_batch(_apply_scale, grad, loss_scale)


def unscaled_grad(grad: Tensor, inv_loss_scale: Tensor, found_inf: Tensor) -> Tensor:
    """`unscaled`, in differentiable form where the result is differentiated again."""
    if torch.is_grad_enabled():  # create_graph=True
        return unscale_inside_grad(grad, inv_loss_scale, found_inf)
    return unscaled(grad, inv_loss_scale, found_inf)


@compat.never_captured
def _unscale(
    inv_loss_scale: Tensor, found_inf: Tensor, grad: Tensor | None
) -> Tensor | None:
    if grad is None:  # no gradient flows back here: low copies send theirs elsewhere
        return None
    return unscaled_grad(grad, inv_loss_scale, found_inf)


@compat.never_captured
def _unscale_and_pass_on(
    inv_loss_scale: Tensor, found_inf: Tensor, grad: Tensor | None
) -> Tensor | None:
    result = _unscale(inv_loss_scale, found_inf, grad)
    return None if result is None else passed_on(result, found_inf)


@compat.never_captured
def _scale(loss_scale: Tensor, grad: Tensor | None) -> Tensor | None:
    if grad is None:
        return None
    if torch.is_grad_enabled():
        return scale_inside_grad(grad, loss_scale)
    return scaled(grad, loss_scale)


@compat.never_captured
def _scale_one(
    loss_scale: Tensor, index: int, grads: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """`_scale` for the gradient of result number `index` of an autograd node."""
    grad = grads[index]
    if grad is None:
        return grads
    return (*grads[:index], _scale(loss_scale, grad), *grads[index + 1 :])


class _Edge(torch.autograd.Function):
    """One of the operations, whose operands after the first it keeps as `ctx.edge`."""

    generate_vmap_rule = True  # for a batch of gradients that is differentiated again

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], _: Tensor) -> None:
        ctx.edge = inputs[1:]


class _Unscale(_Edge):
    @staticmethod
    def forward(grad: Tensor, inv: Tensor, found_inf: Tensor) -> Tensor:
        return unscaled(grad, inv, found_inf)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _apply_unscale_out(grad, *ctx.edge), None, None


class UnscaleOut(_Edge):
    @staticmethod
    def forward(value: Tensor, *_: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        inv, found_inf = ctx.edge
        return _unscale(inv, found_inf, grad), None, None


class _UnscaleInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, inv: Tensor, found_inf: Tensor) -> Tensor:
        ctx.edge = inv, found_inf
        ctx.mark_dirty(value)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        inv, found_inf = ctx.edge
        return _unscale_and_pass_on(inv, found_inf, grad), None, None


class _Scale(_Edge):
    @staticmethod
    def forward(grad: Tensor, loss_scale: Tensor) -> Tensor:
        return scaled(grad, loss_scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _apply_scale_in(grad, *ctx.edge), None


class ScaleIn(_Edge):
    @staticmethod
    def forward(value: Tensor, *_: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (loss_scale,) = ctx.edge
        return _scale(loss_scale, grad), None


_apply_unscale_in_place = compat.direct_apply(_UnscaleInPlace)
_apply_unscale = compat.direct_apply(_Unscale)
_apply_scale_in = compat.direct_apply(ScaleIn)
_apply_unscale_out = compat.direct_apply(UnscaleOut)
_apply_scale = compat.direct_apply(_Scale)
