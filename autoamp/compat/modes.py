"""The modes of a process, which torch reads in every call, and random generators.

Dynamo sets modes for real while it traces, and so does code of the model's that is run
while a graph is captured.  An error in the middle can leave a mode as it was set there:
gradients switched off for the rest of the process, for instance.
"""

from __future__ import annotations

import contextlib
import random
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch._dynamo

AUTOCAST_DEVICES = ("cpu", "cuda")


any_autocast = torch._C._is_any_autocast_enabled
"""Whether the caller is inside a `torch.autocast` region."""


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
    """The state that a region of `torch.autocast` sets on this machine."""

    device: str
    dtype: torch.dtype
    enabled: bool


def autocast_state(
    device: str, dtype: torch.dtype | None = None, enabled: bool = True
) -> AutocastState:
    """The state that `torch.autocast(device, dtype, enabled)` sets on this machine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the capture has shown the warnings already
        region = torch.autocast(device, dtype, enabled)
    known = region.fast_dtype or torch.get_autocast_dtype(device)
    return AutocastState(device, known, region._enabled)


@contextlib.contextmanager
def in_autocast(state: AutocastState) -> Iterator[None]:
    """A region of autocast that no trace records."""
    before, cached = _region(state.device), torch.is_autocast_cache_enabled()
    # A cached cast would outlive the fake tensor that it was made of.
    torch.set_autocast_cache_enabled(False)
    _set_region(state.device, state.enabled, state.dtype)
    try:
        yield
    finally:
        _set_region(state.device, *before)
        torch.set_autocast_cache_enabled(cached)


def _region(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _set_region(device: str, enabled: bool, dtype: torch.dtype) -> None:
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, dtype)


_FRAMES: Any = torch._C._dynamo.eval_frame
frame_callback = _FRAMES.get_eval_frame_callback


class Modes:
    """The modes that were on when this object was made.

    Every call of a converted model makes one, so that only modes are read here.
    """

    __slots__ = ("_autocast", "_callback", "_dtype", "_exact", "_grad", "_inference")

    def __init__(self) -> None:
        self._callback = frame_callback()
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._dtype = torch.get_default_dtype()
        self._exact = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        self._autocast = _autocast()

    def restore(self) -> None:
        """Sets the modes that are different now as they were."""
        if frame_callback() is not self._callback:
            # Dynamo would capture all that follows.
            _FRAMES.set_eval_frame(self._callback)
        if torch.is_inference_mode_enabled() != self._inference:
            region = torch.inference_mode(self._inference)
            region.__enter__()
            _ENTERED.append(region)
        if torch.is_grad_enabled() != self._grad:  # inference mode may have moved it
            torch.set_grad_enabled(self._grad)
        now = Modes()
        if now._dtype != self._dtype:
            torch.set_default_dtype(self._dtype)
        if now._exact != self._exact:
            torch.use_deterministic_algorithms(self._exact[0], warn_only=self._exact[1])
        if now._autocast != self._autocast:
            _set_autocast(self._autocast)


_ENTERED: list[Any] = []
"""Regions that put inference mode back: a region ends when its object is freed."""


def _autocast() -> tuple[Any, ...]:
    regions = map(_region, AUTOCAST_DEVICES)
    return torch.is_autocast_cache_enabled(), autocast_nesting(), *regions


def _set_autocast(state: tuple[Any, ...]) -> None:
    cached, nesting, *regions = state
    torch.set_autocast_cache_enabled(cached)
    for device, region in zip(AUTOCAST_DEVICES, regions, strict=True):
        _set_region(device, *region)
    for _ in range(autocast_nesting() - nesting):
        torch.autocast_decrement_nesting()
    for _ in range(nesting - autocast_nesting()):
        torch.autocast_increment_nesting()
    if not nesting:  # as torch does when the outermost region ends
        torch.clear_autocast_cache()


class Generators:
    """The states of all random generators when this object was made.

    Torch's on CPUs and on each GPU in use, Python's, and NumPy's if it is imported.
    """

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        used = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._cuda = torch.cuda.get_rng_state_all() if used else []
        self._python = random.getstate()
        numpy: Any = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()

    def restore(self) -> None:
        """Has the generators draw the same numbers again."""
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
