"""What this machine computes in: low dtypes of its CPU, TF32, attention on CPUs."""

from __future__ import annotations

import functools
import operator
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
    return bool(getattr(torch.cpu, _QUESTIONS[unit])())


def is_capturing(device: torch.device) -> bool:
    """Whether work on `device` is being recorded in a CUDA graph: nothing may wait."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def cpu_attention() -> tuple[Any, Any]:
    """Torch's attention kernel for CPUs and its backward."""
    aten: Any = torch.ops.aten
    name = "_scaled_dot_product_flash_attention_for_cpu"
    return getattr(aten, name).default, getattr(aten, f"{name}_backward").default


def runs_one_kernel(*given: Any, scale: float | None) -> bool:
    """Whether torch computes an attention on a CPU by its kernel for CPUs.

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
    return torch._softmax_backward_data(grad, weights, -1, weights.dtype)


def safe_softmax(scores: torch.Tensor) -> torch.Tensor:
    """The softmax over the last dimension; 0 in rows of minus infinity, and not NaN."""
    return torch._safe_softmax(scores, -1)


KINDS = ("matmul", "conv", "rnn")
"""The kinds of products for which torch has a switch each."""

_SWITCHES = {"matmul": "cuda.matmul", "conv": "cudnn.conv", "rnn": "cudnn.rnn"}
"""The object in `torch.backends` that has `fp32_precision` for a kind of products."""


def tf32_kinds() -> frozenset[str]:
    """The kinds of products that CUDA kernels may compute in TF32, as torch is set now.

    The switches are read and never set; they can be read where there is no GPU.  Torch
    leaves TF32 on for convolutions and recurrent layers, and off for matrix products
    (https://docs.pytorch.org/docs/stable/notes/cuda.html, "TensorFloat-32").
    """
    return frozenset(kind for kind in KINDS if _allows_tf32(kind))


def _allows_tf32(kind: str) -> bool:
    switch: Any = operator.attrgetter(_SWITCHES[kind])(torch.backends)
    return bool(switch.fp32_precision == "tf32")
