"""The roofline of each device: its bandwidth, its peaks, whether low precision pays.

The figures, each with its source, stand in `devices.toml`.
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.dtypes import LOW_DTYPES, NARROWEST, short_name
from autoamp.errors import OptionError
from autoamp.place.rates import BY_ROOFLINE, Curve, Rates, rate_at


@dataclass(frozen=True)
class Device:
    """A roofline.

    Attributes:
        name: the hardware that the figures describe, for the report.
        bytes_per_ns: memory bandwidth, GB/s.
        launch_ns: fixed cost of one op.
        high_flops_per_ns, low_flops_per_ns: matrix-product peaks, GFLOP/s.
        tf32_flops_per_ns: the peak of fp32 products computed in TF32; 0 without TF32.
        tf32_kinds: the kinds of products ("matmul", "conv", "rnn") that torch is set to
            compute in TF32.
        low_itemsize: bytes of one number of the low dtype.
        pays: whether low precision can be faster than fp32 on the device.
        type: the type of the device in torch.
        channels_last: whether low convolutions are faster with the channels last.
        high, low: rates that depend on the size of the work, in fp32 and in the low
            dtype.
        casts: bytes that a cast reads and writes to GB/s; empty for `bytes_per_ns`.
    """

    name: str
    bytes_per_ns: float
    launch_ns: float
    high_flops_per_ns: float
    low_flops_per_ns: float
    pays: bool
    type: str = "cpu"
    channels_last: bool = False
    tf32_flops_per_ns: float = 0.0
    tf32_kinds: frozenset[str] = frozenset()
    low_itemsize: int = NARROWEST.itemsize
    high: Rates = BY_ROOFLINE
    low: Rates = BY_ROOFLINE
    casts: Curve = ()

    @property
    def starts_kernels(self) -> bool:
        """Whether one op on many tensors is faster than many ops: each is a kernel."""
        return self.type == "cuda"

    def flops_per_ns(self, kind: str, rows: float, *, low: bool) -> float:
        """The rate of products, in GFLOP/s.

        Args:
            kind: "matmul", "batched", "conv", "channelwise" or "rnn".
            rows: the rows of a matrix product; infinite for other products.
        """
        rates = self.low if low else self.high
        measured = {
            "batched": rates.batched,
            "conv": rates.convolution,
            "channelwise": rates.channelwise,
        }
        rate = measured.get(kind)
        if kind in ("matmul", "batched") and rates.products:
            by_rows = rate_at(rates.products, rows)
            return rate * by_rows / rates.products[-1][1] if rate else by_rows
        return rate or (self.low_flops_per_ns if low else self.fp32_peak(kind))

    def bandwidth(self, moved: float, *, low: bool, heavy: bool) -> float:
        """The bytes per nanosecond of an op without products.

        Args:
            moved: bytes that the op reads and writes.
            heavy: whether the op computes a function such as `exp` of each number.
        """
        rates = self.low if low else self.high
        curve = rates.heavy if heavy else rates.light
        return rate_at(curve, moved) if curve else self.bytes_per_ns

    def cast_bandwidth(self, moved: float) -> float:
        """The bytes per nanosecond of a cast that reads and writes `moved` bytes."""
        return rate_at(self.casts, moved) if self.casts else self.bytes_per_ns

    def fp32_peak(self, kind: str) -> float:
        """The peak of fp32 products of a kind, in GFLOP/s.

        Args:
            kind: as for `flops_per_ns`.
        """
        has_tf32 = self.allows_tf32(kind) and self.tf32_flops_per_ns
        return self.tf32_flops_per_ns if has_tf32 else self.high_flops_per_ns

    def allows_tf32(self, kind: str) -> bool:
        """Whether torch is set to compute products of a kind in TF32 on the device."""
        switch = {"batched": "matmul", "channelwise": "conv"}.get(kind, kind)
        return switch in self.tf32_kinds

    @property
    def attends_by_products(self) -> bool:
        """Whether attention written out as products is faster than torch's kernel.

        CPUs with units for a dtype are fast at products of whole matrices.  On a CPU
        with avx512_bf16, GPT-2 and BERT with written-out attention trained in 0.92 and
        1.00 of autocast's time, and with the kernel in 1.18 and 1.56 of that time.  One
        arena of malloc for all threads made the kernel's backward slow in that
        comparison, which has to be repeated without (docs/performance.md).
        """
        return self.type == "cpu" and self.low_flops_per_ns > self.high_flops_per_ns


EMULATED = 0.25
"""The low peak of a CPU without units for the dtype, as a share of the fp32 peak."""

NEUTRAL = Device(
    "bytes only, as if low precision paid", 15.0, 2000.0, 100.0, 200.0, True
)
_CUDA_OLD = Device(
    "CUDA below 7.0", 500.0, 4000.0, 10_000.0, 10_000.0, False, type="cuda"
)


@functools.cache
def figures() -> dict[str, dict[str, Any]]:
    """The table of `devices.toml`: name of a device ("sm_90", "amx") to its figures."""
    text = Path(__file__).with_name("devices.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def roofline(model: str, low: torch.dtype) -> Device:
    """The roofline of device `model` of the table, computing in `low`."""
    row = figures()[model]
    peak = row.get(short_name(low))
    if peak is None and row["type"] == "cuda":
        name = f"{row['name']} without {short_name(low)} units"
        low_peak = float(row["fp32"])  # computed as fp32
        known = roofline(model, next(d for n, d in LOW_DTYPES.items() if n in row))
        return replace(
            known,
            name=name,
            low_flops_per_ns=low_peak,
            pays=False,
            channels_last=False,
            low_itemsize=low.itemsize,
        )
    return Device(
        row["name"],
        float(row["bytes_per_ns"]),
        float(row["launch_ns"]),
        float(row["fp32"]),
        float(EMULATED * row["fp32"] if peak is None else peak),
        peak is not None,
        row["type"],
        peak is not None and row.get("channels_last", False),
        float(row.get("tf32", 0.0)),
        compat.tf32_kinds() if "tf32" in row else frozenset(),
        low.itemsize,
        high=Rates(_curve(row.get("fp32_by_rows", {}))),
        low=Rates(_curve(row.get(f"{short_name(low)}_by_rows", {}))),
    )


def _curve(points: dict[str, float]) -> Curve:
    return tuple(sorted((float(size), float(rate)) for size, rate in points.items()))


def known_devices() -> list[str]:
    """The devices that `named_device` knows: "cuda:sm_90", "cpu:amx", ..."""
    return [f"{row['type']}:{name}" for name, row in figures().items()]


def named_device(name: str, low: torch.dtype) -> Device:
    """The roofline of a device that this machine may lack, such as "cuda:sm_90".

    "cpu" is this machine's CPU, and "cuda" its first GPU.

    Raises:
        OptionError: no figures are known for the device, or `name` is "cuda" and this
            machine has no GPU.
    """
    kind, _, model = name.partition(":")
    if model in figures() and figures()[model]["type"] == kind:
        return roofline(model, low)
    if name == "cpu" or (name == "cuda" and torch.cuda.is_available()):
        return device_of(torch.device(name), low)
    absent = "this machine has no GPU; " if name == "cuda" else ""
    raise OptionError(
        f"device={name!r}: {absent}figures are known for {', '.join(known_devices())}"
    )


def product_of(name: str) -> str:
    """The product whose figures stand for a name such as "cuda:sm_90", or ""."""
    return str(figures().get(name.partition(":")[2], {}).get("model", ""))


def memory_of(name: str) -> int | None:
    """Bytes of memory of the product that `product_of` names; None if unknown.

    "cuda" is the first GPU of this machine.
    """
    if name == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[1])
    size = figures().get(name.partition(":")[2], {}).get("memory_gb")
    return None if size is None else int(size * 10**9)


def device_of(device: torch.device, low: torch.dtype) -> Device:
    """The roofline for `device`, of this machine, computing in `low`."""
    if device.type == "cuda" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(device)
        capabilities = {
            int(name.removeprefix("sm_")): name
            for name, row in figures().items()
            if row["type"] == "cuda"
        }
        known = [c for c in capabilities if c <= 10 * major + minor]
        return roofline(capabilities[max(known)], low) if known else _CUDA_OLD
    if device.type == "cpu":
        unit = compat.cpu_low_precision_units().get(low, "plain")
        return roofline("amx" if unit == "amx_bf16" else unit, low)
    return NEUTRAL


def main_device(gm: fx.GraphModule) -> torch.device:
    """The device that holds most tensors of the graph."""
    seen: dict[torch.device, int] = {}
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            seen[value.device] = seen.get(value.device, 0) + 1
    return max(seen, key=lambda d: seen[d]) if seen else torch.device("cpu")
