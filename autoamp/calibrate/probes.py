"""The calls that are timed to learn how fast a device is.

The numbers in their tensors are constants: no random generator moves.  Weights take
turns, so that a processor's caches hold none of them, as in a model of ordinary size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from autoamp.dtypes import HIGH_DTYPE, short_name

ROWS = (1, 4, 16, 64, 256)
"""The rows of the matrix products."""

SIZES = (2**16, 2**19, 2**22, 2**23)
"""Numbers in the tensors of ops without products: 256 KiB to 32 MiB of fp32.

The smallest tensors fit a core's cache.  The memory of the largest is new at every
call, because the C library gives blocks of 32 MiB back to the system (`mallopt(3)`,
M_MMAP_THRESHOLD), and the system fills new memory with zeros.
"""

_SMALL = 16
"""The width of products that take no longer than their start."""


@dataclass(frozen=True)
class Shapes:
    """The sizes of products on one type of device.

    Attributes:
        inside, out: the sizes of the weight of a matrix product.
        weights: how many weights take turns.
        image, kernel: the shapes of a convolution's operands.
    """

    inside: int
    out: int
    weights: int
    image: tuple[int, ...]
    kernel: tuple[int, ...]

    @property
    def flops_of_a_row(self) -> int:
        """Floating-point operations of a matrix product with one row."""
        return 2 * self.inside * self.out

    @property
    def flops_of_the_convolution(self) -> int:
        """Floating-point operations of the convolution, whose output is as large."""
        batch, _, height, width = self.image
        out, inside, *kernel = self.kernel
        return 2 * batch * height * width * out * inside * kernel[0] * kernel[1]


_ON_CPU = Shapes(1024, 2048, 8, (2, 64, 56, 56), (64, 64, 3, 3))
_ELSEWHERE = Shapes(4096, 4096, 4, (32, 128, 56, 56), (128, 128, 3, 3))


def shapes_for(device_type: str) -> Shapes:
    """The sizes of products: a GPU needs larger ones to be busy."""
    return _ON_CPU if device_type == "cpu" else _ELSEWHERE


@dataclass(frozen=True)
class Probe:
    """A call that is timed.

    Attributes:
        name: the name of its time, such as "bf16 product of 4 rows".
        call: makes the call once.
        times: how many calls one reading makes.
    """

    name: str
    call: Callable[[], object]
    times: int = 1


def probes(device: torch.device, low: torch.dtype) -> list[Probe]:
    """The calls for a device and a low dtype, made ready.

    Ops of all sizes share their operands: on a CPU all tensors together take 230 MB.
    """
    one = _filled(1, device=device, dtype=HIGH_DTYPE)
    found = [Probe("start of an op", lambda: torch.neg(one), 50)]
    for dtype in (HIGH_DTYPE, low):
        x, y = (_filled(SIZES[-1], device=device, dtype=dtype) for _ in range(2))
        found += [*_products(device, dtype), *_ops(x, y)]
        if dtype == HIGH_DTYPE:
            found += [_streaming(x, y), *_casts(x, low)]
    return found


def names(low: torch.dtype) -> frozenset[str]:
    """The names of all probes for a low dtype."""
    found = ["start of an op", "stream"]
    for dtype in map(short_name, (HIGH_DTYPE, low)):
        found.append(f"{dtype} start of a product")
        found += [f"{dtype} product of {rows} rows" for rows in ROWS]
        found += [f"{dtype} convolution", f"{dtype} convolution, channels last"]
        for kind in ("light", "heavy"):
            found += [f"{dtype} {kind} op of {size} numbers" for size in SIZES]
    return frozenset([*found, *(f"cast of {size} numbers" for size in SIZES)])


def _filled(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, 0.5, dtype=dtype, device=device)


def _streaming(x: torch.Tensor, y: torch.Tensor) -> Probe:
    """A sum of tensors larger than most caches, into memory that is there already."""
    result = torch.full_like(x, 0.5)
    return Probe("stream", lambda: torch.add(x, y, out=result))


def _products(device: torch.device, dtype: torch.dtype) -> Iterator[Probe]:
    on: Any = {"device": device, "dtype": dtype}
    name, shapes = short_name(dtype), shapes_for(device.type)
    small = _filled(_SMALL, _SMALL, **on)
    start = f"{name} start of a product"
    yield Probe(start, lambda: functional.linear(small, small), 20)
    held = [_filled(shapes.out, shapes.inside, **on) for _ in range(shapes.weights)]
    for rows in ROWS:
        x, turns = _filled(rows, shapes.inside, **on), itertools.cycle(held)
        times = 4 if rows <= ROWS[1] else 1

        def product(x: torch.Tensor = x, turns: Any = turns) -> torch.Tensor:
            return functional.linear(x, next(turns))

        yield Probe(f"{name} product of {rows} rows", product, times)
    for said, layout in _LAYOUTS.items():
        image = _filled(*shapes.image, **on).contiguous(memory_format=layout)
        kernel = _filled(*shapes.kernel, **on).contiguous(memory_format=layout)

        def convolution(
            image: torch.Tensor = image, kernel: torch.Tensor = kernel
        ) -> torch.Tensor:
            return functional.conv2d(image, kernel, padding=1)

        yield Probe(f"{name} convolution{said}", convolution)


_LAYOUTS = {"": torch.contiguous_format, ", channels last": torch.channels_last}


def _ops(x: torch.Tensor, y: torch.Tensor) -> Iterator[Probe]:
    name = short_name(x.dtype)
    for size in SIZES:

        def light(x: torch.Tensor = x[:size], y: torch.Tensor = y[:size]) -> object:
            return torch.add(x, y)

        def heavy(x: torch.Tensor = x[:size]) -> object:
            return functional.gelu(x)

        times = _calls(size)
        yield Probe(f"{name} light op of {size} numbers", light, times)
        yield Probe(f"{name} heavy op of {size} numbers", heavy, times)


def _casts(x: torch.Tensor, low: torch.dtype) -> Iterator[Probe]:
    for size in SIZES:

        def cast(x: torch.Tensor = x[:size]) -> object:
            return x.to(low)

        yield Probe(f"cast of {size} numbers", cast, _calls(size))


def _calls(size: int) -> int:
    """How many calls a reading makes: the shortest are many times the clock's tick."""
    return 8 if size == SIZES[0] else 1
