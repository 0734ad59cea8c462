"""Rates of one precision on a device that depend on the size of the work."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

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
