"""What each device can do: its bandwidth, its peaks, and whether low precision pays."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autoamp import compat


@dataclass(frozen=True)
class Device:
    """A roofline.

    Attributes:
        name: the hardware that the figures describe, for the report.
        bytes_per_ns: memory bandwidth, GB/s.
        launch_ns: fixed cost of one op.
        high_flops_per_ns, low_flops_per_ns: matrix-product peaks, GFLOP/s.
        pays: whether low precision can pay on the device at all.
        least_rows: rows below which a matrix product loses by low precision.
    """

    name: str
    bytes_per_ns: float
    launch_ns: float
    high_flops_per_ns: float
    low_flops_per_ns: float
    pays: bool
    least_rows: int = 1


# `linear` of 1 to 3 rows takes longer in bf16 than in fp32 on a CPU with AMX: 1.07 to
# 1.21 times as long for the products of a GPT-2 block's MLP, while 4 rows take 0.67
# times as long (benchmarks/results/rows-cpu.md).
_CPU_ROWS = 4
FEW_ROWS = 1.17

_CPU = Device("CPU without low-precision units", 15.0, 2000.0, 100.0, 25.0, False)
_CPU_AVX = Device("CPU with avx512_bf16", 15.0, 2000.0, 100.0, 180.0, True, _CPU_ROWS)
_CPU_AMX = Device("CPU with AMX", 15.0, 2000.0, 100.0, 800.0, True, _CPU_ROWS)
NEUTRAL = Device(
    "bytes only, as if low precision paid", 15.0, 2000.0, 100.0, 200.0, True
)

# NVIDIA data sheets: memory bandwidth, TF32-off fp32 and dense half-precision peaks of
# V100 (7.0), T4 (7.5), A100 (8.0), RTX 40 (8.9), H100/H200 (9.0) and B200 (10.0).
_CUDA = {
    70: Device("CUDA 7.0", 900.0, 4000.0, 15_700.0, 112_000.0, True),
    75: Device("CUDA 7.5", 320.0, 4000.0, 8_100.0, 65_000.0, True),
    80: Device("CUDA 8.0", 1_900.0, 4000.0, 19_500.0, 312_000.0, True),
    89: Device("CUDA 8.9", 1_000.0, 4000.0, 80_000.0, 165_000.0, True),
    90: Device("CUDA 9.0", 3_900.0, 4000.0, 60_000.0, 790_000.0, True),
    100: Device("CUDA 10.0", 7_700.0, 4000.0, 75_000.0, 2_200_000.0, True),
}
_CUDA_OLD = Device("CUDA below 7.0", 500.0, 4000.0, 10_000.0, 10_000.0, False)


def device_of(device: torch.device, low: torch.dtype) -> Device:
    """The roofline for `device` computing in `low`."""
    if device.type == "cuda" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(device)
        known = [c for c in _CUDA if c <= 10 * major + minor]
        if not known or (low is torch.bfloat16 and major < 8):
            return _CUDA_OLD
        return _CUDA[max(known)]
    if device.type == "cpu":
        unit = compat.cpu_low_precision_units().get(low, "")
        if unit.startswith("amx"):
            return _CPU_AMX
        return _CPU_AVX if unit else _CPU
    return NEUTRAL
