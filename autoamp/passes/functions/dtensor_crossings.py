"""The calls that cross between DTensors and local parts, as the passes see them.

The passes see a graph of DTensors as a graph of whole tensors: a DTensor stands for its
whole tensor, and a rank's local part is a tensor by itself.  `from_local`, `to_local`
and `redistribute` change the shape between the two, or nothing; three ops with no data
stand for them (`IN_WHOLE`).  Before the graph runs, torch's calls take their places
again (`passes/write/dtensor_calls.py`).

A DTensor is gathered in the low dtype for readers that read it low.  A cast commutes
with a gather: the ranks may as well cast what each holds and send half the bytes.  The
gradients must not change for that.  Behind a gather in fp32 autograd adds them up in
fp32, first those of all readers, then those of all ranks; so does the backward here.
Where one reader's gradient is all there is, every rank's summand is a low number, so
that the ranks exchange the low numbers and each adds up its part in fp32: half the
bytes of an fp32 reduce-scatter, and the same sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE

_NAMES = ("from_local", "to_local", "redistribute")
_SCHEMA = "(Tensor self, SymInt[] size, SymInt[] stride) -> Tensor"
_LIBRARIES: list[torch.library.Library] = []
"""Held here: torch unregisters a library's ops when the library is freed."""


def _stands_for(value: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    return value.new_empty_strided(size, stride)


def _ops() -> dict[str, Any]:
    library = torch.library.Library("autoamp", "FRAGMENT")
    # A second definition, after a re-import, would raise.
    if not hasattr(torch.ops.autoamp, _NAMES[0]):
        for name in _NAMES:
            library.define(name + _SCHEMA)
            library.impl(name, _stands_for, "CompositeExplicitAutograd")
        _LIBRARIES.append(library)
    return {name: getattr(torch.ops.autoamp, name).default for name in _NAMES}


IN_WHOLE: dict[str, Any] = _ops()
"""The op that stands for each call in a graph of whole tensors.

The op takes the value, and the sizes and strides of the result."""


def from_local(value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A DTensor of what this rank holds, as `DTensor.from_local` makes it."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(value, *args, **kwargs)


def to_local(value: Any, *args: Any, **kwargs: Any) -> Tensor:
    """What this rank holds of DTensor `value`, as `DTensor.to_local` gives it."""
    result: Tensor = value.to_local(*args, **kwargs)
    return result


def redistribute(value: Any, *args: Any, **kwargs: Any) -> Tensor:
    """DTensor `value` under other placements, as `DTensor.redistribute` gives it."""
    result: Tensor = value.redistribute(*args, **kwargs)
    return result


def full_tensor(value: Any, *args: Any, **kwargs: Any) -> Tensor:
    """The whole of DTensor `value`, as `DTensor.full_tensor` gives it."""
    result: Tensor = value.full_tensor(*args, **kwargs)
    return result


MESH_CALLS: dict[str, Callable[..., Tensor]] = {
    "from_local": from_local,
    "to_local": to_local,
    "redistribute": redistribute,
    "full_tensor": full_tensor,
}
"""Torch's calls by name, as functions of a graph that runs on DTensors."""


class _GatheredLow(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Any, dtype: torch.dtype, uses: int, given: Any
    ) -> tuple[Tensor, ...]:
        args, kwargs = given
        ctx.set_materialize_grads(False)
        ctx.before = value.placements
        # Each rank casts its part, and half the bytes are sent.
        low = compat.with_memory(value, compat.own_memory(value).to(dtype))
        gathered = low.redistribute(*args, **kwargs)  # type: ignore[attr-defined]
        return tuple(gathered.detach() for _ in range(uses))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        found = [grad for grad in grads if grad is not None]
        if not found:
            return (None,) * 4
        total: Any = None
        # Low summands can be sent low only where no local sum of several comes first:
        # that sum is in fp32.
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
