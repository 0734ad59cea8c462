"""The calls that are timed to learn how fast a device is.

The numbers in their tensors are constants: no random generator moves.  Weights take
turns, so that a processor's caches hold none of them, as in a model of ordinary size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from autoamp.dtypes import HIGH_DTYPE, short_name

ROWS = (1, 4, 16, 64, 256)
"""The rows of the matrix products."""

SIZES = (2**16, 2**19, 2**22)
"""Numbers in the tensors of ops without products: 256 KiB, 2 and 16 MiB of fp32.

The smallest tensors fit a core's cache.
"""

STREAM = 2**23
"""Numbers in tensors that no usual cache holds: 32 MiB of fp32."""

_SMALL = 16
"""The width of products that take no longer than their start."""


@dataclass(frozen=True)
class Shapes:
    """The sizes of products on one type of device.

    Attributes:
        inside, out: the sizes of the weight of a matrix product.
        weights: how many weights take turns.
        image, kernel: the shapes of a convolution's operands.
        filters: the kernel of a convolution of each channel by itself.
        heads: the shape of the operands of a batched product, as attention has it.
    """

    inside: int
    out: int
    weights: int
    image: tuple[int, ...]
    kernel: tuple[int, ...]
    filters: tuple[int, ...]
    heads: tuple[int, ...]

    @property
    def flops_of_a_row(self) -> int:
        """Floating-point operations of a matrix product with one row."""
        return 2 * self.inside * self.out

    @property
    def flops_of_the_convolution(self) -> int:
        """Floating-point operations of the convolution, whose output is as large."""
        return 2 * math.prod(self.image[2:]) * self.image[0] * math.prod(self.kernel)

    @property
    def flops_of_the_filters(self) -> int:
        """The same for the convolution of each channel by itself."""
        return 2 * math.prod(self.image[2:]) * self.image[0] * math.prod(self.filters)

    @property
    def flops_of_the_heads(self) -> int:
        """Floating-point operations of the batched product of queries and keys."""
        batch, length, width = self.heads
        return 2 * batch * length * length * width


_ON_CPU = Shapes(
    inside=1024,
    out=2048,
    weights=8,
    image=(2, 64, 56, 56),
    kernel=(64, 64, 3, 3),
    filters=(64, 1, 7, 7),
    heads=(24, 256, 64),
)
_ELSEWHERE = Shapes(
    inside=4096,
    out=4096,
    weights=4,
    image=(32, 128, 56, 56),
    kernel=(128, 128, 3, 3),
    filters=(128, 1, 7, 7),
    heads=(192, 1024, 64),
)


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
    They write to memory that is there already, since how long new memory takes depends
    on what the process has freed before.
    """
    one = _filled(1, device=device, dtype=HIGH_DTYPE)
    found = [Probe("start of an op", lambda: torch.neg(one), 50)]
    x, y, out = (_filled(STREAM, device=device, dtype=HIGH_DTYPE) for _ in range(3))
    found.append(Probe("stream", lambda: torch.add(x, y, out=out)))
    shorter = [_filled(SIZES[-1], device=device, dtype=low) for _ in range(3)]
    return [
        *found,
        *_products(device, HIGH_DTYPE),
        *_products(device, low),
        *_ops(x, y, out),
        *_ops(*shorter),
        *_casts(x, shorter[0]),
    ]


def names(low: torch.dtype) -> frozenset[str]:
    """The names of all probes for a low dtype."""
    found = ["start of an op", "stream"]
    for dtype in map(short_name, (HIGH_DTYPE, low)):
        found.append(f"{dtype} start of a product")
        found += [f"{dtype} product of {rows} rows" for rows in ROWS]
        found += [f"{dtype} convolution", f"{dtype} convolution, channels last"]
        found += [f"{dtype} convolution of each channel", f"{dtype} batched product"]
        for kind in ("light", "heavy"):
            found += [f"{dtype} {kind} op of {size} numbers" for size in SIZES]
    return frozenset([*found, *(f"cast of {size} numbers" for size in SIZES)])


def _filled(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, 0.5, dtype=dtype, device=device)


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
        image, kernel = (
            _filled(*shape, **on).contiguous(memory_format=layout)
            for shape in (shapes.image, shapes.kernel)
        )
        convolution = partial(functional.conv2d, image, kernel, padding=1)
        yield Probe(f"{name} convolution{said}", convolution)
    image, filters = (_filled(*shape, **on) for shape in (shapes.image, shapes.filters))
    each = partial(
        functional.conv2d, image, filters, padding=3, groups=shapes.filters[0]
    )
    yield Probe(f"{name} convolution of each channel", each)
    heads = _filled(*shapes.heads, **on)
    yield Probe(f"{name} batched product", partial(torch.bmm, heads, heads.mT))


_LAYOUTS = {"": torch.contiguous_format, ", channels last": torch.channels_last}


def _ops(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> Iterator[Probe]:
    name = short_name(x.dtype)
    for size in SIZES:
        parts = x[:size], y[:size], out[:size]
        for kind, call in (("light", _light), ("heavy", _heavy)):
            said = f"{name} {kind} op of {size} numbers"
            yield Probe(said, partial(call, *parts), _calls(size))


def _light(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> object:
    return torch.add(x, y, out=out)


def _heavy(x: torch.Tensor, _: torch.Tensor, out: torch.Tensor) -> object:
    return torch.erf(x, out=out)


def _casts(x: torch.Tensor, low: torch.Tensor) -> Iterator[Probe]:
    for size in SIZES:
        cast = partial(low[:size].copy_, x[:size])
        yield Probe(f"cast of {size} numbers", cast, _calls(size))


def _calls(size: int) -> int:
    """How many calls a reading makes: the shortest are many times the clock's tick."""
    return 8 if size == SIZES[0] else 1
