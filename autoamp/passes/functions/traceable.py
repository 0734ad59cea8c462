"""Scaling at the edge for compilers that trace the backward too; checkpoints for none.

The functions of the edge here do the arithmetic of `edge` with plain ops, which a
compiler fuses into their neighbours.  AOT autograd supports no tensor hooks inside a
graph, and needs none, because its outputs are new tensors.  AOT autograd cannot
differentiate twice, so these functions cannot either.  `checkpointed` is the other way
round: it stands for an op that only AOT autograd runs rightly.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from autoamp import compat
from autoamp.passes.functions.casts import (
    LowWeight,
    low_weight_unscaled,
    scaled_result,
    unscale_half,
)
from autoamp.passes.functions.edge import (
    Unchanged,
    plainly_unscaled,
    scale_grad,
    scaled,
    unscale_grad,
    unscale_grad_,
)


def _gradient(grad: Tensor, factor: Tensor, found_inf: Tensor | None) -> Tensor:
    """`grad` times `factor`; one that leaves is checked."""
    if found_inf is None:
        return scaled(grad, factor)
    return plainly_unscaled(grad, factor, found_inf)


class _TracedUnchanged(Unchanged):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _gradient(grad, *ctx.edge), None, None


class _TracedApart(_TracedUnchanged):
    @staticmethod
    def forward(value: Tensor, *_: Any) -> Tensor:
        return value.clone()


class _TracedLowWeight(LowWeight):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _gradient(grad.to(ctx.dtype), *ctx.edge), None, None, None


_apply_unchanged = compat.direct_apply(_TracedUnchanged)
_apply_apart = compat.direct_apply(_TracedApart)
_apply_low_weight = compat.direct_apply(_TracedLowWeight)


def traced_scale_grad(value: Tensor, loss_scale: Tensor) -> Tensor:
    """As `scale_grad`, in a form AOT autograd traces."""
    return _apply_unchanged(value, loss_scale, None)


def traced_scale_grad_apart(value: Tensor, loss_scale: Tensor) -> Tensor:
    """As `traced_scale_grad`, with a result in memory of its own.

    If several results are views of one tensor, AOT autograd makes the views anew from
    the tensor outside the graph, and any op between the tensor and its views is lost.
    """
    return _apply_apart(value, loss_scale, None)


def traced_unscale_grad(
    value: Tensor, inv_loss_scale: Tensor, found_inf: Tensor
) -> Tensor:
    """As `unscale_grad`, in a form AOT autograd traces."""
    return _apply_unchanged(value, inv_loss_scale, found_inf)


def traced_scale_grad_(value: Tensor, loss_scale: Tensor) -> Tensor:
    """As `scale_grad`, for the final value of an input that the graph writes to.

    AOT autograd does not return such an input but writes it back outside the graph, so
    the scaling must happen in place.
    """
    # The numbers stay the same, so tensors saved for a backward are still valid.
    with compat.version_kept(value):
        return value.copy_(_apply_apart(value, loss_scale, None))


def traced_unscale_grad_(
    value: Tensor, inv_loss_scale: Tensor, found_inf: Tensor
) -> Tensor:
    """As `unscale_grad_`, in a form AOT autograd traces."""
    return value.copy_(_apply_unchanged(value.clone(), inv_loss_scale, found_inf))


def traced_scaled_result(value: Tensor, loss_scale: Tensor) -> Tensor:
    """As `scaled_result`, in a form AOT autograd traces."""
    return traced_scale_grad(value.to(torch.float32), loss_scale)


def traced_low_weight_unscaled(
    weight: Tensor,
    copy: Tensor,
    inv_loss_scale: Tensor,
    found_inf: Tensor,
) -> Tensor:
    """As `low_weight_unscaled`, in a form AOT autograd traces."""
    return _apply_low_weight(weight, copy, inv_loss_scale, found_inf)


FOR_COMPILERS: dict[Callable[..., Any], Callable[..., Any]] = {
    scale_grad: traced_scale_grad,
    unscale_grad: traced_unscale_grad,
    unscale_half: traced_unscale_grad,
    unscale_grad_: traced_unscale_grad_,
    scaled_result: traced_scaled_result,
    low_weight_unscaled: traced_low_weight_unscaled,
}
"""Function to the function that a compiler gets in its place."""


def checkpointed(body: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """`body(*args)` under activation checkpointing, for graphs run without a compiler.

    Torch's own op, `tag_activation_checkpoint`, restores no random state when it is run
    outside AOT autograd.
    """
    given = [torch.is_tensor(a) and a.requires_grad for a in args]

    def region(*needing: Any) -> Any:
        rest = iter(needing)
        # A recomputation is broken off by an exception, maybe inside a region of
        # autocast that a graph enters and leaves by calls.
        modes = compat.Modes()
        # What needs no gradient comes by the closure: `checkpoint` saves its arguments,
        # and a batch norm's statistics are written before the backward.
        every = [next(rest) if g else a for a, g in zip(args, given, strict=True)]
        try:
            with compat.past_transforms(every) or nullcontext():
                return body(*every)
        except BaseException:
            modes.restore()
            raise

    return checkpoint(
        region,
        *(a for a, g in zip(args, given, strict=True) if g),
        use_reentrant=False,
        # Else dropout draws another mask in the recomputation, and gradients are off by
        # a third.
        preserve_rng_state=options.get("preserve_rng_state", True),
        determinism_check=options.get("determinism_check", "default"),
    )


def checkpoint_as_python_does(gm: fx.GraphModule) -> None:
    """Makes the checkpointed regions of captured graph `gm` run without a compiler.

    In `gm` and in the graphs inside `gm`, `checkpointed` replaces torch's
    `tag_activation_checkpoint`.  The torch op is meant for AOT autograd only: run
    outside it, the op does not support other higher-order ops inside a region either.
    """
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.find_nodes(
            op="call_function", target=compat.CHECKPOINT
        ):
            node.target = checkpointed
        module.recompile()
