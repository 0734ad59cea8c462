"""Regions of autocast, and regions without any mode."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch

AUTOCAST_DEVICES = ("cpu", "cuda")


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
        for device in AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextlib.contextmanager
def on_real_numbers() -> Iterator[None]:
    """A region that computes with its own tensors: no gradients, modes or autocast.

    The modes are those of the caller: fake tensors, a trace, a count of flops.
    """
    modes_off = torch.utils._python_dispatch._disable_current_modes()
    with modes_off, torch._C.DisableTorchFunction(), torch.no_grad(), autocast_off():
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
