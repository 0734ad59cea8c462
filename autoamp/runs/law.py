"""The law of rounding: how far two runs may be apart that differ by rounding alone.

Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis" (SIAM J.
Sci. Comput. 41, 2019, theorem 2.4): `n` roundings one after the other, of unit roundoff
`u` and independent with mean 0, make a relative error of at most `L * sqrt(n) * u`, to
first order in `u`, but for a probability of `2 * exp(-L**2 / 2)`.  Each letter is given
by something that is known, and none is fitted to examples:

* `u` is `sqrt(u_a**2 + u_b**2)`, as both runs round on their own; `u_a` and `u_b` are
  the unit roundoffs of their compute dtypes: 2^-8 bf16, 2^-11 fp16, 2^-24 fp32.
* `n` is the number of roundings in a row.  A number of the forward passes as many as
  the model has parameter tensors, since each is the operand of an op; a gradient passes
  twice as many.  Each step since the runs were last equal to the bit adds one: errors
  of steps are independent, so they add up as a random walk, by the root of the steps.
* `L` is `sqrt(2 * log(2 * N / CHANCE))` for `N` comparisons, so that one comparison of
  two runs in `1 / CHANCE` is wrong (the union bound).

The second yardstick is the noise of the two runs themselves.  It is the same law with
`u` measured: 1.4826 times the median of the differences at the steps before, each
divided by its own `sqrt(n)`.  That is the standard deviation of normal noise, and
stays so while fewer than half of the steps before are off.

A number parts when its difference is larger than both.
"""

from __future__ import annotations

import math
import statistics

from autoamp.dtypes import HIGH_DTYPE, parse_low_dtype, rounding

CHANCE = 0.01
"""How often two runs that differ by rounding alone may be said to part."""

_NORMAL = 1.4826
"""The standard deviation of normal numbers by the median of their magnitudes."""


class Law:
    """The law for one number of two runs, step by step.

    Args:
        unit: the unit roundoff of both runs together, `together`.
        depth: how many roundings the number passes in one step.
        comparisons: how many comparisons are made of the two runs.
        tolerance: allow this difference at each step, and no other.
    """

    def __init__(
        self, unit: float, depth: int, comparisons: int, tolerance: float | None = None
    ) -> None:
        self.unit, self.depth, self.tolerance = unit, max(depth, 1), tolerance
        self.multiple = multiple(comparisons)
        self._before: list[float] = []

    def allowed(self, steps: int) -> float:
        """The largest difference by rounding, `steps` after the runs were equal."""
        if self.tolerance is not None:
            return self.tolerance
        noise = _NORMAL * statistics.median(self._before) if self._before else 0.0
        return self.multiple * math.sqrt(self.depth + steps) * max(self.unit, noise)

    def seen(self, difference: float, steps: int) -> None:
        """Adds a difference to the noise of the steps before."""
        if math.isfinite(difference):
            self._before.append(difference / math.sqrt(self.depth + steps))


def multiple(comparisons: int) -> float:
    """How many standard errors are beyond rounding in so many comparisons."""
    return math.sqrt(2 * math.log(2 * max(comparisons, 1) / CHANCE))


def together(one: str, other: str) -> float:
    """The unit roundoff of a difference of two runs with these compute dtypes."""
    return math.hypot(unit_of(one), unit_of(other))


def unit_of(precision: str) -> float:
    """The unit roundoff of `bf16`, `fp16` or `fp32`."""
    return rounding(parse_low_dtype(precision) or HIGH_DTYPE)


def apart(one: float, other: float) -> float:
    """The relative difference; infinite where one number alone is not finite."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    # Each is divided first: a difference of two large numbers may overflow.
    most = max(abs(one), abs(other))
    return abs(one / most - other / most)
