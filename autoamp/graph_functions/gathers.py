"""A DTensor gathered in the low dtype, for readers that read it low.

A cast commutes with a gather: the ranks may as well cast what each holds and send half
the bytes.  The gradients must not change for that.  Behind a gather in fp32 autograd
adds them up in fp32, first those of all readers, then those of all ranks; so does the
backward here.  Where one reader's gradient is all there is, every rank's summand is a
low number, so that the ranks exchange the low numbers and each adds up its part in
fp32: half the bytes of an fp32 reduce-scatter, and the same sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE


class _GatheredLow(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Any, dtype: torch.dtype, uses: int, given: Any
    ) -> tuple[Tensor, ...]:
        args, kwargs = given
        ctx.set_materialize_grads(False)
        ctx.before = value.placements
        low = compat.with_memory(value, compat.own_memory(value).to(dtype))
        gathered = low.redistribute(*args, **kwargs)  # type: ignore[attr-defined]
        return tuple(gathered.detach() for _ in range(uses))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        found = [grad for grad in grads if grad is not None]
        if not found:
            return (None,) * 4
        total: Any = None
        if len(found) == 1 and not torch.is_grad_enabled():
            total = compat.scattered_sum(found[0], ctx.before, HIGH_DTYPE)
        if total is None:
            for grad in found:
                wide = grad.to(HIGH_DTYPE)
                total = wide if total is None else total + wide
            total = total.redistribute(placements=ctx.before)
        return total, None, None, None


_apply: Any = compat.direct_apply(_GatheredLow)


def gathered_low(value: Tensor, dtype: torch.dtype, uses: int) -> Any:
    """`value` cast to `dtype`, as a graph of whole tensors has it: see `gather_low`."""
    made = tuple(value.to(dtype) for _ in range(uses))
    return made if uses > 1 else made[0]


def gather_low(
    value: Tensor, dtype: torch.dtype, uses: int, *args: Any, **kwargs: Any
) -> Any:
    """DTensor `value` (fp32) redistributed in `dtype`, once for `uses` readers.

    Args:
        args, kwargs: the arguments of `DTensor.redistribute`.

    Returns:
        A DTensor of the shape of `value`; a tuple of `uses` of them for several uses.
        Gradients are added up in fp32, and flow to `value`.
    """
    made: tuple[Tensor, ...] = _apply(value, dtype, uses, (args, kwargs))
    return made if uses > 1 else made[0]
