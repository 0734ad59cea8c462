"""The edge of a captured graph: gradients are scaled coming in, unscaled going out.

A gradient is multiplied by the loss scale S where it enters the graph (at the outputs)
and divided by S, in fp32, where it leaves (at the inputs and parameters).  Inside the
graph every gradient is S times its true value, so that small gradients do not underflow
in fp16; outside the graph every gradient has its true value.

Both are a product with a factor, S or 1/S, and only a gradient that leaves is checked:
it has a `found_inf`.  Gradients of any order are exact, because the backward of each of
two operations is the other one:

    change nothing  x           backward: multiply
    multiply        g * factor  backward: change nothing

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

# NOTE: what the edge rounds.
#
# A dynamic scale is a power of two where its start and its factors are.  A product with
# one changes the exponent alone, and a sum of scaled gradients is the scaled sum, bit
# for bit.  So a graph that loses nothing to fp16's range gives the gradients that it
# would give unscaled.  Any other scale rounds an fp32 gradient by 2**-24 on its way in
# and again on its way out, beside the 2**-11 of each fp16 op between the two.


def scale_grad(value: Tensor, loss_scale: Tensor) -> Tensor:
    """`value` itself; its gradient is multiplied by `loss_scale` on entering the graph.

    Args:
        value: a float output of the graph, any shape.
        loss_scale: S, 0-dim fp32; it is never written to, so that a later
            backward finds the S that its forward used.
    """
    if value.requires_grad:
        whole = compat.whole(value)
        if not whole.requires_grad:  # a rank's part of a DTensor shows its memory
            whole = value
        if whole.grad_fn is None:
            # A leaf has no node that a hook could be put on.
            compat.hook_gradient(whole, functools.partial(gradient, loss_scale, None))
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
        leave = functools.partial(gradient, inv_loss_scale, found_inf)
        compat.hook_gradient(alias, leave)
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


def scaled(grad: Tensor, factor: Tensor) -> Tensor:
    """`grad` times `factor`, in the dtype of `grad`, even a 0-dim half `grad`."""
    if compat.is_distributed(grad):  # a product of DTensors might add parts up first
        return compat.with_memory(grad, scaled(compat.own_memory(grad), factor))
    # A 0-dim half times the 0-dim fp32 factor is promoted to fp32.
    return (grad * factor).to(grad.dtype)


def plainly_unscaled(grad: Tensor, inv_loss_scale: Tensor, found_inf: Tensor) -> Tensor:
    """`grad` unscaled and checked by plain ops: any dtype and layout, and they fuse."""
    result = scaled(grad, inv_loss_scale)
    # No optimizer steps by a batch or a tangent.
    if not (compat.is_batch(grad) or compat.forward_mode()):
        compat.check_finite(result, found_inf)
    return infinities_as_nan(result)


def _multiplied(grad: Tensor, factor: Tensor, found_inf: Tensor | None) -> Tensor:
    """`grad` times `factor`, as a new tensor of the same dtype.

    `found_inf`, if there is one, is set to 1 where the product is not finite.
    """
    if found_inf is None:
        return scaled(grad, factor)
    if grad.dtype != torch.float32 or grad.layout != torch.strided:
        return plainly_unscaled(grad, factor, found_inf)
    # A clone: autograd may hand one gradient to several nodes.
    return _unscaled_in_place(grad.clone(), factor, found_inf)


def _unscaled_in_place(
    grad: Tensor, inv_loss_scale: Tensor, found_inf: Tensor
) -> Tensor:
    if compat.forward_mode():  # the kernel would leave tangents as they are
        return scaled(grad, inv_loss_scale)
    try:
        # Of a DTensor each rank looks at its own part, and optimizer steps agree.
        parts = [grad if type(grad) is Tensor else compat.own_memory(grad)]
        compat.unscale_and_check(parts, found_inf, inv_loss_scale)
        # A flag on a CPU can be read, and nearly always saves a pass over the gradient;
        # a look at any other would wait for the device.
        if not found_inf.is_cpu or found_inf:
            compat.infinities_to_nan_(parts)
    except RuntimeError:
        if not compat.is_batch(grad):
            raise
        # The kernel takes no batch of gradients; no optimizer steps by a batch, so it
        # needs no check.
        return scaled(grad, inv_loss_scale)
    return grad


def leaving(wide: Tensor, inv_loss_scale: Tensor, found_inf: Tensor) -> Tensor:
    """`wide`, the gradient of an fp32 leaf, unscaled and checked.

    The work is done in place, because a conversion has just made `wide`, unless the
    result is differentiated again.
    """
    if torch.is_grad_enabled():  # create_graph=True
        return multiplied_again(wide, inv_loss_scale, found_inf)
    return _unscaled_in_place(wide, inv_loss_scale, found_inf)


def infinities_as_nan(grad: Tensor) -> Tensor:
    """`grad` with NaN for infinities; sparse and complex gradients stay as they are.

    The overflow of a gradient must show in what the script makes of the gradient:
    `clip_grad_value_` turns an infinity into a 1 but leaves a NaN.
    """
    if grad.layout != torch.strided or grad.is_complex():
        return grad
    if compat.is_distributed(grad):
        part = infinities_as_nan(compat.own_memory(grad))
        return compat.with_memory(grad, part)
    return grad.nan_to_num(torch.nan, torch.nan, torch.nan)


def multiplied_again(
    grad: Tensor, factor: Tensor, found_inf: Tensor | None = None
) -> Tensor:
    """`grad` times `factor`, in differentiable form, for `create_graph=True`."""
    return compat.on_whole_batch(_apply_multiply, grad, factor, found_inf)


@compat.never_captured
def gradient(factor: Tensor, found_inf: Tensor | None, grad: Any) -> Any:
    """`grad` times `factor`, as a hook on a gradient gives it; checked if it leaves."""
    if grad is None:  # no gradient flows back here: low copies send theirs elsewhere
        return None
    if torch.is_grad_enabled():  # create_graph=True
        return multiplied_again(grad, factor, found_inf)
    return _multiplied(grad, factor, found_inf)


@compat.never_captured
def _scale_one(
    loss_scale: Tensor, index: int, grads: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """`gradient` for the gradient of result number `index` of an autograd node."""
    if grads[index] is None:
        return grads
    scaled_one = gradient(loss_scale, None, grads[index])
    return (*grads[:index], scaled_one, *grads[index + 1 :])


class _Edge(torch.autograd.Function):
    """One of the two operations, of a tensor, a factor, and a `found_inf` or None."""

    generate_vmap_rule = True  # for a batch of gradients that is differentiated again

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Tensor) -> None:
        ctx.edge = inputs[1:]


class _Multiply(_Edge):
    @staticmethod
    def forward(grad: Tensor, factor: Tensor, found_inf: Tensor | None) -> Tensor:
        return _multiplied(grad, factor, found_inf)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # The second-order gradient belongs to a value that is S times its true one
        # already, so that it enters with factor 1.
        return _apply_unchanged(grad, *ctx.edge), None, None


class Unchanged(_Edge):
    """A view, whose gradient is multiplied."""

    @staticmethod
    def forward(value: Tensor, *_: Any) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        factor, found_inf = ctx.edge
        return gradient(factor, found_inf, grad), None, None


class _UnscaleInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, inv: Tensor, found_inf: Tensor) -> Tensor:
        ctx.edge = inv, found_inf
        # Without the mark autograd would take the result for a new tensor, and leave
        # the history of `value` as it is.
        ctx.mark_dirty(value)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        inv, found_inf = ctx.edge
        return gradient(inv, found_inf, grad), None, None


_apply_unscale_in_place = compat.direct_apply(_UnscaleInPlace)
_apply_multiply = compat.direct_apply(_Multiply)
_apply_unchanged = compat.direct_apply(Unchanged)
