"""The low dtypes of this CPU, and its kernels for attention."""

from __future__ import annotations

import functools
from typing import Any

import torch

from autoamp.dtypes import LOW_TABLE


@functools.cache
def cpu_low_precision_units() -> dict[torch.dtype, str]:
    """Low dtypes this CPU multiplies in hardware, with the name of the unit."""
    found: dict[torch.dtype, str] = {}
    for row in LOW_TABLE:
        unit = next(filter(_is_here, row.cpu_units), None)
        if unit is not None:
            found[row.dtype] = unit
    return found


_QUESTIONS = {
    "amx_bf16": "_is_amx_tile_supported",
    "avx512_bf16": "_is_avx512_bf16_supported",
    "amx_fp16": "_is_amx_fp16_supported",
}
"""Each unit of a CPU to the function of `torch.cpu` that says whether it is here."""


def _is_here(unit: str) -> bool:
    ask = getattr(torch.cpu, _QUESTIONS[unit], None)
    return bool(ask()) if ask is not None else False


def is_capturing(device: torch.device) -> bool:
    """Whether work on `device` is being recorded in a CUDA graph: nothing may wait."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def cpu_attention() -> tuple[Any, Any] | None:
    """Torch's attention kernel for CPUs and its backward; None where torch has none."""
    name = "_scaled_dot_product_flash_attention_for_cpu"
    names = (name, f"{name}_backward")
    found = [getattr(torch.ops.aten, each, None) for each in names]
    if None in found or not hasattr(torch, "_fused_sdp_choice"):
        return None
    forward, backward = (op.default for op in found)  # type: ignore[union-attr]
    return forward, backward


def runs_one_kernel(*given: Any, scale: float | None) -> bool:
    """Whether torch computes an attention on a CPU by its kernel for CPUs.

    For where `cpu_attention()` is not None.

    Args:
        given: query, key, value, mask, dropout and whether a query sees no later keys.
    """
    return int(torch._fused_sdp_choice(*given, scale=scale)) == _FLASH


_FLASH = 1
"""`sdp::SDPBackend::flash_attention` of torch's `SDPUtils`."""


def softmax_gradient(grad: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The gradient of the operand of a softmax over the last dimension.

    Args:
        grad: the gradient of `weights`, in their dtype.
        weights: the result of the softmax.
    """
    kernel = getattr(torch, "_softmax_backward_data", None)
    if kernel is not None:
        return kernel(grad, weights, -1, weights.dtype)  # type: ignore[no-any-return]
    return weights * (grad - (grad * weights).sum(-1, keepdim=True))


def safe_softmax(scores: torch.Tensor) -> torch.Tensor:
    """The softmax over the last dimension; 0 in rows of minus infinity, and not NaN."""
    kernel = getattr(torch, "_safe_softmax", None)
    if kernel is not None:
        return kernel(scores, -1)  # type: ignore[no-any-return]
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(nothing, 0.0)
