"""Attention that was written out, as one op: `autoamp::attention`.

The op follows the steps that the model wrote between the product and the softmax
(`scores.py`), by kernels for CPUs (`ops.py`), and can be differentiated at will.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autoamp import compat
from autoamp.kernels.attention.function.ops import BACKWARD, FORWARD
from autoamp.kernels.attention.function.plain import written_out
from autoamp.kernels.attention.function.scores import steps_of


class _Attention(torch.autograd.Function):
    """Attention that was written out, on a CPU."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kinds: Sequence[int],
        numbers: Sequence[float],
        *tensors: Tensor,
    ) -> Tensor:
        ctx.given = kinds, numbers
        ctx.save_for_backward(query, key, value, *tensors)
        return FORWARD(query, key, value, [*tensors], kinds, numbers)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return gradients(ctx, grad, safe=False)


def gradients(ctx: Any, grad: Tensor, *, safe: bool) -> tuple[Tensor | None, ...]:
    """The backward of a Function of (query, key, value, kinds, numbers, *tensors).

    Args:
        ctx: has saved the tensors, and the kinds and numbers as `ctx.given`.
        grad: the gradient of the result.
        safe: whether a query that sees no key has weights of 0, and not NaN.
    """
    query, key, value, *tensors = ctx.saved_tensors
    kinds, numbers = ctx.given
    rest = (None,) * (2 + len(tensors))
    if compat.needs_plain_ops(grad):
        steps = steps_of(tensors, kinds, numbers)
        again = functools.partial(written_out, steps=steps, safe=safe)
        found = compat.gradients_by_torch(again, grad, (query, key, value))
        return (*found, *rest)
    given = (grad, query, key, value, tensors, kinds, numbers, safe)
    return (*BACKWARD(*given), *rest)


_apply = compat.direct_apply(_Attention)


def as_written(  # noqa: PLR0917
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tensors: Sequence[Tensor],
    kinds: Sequence[int],
    numbers: Sequence[float],
) -> Tensor:
    """Attention that was written out, on a CPU.

    Args:
        query, key, value: (batch, heads, queries or keys, width), in one float dtype.
        tensors, kinds, numbers: the steps of the scores (`scores.steps_of`).

    Returns:
        A tensor of the shape and dtype of `query`.
    """
    if compat.transforms_active():
        steps = steps_of(tensors, kinds, numbers)
        return written_out(query, key, value, steps).to(query.dtype)
    if not _is_trained(query, key, value):
        return FORWARD(query, key, value, [*tensors], kinds, numbers)  # type: ignore[no-any-return]
    return _apply(query, key, value, kinds, numbers, *tensors)


def _is_trained(*operands: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in operands)


_NAME = "attention"
_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor[] tensors, int[] kinds, "
    "float[] numbers) -> Tensor"
)
_LIBRARIES: list[torch.library.Library] = []
"""Held here, since a library takes its ops away where nobody holds it."""


def _op() -> Any:
    """`as_written` as one op, which graphs call and compilers trace into."""
    library = torch.library.Library("autoamp", "FRAGMENT")
    if not hasattr(torch.ops.autoamp, _NAME):
        library.define(_NAME + _SCHEMA)
        library.impl(_NAME, as_written, "CompositeImplicitAutograd")
        _LIBRARIES.append(library)
    return getattr(torch.ops.autoamp, _NAME).default


WRITTEN_ATTENTION = _op()
"""`autoamp::attention`: attention that was written out (`as_written`)."""
