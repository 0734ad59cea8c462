"""The figures of a device as JSON: a report carries the prices that it was made by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import torch

from autoamp.compat.fp32_precision import KINDS
from autoamp.place.devices import Device
from autoamp.place.rates import Curve, Rates
from autoamp.printable import printable_line

_BY_LOCK = ", by the lock"


def figures_of(device: Device) -> dict[str, Any]:
    """Every figure of a device, as values that JSON has."""
    return asdict(device) | {"tf32_kinds": sorted(device.tf32_kinds)}


def device_with(
    devices: Sequence[Mapping[str, Any]], type_: str, low: torch.dtype
) -> Device | None:
    """The device of a saved report that is of a type and has a dtype as wide as `low`.

    Args:
        devices: the figures of each device of the report.

    Returns:
        None where the report has no such device, or where its figures cannot be used.
    """
    for figures in devices:
        wanted = (type_, low.itemsize)
        if (figures.get("type"), figures.get("low_itemsize")) == wanted:
            return _device(figures)
    return None


def _device(figures: Mapping[str, Any]) -> Device | None:
    try:
        given = {each.name: _read(each.name, figures[each.name]) for each in _FIELDS}
    except (KeyError, TypeError, ValueError):
        return None  # another version of autoamp wrote the report
    return Device(**given)


_FIELDS = fields(Device)


def _read(key: str, value: Any) -> Any:
    """A figure as `Device` takes it.

    Raises:
        KeyError, TypeError, ValueError: it is no such figure.
    """
    if key in ("high", "low"):
        return Rates(
            products=_curve(value["products"]),
            convolution=_number(value["convolution"]),
            channelwise=_number(value["channelwise"]),
            batched=_number(value["batched"]),
            light=_curve(value["light"]),
            heavy=_curve(value["heavy"]),
            start_ns=_number(value["start_ns"]),
        )
    if key == "casts":
        return _curve(value)
    if key == "tf32_kinds":
        return frozenset(value) & frozenset(KINDS)
    if key in ("pays", "channels_last"):
        return bool(value)
    if key == "type":
        return value
    if key == "name":
        return printable_line(str(value), 200).removesuffix(_BY_LOCK) + _BY_LOCK
    number = _number(value)
    if key in _DIVISORS and not number:
        raise ValueError(f"{key} is 0")
    return number


def _curve(points: Any) -> Curve:
    found = tuple((_number(size), _number(rate)) for size, rate in points)
    sizes = [size for size, _ in found]
    if sizes != sorted(set(sizes)) or not all(x > 0 for pair in found for x in pair):
        raise ValueError("sizes do not grow, or a rate is not positive")
    return found


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    if not 0 <= value <= _LARGEST:  # NaN neither
        raise ValueError("no device has such a figure")
    return value


_LARGEST = 1e18
"""Larger figures are damaged ones: the fastest device has less than 1e8 GFLOP/s."""

_DIVISORS = ("bytes_per_ns", "high_flops_per_ns", "low_flops_per_ns")
"""The figures by which prices are divided."""
