"""The calls that are timed to learn how fast a device is.

The numbers in their tensors are constants: no random generator moves.  Weights take
turns, so that a processor's caches hold none of them, as in a model of ordinary size.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from autoamp import compat
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

_LAYOUTS = {"": torch.contiguous_format, ", channels last": torch.channels_last}


@dataclass(frozen=True)
class Shapes:
    """The sizes of products on one type of device.

    Attributes:
        weight: the shape of the weight of a matrix product: results, operands.
        weights: how many weights take turns.
        image, kernel: the shapes of a convolution's operands; its output is as large.
        filters: the kernel of a convolution of each channel by itself.
        heads: the shape of the operands of a batched product, as attention has it.
    """

    weight: tuple[int, int]
    weights: int
    image: tuple[int, ...]
    kernel: tuple[int, ...]
    filters: tuple[int, ...]
    heads: tuple[int, int, int]


_ON_CPU = Shapes(
    weight=(2048, 1024),
    weights=8,
    image=(2, 64, 56, 56),
    kernel=(64, 64, 3, 3),
    filters=(64, 1, 7, 7),
    heads=(24, 256, 64),
)
_ELSEWHERE = Shapes(  # a GPU needs larger products to be busy
    weight=(4096, 4096),
    weights=4,
    image=(32, 128, 56, 56),
    kernel=(128, 128, 3, 3),
    filters=(128, 1, 7, 7),
    heads=(192, 1024, 64),
)


@dataclass(frozen=True)
class Probe:
    """A call that is timed.

    Attributes:
        name: the name of its time, such as "bf16 product of 4 rows".
        call: makes the call once.
        work: what the call does: floating-point operations of a product, bytes that
            another op reads and writes.
        times: how many calls one reading makes, so that the shortest are many times the
            clock's tick.
    """

    name: str
    call: Callable[[], object]
    work: int = 0
    times: int = 1


def probes(
    device: torch.device, low: torch.dtype, type_: str | None = None
) -> list[Probe]:
    """The calls for a device and a low dtype, made ready.

    Ops of all sizes share their operands: on a CPU all tensors together take 230 MB.
    They write to memory that is there already, since how long new memory takes depends
    on what the process has freed before.

    Args:
        type_: the type of device whose shapes are used; by default that of `device`.
    """
    shapes = _ON_CPU if (type_ or device.type) == "cpu" else _ELSEWHERE
    one = _filled(1, device=device, dtype=HIGH_DTYPE)
    x, y, out = (_filled(STREAM, device=device, dtype=HIGH_DTYPE) for _ in range(3))
    shorter = [_filled(SIZES[-1], device=device, dtype=low) for _ in range(3)]
    return [
        Probe("start of an op", lambda: torch.neg(one), times=50),
        Probe("stream", lambda: torch.add(x, y, out=out), 3 * x.nbytes),
        *_products(device, HIGH_DTYPE, shapes),
        *_products(device, low, shapes),
        *_ops(x, y, out),
        *_ops(*shorter),
        *_casts(x, shorter[0]),
    ]


@functools.cache
def work_of(low: torch.dtype, type_: str) -> dict[str, int]:
    """The name of each probe, and its work."""
    with compat.on_real_numbers():
        every = probes(torch.device("meta"), low, type_)
    return {probe.name: probe.work for probe in every}


def _filled(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, 0.5, dtype=dtype, device=device)


def _products(
    device: torch.device, dtype: torch.dtype, shapes: Shapes
) -> Iterator[Probe]:
    filled: Any = partial(_filled, device=device, dtype=dtype)
    name, small = short_name(dtype), filled(_SMALL, _SMALL)
    start = f"{name} start of a product"
    yield Probe(start, lambda: functional.linear(small, small), times=20)
    # Of one weight the cache would hold every byte, and the product would seem faster
    # than it is in a model.
    held = [filled(*shapes.weight) for _ in range(shapes.weights)]
    for rows in ROWS:
        x, turns = filled(rows, shapes.weight[1]), itertools.cycle(held)

        # Defaults, since the loop goes on before the probe is called.
        def product(x: torch.Tensor = x, turns: Any = turns) -> torch.Tensor:
            return functional.linear(x, next(turns))

        flops = 2 * rows * math.prod(shapes.weight)
        # A call that is about as short as a tick of the clock is read several times
        # over.
        times = 4 if rows <= ROWS[1] else 1
        yield Probe(f"{name} product of {rows} rows", product, flops, times)
    positions = 2 * shapes.image[0] * math.prod(shapes.image[2:])
    for said, layout in _LAYOUTS.items():
        image, kernel = (
            filled(*shape).contiguous(memory_format=layout)
            for shape in (shapes.image, shapes.kernel)
        )
        convolution = partial(functional.conv2d, image, kernel, padding=1)
        flops = positions * math.prod(shapes.kernel)
        yield Probe(f"{name} convolution{said}", convolution, flops)
    image, filters = filled(*shapes.image), filled(*shapes.filters)
    each = partial(
        functional.conv2d, image, filters, padding=3, groups=shapes.filters[0]
    )
    flops = positions * math.prod(shapes.filters)
    yield Probe(f"{name} convolution of each channel", each, flops)
    batch, length, width = shapes.heads
    heads, flops = filled(*shapes.heads), 2 * batch * length * length * width
    yield Probe(f"{name} batched product", partial(torch.bmm, heads, heads.mT), flops)


def _ops(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> Iterator[Probe]:
    name = short_name(x.dtype)
    for size in SIZES:
        one, other, result = x[:size], y[:size], out[:size]
        light = partial(torch.add, one, other, out=result)
        heavy = partial(torch.erf, one, out=result)
        for kind, call, tensors in (("light", light, 3), ("heavy", heavy, 2)):
            said = f"{name} {kind} op of {size} numbers"
            yield Probe(said, call, tensors * one.nbytes, _calls(size))


def _casts(x: torch.Tensor, low: torch.Tensor) -> Iterator[Probe]:
    for size in SIZES:
        cast = partial(low[:size].copy_, x[:size])
        moved = x[:size].nbytes + low[:size].nbytes
        yield Probe(f"cast of {size} numbers", cast, moved, _calls(size))


def _calls(size: int) -> int:
    return 8 if size == SIZES[0] else 1
