"""The devices: what the package asks of a type, and the roofline of each product.

A new type of device is a row of `KINDS` and a table of its products in `devices.toml`,
where the figures stand, each with its source.
"""

from __future__ import annotations

import bisect
import difflib
import functools
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE, NARROWEST, short_name
from autoamp.errors import OptionError


@dataclass(frozen=True)
class Kind:
    """What the package asks of a type of device; torch's type is the row's name.

    Attributes:
        usual_dtype: the low dtype that `precision="auto"` chooses.
        is_asynchronous: whether a call starts a kernel and returns before its end, so
            that one op on many tensors is faster than many ops, and a clock must wait.
        has_tf32: whether torch may multiply fp32 numbers in TF32.
        without_units: the peak in a dtype that the device has no units for, as a share
            of its peak in fp32.
        model_here: gives the name in `devices.toml` of a device of this machine, or ""
            where the device is older than those; None for types without figures.
    """

    usual_dtype: torch.dtype = torch.bfloat16
    is_asynchronous: bool = False
    has_tf32: bool = False
    without_units: float = 1.0
    model_here: Callable[[torch.device, torch.dtype], str] | None = None


def _cuda_here(device: torch.device, _: torch.dtype) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    capabilities = {
        int(name.removeprefix("sm_")): name
        for name in figures()
        if name.startswith("sm_")
    }
    # A GPU that the table lacks has the figures of the next older one.
    known = [c for c in capabilities if c <= 10 * major + minor]
    return capabilities[max(known)] if known else ""


def _cpu_here(_: torch.device, low: torch.dtype) -> str:
    unit = compat.cpu_low_precision_units().get(low, "plain")
    return "amx" if unit == "amx_bf16" else unit


KINDS = {
    "cpu": Kind(without_units=0.25, model_here=_cpu_here),
    "cuda": Kind(
        # As under autocast: GPUs before Ampere multiply in fp16 and have no units for
        # bf16.
        usual_dtype=torch.float16,
        is_asynchronous=True,
        has_tf32=True,
        model_here=_cuda_here,
    ),
    "xpu": Kind(is_asynchronous=True),
}
"""The types of devices that the package knows, by torch's names."""

_OTHER = Kind()


def kind_of(device: torch.device | str) -> Kind:
    """The row of a device, or of a name such as "cuda:sm_90"."""
    return KINDS.get(str(device).partition(":")[0], _OTHER)


def is_here(type_: str) -> bool:
    """Whether this machine has a device of a type with figures."""
    return kind_of(type_).model_here is not None and (
        torch.get_device_module(type_).is_available()
    )


Curve = tuple[tuple[float, float], ...]
"""Points (size, rate) with growing sizes; empty where no rate is known."""


def rate_at(curve: Curve, size: float) -> float:
    """The rate at a size: between two points the power law that goes through both.

    Beyond the ends the rate is that of the last point.

    Args:
        curve: at least one point.
    """
    after = bisect.bisect_left(curve, (size,))
    if after == 0 or after == len(curve):
        return curve[min(after, len(curve) - 1)][1]
    (x, low), (y, high) = curve[after - 1 : after + 1]
    way = math.log(size / x) / math.log(y / x)
    return low * math.exp(way * math.log(high / low))


@dataclass(frozen=True)
class Rates:
    """How fast one precision is, where a peak and a bandwidth alone would mislead.

    An empty curve, and a rate of 0, leave a figure to the roofline of the device.

    Attributes:
        products: number of rows of a matrix product to GFLOP/s.
        convolution: GFLOP/s of a convolution.
        channelwise: GFLOP/s of a convolution of each channel by itself.
        batched: GFLOP/s of a batched product of matrices as attention has them.
        light: bytes that an op reads and writes to GB/s, for an op that does little
            more than that, such as an addition.
        heavy: the same for an op with a function such as `exp` of each number.
        start_ns: the fixed cost of a product beyond that of any op.
    """

    products: Curve = ()
    convolution: float = 0.0
    channelwise: float = 0.0
    batched: float = 0.0
    light: Curve = ()
    heavy: Curve = ()
    start_ns: float = 0.0


BY_ROOFLINE = Rates()
"""Rates that leave every figure to the roofline."""


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
        return kind_of(self.type).is_asynchronous

    @property
    def keeps_sums(self) -> bool:
        """Whether a product of low matrices can give its fp32 sums without rounding.

        Every kernel that multiplies 16-bit numbers sums in fp32; those for CUDA can
        write the sums out as well: in fp16 from compute capability 7.0 on, in bf16 from
        8.0 on (aten/src/ATen/cuda/CUDABlas.cpp), which are the devices with units.
        """
        return self.type == "cuda" and self.pays and compat.products_give_fp32()

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
            # Batched products are timed at one size; with fewer rows they are taken to
            # slow down as a single product does.
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


NEUTRAL = Device(
    "bytes only, as if low precision paid", 15.0, 2000.0, 100.0, 200.0, True
)
# Tensor cores came with compute capability 7.0.
_CUDA_OLD = Device(
    *("GPU below compute capability 7.0", 500.0, 4000.0, 10_000.0, 10_000.0, False),
    type="cuda",
)


@functools.cache
def figures() -> dict[str, dict[str, Any]]:
    """The table of `devices.toml`: name of a device ("sm_90", "amx") to its figures."""
    text = Path(__file__).with_name("devices.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def roofline(model: str, low: torch.dtype) -> Device:
    """The roofline of device `model` of the table, computing in `low`."""
    row = figures()[model]
    name, peak = row["name"], row.get(short_name(low))
    if peak is None:
        name += f" without {short_name(low)} units"
    return Device(
        name=name,
        bytes_per_ns=float(row["bytes_per_ns"]),
        launch_ns=float(row["launch_ns"]),
        high_flops_per_ns=float(row["fp32"]),
        low_flops_per_ns=float(
            kind_of(row["type"]).without_units * row["fp32"] if peak is None else peak
        ),
        pays=peak is not None,
        type=row["type"],
        channels_last=peak is not None and row.get("channels_last", False),
        tf32_flops_per_ns=float(row.get("tf32", 0.0)),
        tf32_kinds=compat.tf32_kinds() if "tf32" in row else frozenset(),
        low_itemsize=low.itemsize,
        high=Rates(_by_rows(row, HIGH_DTYPE)),
        low=Rates(_by_rows(row, low)),
    )


def _by_rows(row: Mapping[str, Any], dtype: torch.dtype) -> Curve:
    points = row.get(f"{short_name(dtype)}_by_rows", {})
    return tuple(sorted((float(size), float(rate)) for size, rate in points.items()))


def known_devices() -> list[str]:
    """The devices that `named_device` knows: "cuda:sm_90", "cpu:amx", ..."""
    return [f"{row['type']}:{name}" for name, row in figures().items()]


def full_name(name: str) -> str:
    """The name of a device by which its figures are found: "cuda:sm_90" for "H100".

    Case, spaces, hyphens and underscores do not count, and the type may be left out.

    Args:
        name: a name that people use: of a product ("h100", "RTX 4090"), of a compute
            capability ("sm_120", "cuda:sm90"), of the units of a CPU ("cpu:amx"), or
            "cpu", "cuda" and "cuda:1" for a device of this machine.

    Raises:
        OptionError: no figures are known for the device; the nearest name is told.
    """
    text = re.sub(r"(sm\d+)[af]$", r"\1", _plain(name))  # sm_90a has the units of sm_90
    kind, _, index = text.partition(":")
    if kind in KINDS and (not index or (kind != "cpu" and index.isdecimal())):
        return text if index else kind
    spelled = _spellings()
    if text in spelled:
        return spelled[text]
    number = re.fullmatch(r"(?:cuda:)?sm(\d+)", text)
    if number:
        keys = {int(key[3:]): key for key in figures() if key.startswith("sm_")}
        nearest = keys[min(keys, key=lambda n: abs(n - int(number[1])))]
    elif text.startswith("gpu"):
        nearest = re.sub("^gpus?", "cuda", text)
    else:
        kinds = [kind for kind, row in KINDS.items() if row.model_here is not None]
        # A cut-off of 0: one name is always the closest.
        (nearest,) = difflib.get_close_matches(text, [*kinds, *spelled], 1, 0.0)
    products = [_also(row)[0] for key, row in figures().items() if key[:3] == "sm_"]
    raise OptionError(
        f"device={name!r} is unknown; the nearest name is {nearest!r}; figures "
        f"are known for {', '.join([*products, *known_devices()])}"
    )


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]|nvidia|geforce|tesla", "", str(name).lower())


@functools.cache
def _spellings() -> dict[str, str]:
    """Each name of a device of the table, without marks, to its full name."""
    found: dict[str, str] = {}
    for key, row in figures().items():
        for each in (key, *_also(row)):
            full = f"{row['type']}:{key}"
            found |= {_plain(each): full, _plain(f"{row['type']}:{each}"): full}
    return found


def _also(row: Mapping[str, Any]) -> list[str]:
    """The names by which people call the product of a row."""
    return [*row.get("also", ())]


def named_device(name: str, low: torch.dtype) -> Device:
    """The roofline of a device that this machine may lack.

    "cpu" is this machine's CPU, and "cuda" its first GPU.

    Args:
        name: as for `full_name`.

    Raises:
        OptionError: no figures are known for the device, or `name` is "cuda" and this
            machine has no GPU.
    """
    full = full_name(name)
    kind, _, model = full.partition(":")
    if model in figures():
        return roofline(model, low)
    if is_here(kind):
        here = torch.device(full)
        if (here.index or 0) < torch.get_device_module(kind).device_count():
            return device_of(here, low)
    absent = "this machine has no such device"
    if kind == "cuda" and not is_here(kind):
        absent = "this machine has no GPU"
    raise OptionError(
        f"device={name!r}: {absent}; figures are known for {', '.join(known_devices())}"
    )


def available(device: torch.device) -> int | None:
    """Bytes that can still be allocated; None where this is unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        return free + reserved - torch.cuda.memory_allocated(device)
    table = Path("/proc/meminfo")
    if device.type != "cpu" or not table.exists():
        return None
    lines = table.read_text(encoding="utf-8").splitlines()
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable")]
    return int(found[0]) * 1024 if found else None


def device_of(device: torch.device, low: torch.dtype) -> Device:
    """The roofline for `device`, of this machine, computing in `low`."""
    model_here = kind_of(device).model_here
    if model_here is None or not is_here(device.type):
        return NEUTRAL
    model = model_here(device, low)
    return roofline(model, low) if model else _CUDA_OLD


def main_device(gm: fx.GraphModule) -> torch.device:
    """The device that holds most tensors of the graph."""
    seen: dict[torch.device, int] = {}
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            seen[value.device] = seen.get(value.device, 0) + 1
    return max(seen, key=lambda d: seen[d]) if seen else torch.device("cpu")


# -- a device's figures as JSON: a report carries the prices that it was made by -------


def figures_of(device: Device) -> dict[str, Any]:
    """Every figure of a device, as values that JSON has."""
    return asdict(device) | {"tf32_kinds": sorted(device.tf32_kinds)}
