"""What a step comes to on a GPU: its memory, its kernels, and how long they run."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

SHOWN = 40
"""The kernels that are kept by name, those that take longest."""


def allocated(device: str) -> int:
    """Bytes of tensors on a GPU; 0 on a CPU, where nobody counts them."""
    if device == "cpu":
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


def peak_bytes(step: Callable[[], None], device: str) -> int:
    """Bytes that a step allocates at most at one time beside what was there."""
    before = allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def kernels(step: Callable[[], None], device: str) -> dict[str, Any]:
    """The kernels of a step: how many, the seconds they run, and the longest by name.

    Copies and fills of memory count as kernels.
    """
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as taken:
        step()
        torch.cuda.synchronize(device)
    calls, seconds = Counter[str](), Counter[str]()
    for event in taken.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            calls[event.name] += 1
            seconds[event.name] += event.self_device_time_total / 1e6
    longest = [
        {"name": name[:160], "calls": calls[name], "seconds": round(each, 7)}
        for name, each in seconds.most_common(SHOWN)
    ]
    return {
        "kernels": calls.total(),
        "busy": seconds.total(),
        "longest": longest,
    }


def counted(step: Callable[[], None], held: int, device: str) -> dict[str, Any]:
    """The memory and the kernels of a step, as the rows of the tables hold them.

    Args:
        step: the step.
        held: bytes that its way keeps between steps.
        device: the GPU.
    """
    found = {"held": held, "peak": peak_bytes(step, device)}
    try:
        return found | kernels(step, device)
    except RuntimeError:  # a machine may forbid its counters
        traceback.print_exc()
        return found
