"""Capabilities of this machine: low dtypes of its CPU, TF32, attention on CPUs."""

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
        here = [u for u in row.cpu_units if getattr(torch.cpu, _QUESTIONS[u])()]
        if here:
            found[row.dtype] = here[0]
    return found


_QUESTIONS = {
    "amx_bf16": "_is_amx_tile_supported",
    "avx512_bf16": "_is_avx512_bf16_supported",
    "amx_fp16": "_is_amx_fp16_supported",
}
"""Each unit of a CPU to the function of `torch.cpu` that says whether it is here."""


def has_autocast_rule(op: Any, device: str) -> bool:
    """Whether autocast of a type of device decides on an op as a whole."""
    key = f"Autocast{device.upper()}"
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)
    except RuntimeError:  # torch knows no autocast of this device
        return True


def products_give_fp32() -> bool:
    """Whether torch's CUDA kernels give products of 16-bit matrices in fp32.

    `torch.mm(a, b, out_dtype=torch.float32)` writes the kernel's fp32 sums as they are.
    A build for ROCm has the call as well and raises "output type float is not supported
    for ROCm" (aten/src/ATen/cuda/CUDABlas.cpp).
    """
    return torch.version.hip is None


def is_capturing(device: torch.device) -> bool:
    """Whether work on `device` is being recorded in a CUDA graph: nothing may wait."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def cpu_attention() -> tuple[Any, Any]:
    """Torch's attention kernel for CPUs and its backward."""
    aten: Any = torch.ops.aten
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return aten._scaled_dot_product_flash_attention_for_cpu.default, backward.default


def runs_one_kernel(*given: Any, scale: float | None) -> bool:
    """Whether torch computes an attention on a CPU by its kernel for CPUs.

    Args:
        given: query, key, value, mask, dropout and whether a query sees no later keys.
    """
    # Torch's own choice is asked for: it looks at dtypes, strides, masks and settings.
    return int(torch._fused_sdp_choice(*given, scale=scale)) == _FLASH


_FLASH = 1
"""`sdp::SDPBackend::flash_attention` of torch's `SDPUtils`."""


def softmax_gradient(
    grad: torch.Tensor, weights: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The gradient of a softmax's operand, from that of its result `weights`.

    Args:
        out: where the result goes; else it has a memory of its own.
    """
    into = {} if out is None else {"grad_input": out}
    return torch._softmax_backward_data(grad, weights, -1, weights.dtype, **into)


def safe_softmax(scores: torch.Tensor) -> torch.Tensor:
    """The softmax over the last dimension; 0 in rows of minus infinity, and not NaN."""
    return torch._safe_softmax(scores, -1)


_CUDNN: Any = torch.backends.cudnn
_TF32_SWITCHES: dict[str, Any] = {
    "matmul": torch.backends.cuda.matmul,
    "conv": _CUDNN.conv,
    "rnn": _CUDNN.rnn,
}
"""The kinds of products for which torch has a switch each."""


def tf32_kinds() -> frozenset[str]:
    """The kinds of products that CUDA kernels may compute in TF32, as torch is set now.

    The switches are read and never set; they can be read where there is no GPU.  Torch
    leaves TF32 on for convolutions and recurrent layers, and off for matrix products
    (https://docs.pytorch.org/docs/stable/notes/cuda.html, "TensorFloat-32").
    """
    on = (k for k, s in _TF32_SWITCHES.items() if s.fp32_precision == "tf32")
    return frozenset(on)
