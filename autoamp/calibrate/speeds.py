"""Makes a `Device` of measured times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from autoamp.calibrate.probes import ROWS, SIZES, STREAM, names, shapes_for
from autoamp.dtypes import HIGH_DTYPE, short_name
from autoamp.place.devices import Device
from autoamp.place.rates import Curve, Rates

Times = Mapping[str, float]
"""The name of a probe to the nanoseconds of one call."""

STEPS = 4
"""Steps of the grid of figures per doubling.

Figures are rounded to powers of 2 ** (1 / STEPS), a grid of 19 %, since another
measurement on the same machine gives figures that differ by several per cent
(benchmarks/results/calibration.md).
"""

_LAYOUT_GAIN = 0.95
"""The most time of a convolution with the channels last, over the usual layout's, for
which copies of weights in another layout pay."""

_LONGEST_NS = 1e9
"""No probe takes a second: a longer time is no measurement."""


def is_sane(times: object, low: torch.dtype) -> bool:
    """Whether `times`, read from a file, may be the times of all probes."""
    if not isinstance(times, dict) or times.keys() != names(low):
        return False
    return all(
        isinstance(ns, int | float)
        and not isinstance(ns, bool)
        and 1.0 <= ns <= _LONGEST_NS  # which no NaN is
        for ns in times.values()
    )


def device_from(times: Times, low: torch.dtype, table: Device, name: str) -> Device:
    """The device that `times` describe.

    Args:
        times: the times of all probes.
        table: the device by the table, which tells all that is no time.
        name: the name of the device in reports.
    """
    launch = _rounded(times["start of an op"])
    high_rates, low_rates = (
        _rates(times, dtype, table.type, launch) for dtype in (HIGH_DTYPE, low)
    )
    last, usual = (
        times[f"{short_name(low)} convolution{layout}"]
        for layout in (", channels last", "")
    )
    moved = 3 * HIGH_DTYPE.itemsize * STREAM
    return replace(
        table,
        name=name,
        bytes_per_ns=_rounded(moved / times["stream"]),
        launch_ns=launch,
        high_flops_per_ns=high_rates.products[-1][1],
        low_flops_per_ns=low_rates.products[-1][1],
        tf32_flops_per_ns=0.0,  # the fp32 products were timed as torch computes them
        channels_last=table.channels_last and last < _LAYOUT_GAIN * usual,
        high=high_rates,
        low=low_rates,
        casts=_by_size(times, "cast", HIGH_DTYPE.itemsize + low.itemsize, launch),
    )


def _rates(times: Times, dtype: torch.dtype, type_: str, launch: float) -> Rates:
    name, shapes = short_name(dtype), shapes_for(type_)
    start = _beyond(times[f"{name} start of a product"], launch)
    products = [
        (float(rows), _rounded(rows * shapes.flops_of_a_row / spent))
        for rows in ROWS
        for spent in [_beyond(times[f"{name} product of {rows} rows"], launch + start)]
    ]
    convolutions = [
        times[f"{name} convolution{layout}"] for layout in ("", ", channels last")
    ]
    return Rates(
        products=tuple(products),
        convolution=_rounded(shapes.flops_of_the_convolution / min(convolutions)),
        channelwise=_rounded(
            shapes.flops_of_the_filters / times[f"{name} convolution of each channel"]
        ),
        batched=_rounded(shapes.flops_of_the_heads / times[f"{name} batched product"]),
        light=_by_size(times, f"{name} light op", 3 * dtype.itemsize, launch),
        heavy=_by_size(times, f"{name} heavy op", 2 * dtype.itemsize, launch),
        start_ns=_rounded(start),
    )


def _by_size(times: Times, op: str, width: int, launch: float) -> Curve:
    """Bytes moved to GB/s.

    Args:
        width: bytes that the op reads and writes for each number.
    """
    return tuple(
        (float(width * size), _rounded(width * size / _beyond(spent, launch)))
        for size in SIZES
        for spent in [times[f"{op} of {size} numbers"]]
    )


def _beyond(spent: float, fixed: float) -> float:
    """`spent` without a fixed cost, of which it may hold less than the fixed cost."""
    return max(spent - fixed, 0.1 * spent)


def _rounded(figure: float) -> float:
    """The nearest power of 2 ** (1 / STEPS), to four digits."""
    nearest = 2.0 ** (round(math.log2(figure) * STEPS) / STEPS)
    return float(f"{nearest:.4g}")
