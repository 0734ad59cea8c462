"""The functions a rewritten graph calls that are not ATen ops.

They stand for one node each: tracing never looks inside them, so a graph that holds
them can be rewritten again, printed and executed from its printed code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from autoamp import compat


class _LowWeight(torch.autograd.Function):
    """Forward: the low-precision copy.  Backward: the gradient, in the weight's dtype.

    One autograd node per *use* of a weight.  A single cast shared by all uses would
    have its gradients summed in low precision: 1000 uses of a weight whose true
    gradient is 1000 give 256 in bf16.  One node per use sums them in fp32.
    """

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        ctx.dtype = weight.dtype
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.to(ctx.dtype), None


_apply_low_weight = compat.direct_apply(_LowWeight)


def low_weight(weight: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """One use of `weight` (fp32, any shape) through `copy`, its low-precision copy.

    The result has the shape and dtype of `copy`; its gradient flows to `weight` in
    fp32, and none flows to `copy`.
    """
    result: torch.Tensor = _apply_low_weight(weight, copy)
    return result


def saturating_cast(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`value` in `dtype`, clamped to its finite range: never infinite where it was not.

    A mask filled with `torch.finfo(torch.float32).min` would become -inf in fp16 *and*
    in bf16 (whose largest number is a little below fp32's), and a row that is all -inf
    makes softmax NaN.  NaN and infinities that are there already stay.
    """
    limit = torch.finfo(dtype).max
    clamped = value.clamp(-limit, limit)
    return torch.where(value.isinf(), value, clamped).to(dtype)


def checkpointed(body: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """`body(*args)` under activation checkpointing, for graphs run as they are.

    Run by itself outside AOT, torch's `tag_activation_checkpoint` op does not restore
    the random state, so dropout draws another mask in the recomputation and gradients
    are wrong by a third.

    What it is given `checkpoint` keeps for the backward, and then no one may write to
    it.  What the user's region closed over (batch-norm statistics, which it writes) is
    an operand here, so only what needs a gradient is given.
    """
    given = [torch.is_tensor(a) and a.requires_grad for a in args]

    def region(*needing: Any) -> Any:
        rest = iter(needing)
        return body(*(next(rest) if g else a for a, g in zip(args, given, strict=True)))

    return checkpoint(
        region,
        *(a for a, g in zip(args, given, strict=True) if g),
        use_reentrant=False,
        preserve_rng_state=options.get("preserve_rng_state", True),
        determinism_check=options.get("determinism_check", "default"),
    )


LEAF_FUNCTIONS: frozenset[Callable[..., Any]] = frozenset(
    {low_weight, saturating_cast, checkpointed}
)
