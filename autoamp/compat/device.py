"""The low dtypes and the attention kernels of this CPU, and regions of autocast."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


@functools.cache
def cpu_low_precision_units() -> dict[torch.dtype, str]:
    """Low dtypes this CPU multiplies in hardware, with the name of the unit."""
    units: dict[torch.dtype, str] = {}

    def has(name: str) -> bool:
        ask = getattr(torch.cpu, name, None)
        return bool(ask()) if ask is not None else False

    if has("_is_amx_tile_supported"):
        units[torch.bfloat16] = "amx_bf16"
    elif has("_is_avx512_bf16_supported"):
        units[torch.bfloat16] = "avx512_bf16"
    if has("_is_amx_fp16_supported"):
        units[torch.float16] = "amx_fp16"
    return units


_AUTOCAST_DEVICES = ("cpu", "cuda")


def any_autocast() -> bool:
    """Whether the caller is inside a `torch.autocast` region."""
    return torch._C._is_any_autocast_enabled()


def autocast_nesting() -> int:
    """How many `torch.autocast` regions the caller is in, disabled ones included."""
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return nesting - 1


@contextlib.contextmanager
def autocast_off() -> Iterator[None]:
    """A region in which no ambient `torch.autocast` is on."""
    if not any_autocast():
        yield
        return
    with contextlib.ExitStack() as stack:
        for device in _AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextlib.contextmanager
def on_real_numbers() -> Iterator[None]:
    """A region that computes with its own tensors: no gradients, modes or autocast.

    The modes are those of the caller: fake tensors, a trace, a count of flops.
    """
    found = getattr(torch.utils._python_dispatch, "_disable_current_modes", None)
    modes_off = contextlib.nullcontext if found is None else found
    with modes_off(), torch._C.DisableTorchFunction(), torch.no_grad(), autocast_off():
        yield


class AutocastState(NamedTuple):
    """What a region of `torch.autocast` comes to on this machine."""

    device: str
    dtype: torch.dtype
    enabled: bool


def autocast_state(
    device: str, dtype: torch.dtype | None = None, enabled: bool = True
) -> AutocastState:
    """What `torch.autocast(device, dtype, enabled)` comes to: torch may disable it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the capture has shown the warnings already
        region = torch.autocast(device, dtype, enabled)
    known = region.fast_dtype or torch.get_autocast_dtype(device)
    return AutocastState(device, known, region._enabled)


def autocast_enabled(device: str, dtype: torch.dtype) -> AutocastState:
    """Autocast switched on, also for a device that this machine lacks."""
    return AutocastState(device, dtype, True)


@contextlib.contextmanager
def in_autocast(state: AutocastState) -> Iterator[None]:
    """A region of autocast that no trace records.

    The region caches no cast, because a cached cast would outlive the fake tensor it
    was made of.
    """
    device = state.device
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    torch.set_autocast_enabled(device, state.enabled)
    torch.set_autocast_dtype(device, state.dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
        torch.set_autocast_cache_enabled(cached)


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
    """The gradient of what a softmax over the last dimension was made of.

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
