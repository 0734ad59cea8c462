"""Times ways in turn, as often as it takes, and says how far the times lie apart."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoamp.ask.stand_in import Call
from autoamp.benchmark.step.running import Running
from autoamp.tuning.clock import finish

FEWEST = 5
"""Rounds; with fewer, no way could be surely faster than another (a sign test)."""

_ENOUGH = 10
"""Rounds after which small spreads end the measurement."""

_CLOSE = 0.005
"""A spread is small when the standard error of every ratio is within half a percent."""

_MOST = 1000

_FAR = 10.0
"""Sigmas from the median, by the median absolute deviation, that make an outlier."""


@dataclass(frozen=True)
class Length:
    """How long to measure.

    Attributes:
        rounds: exactly so many rounds; None to choose.
        seconds: the time after which no round is begun, once there were `FEWEST`.
    """

    rounds: int | None = None
    seconds: float = 10.0


def in_rounds(runners: Sequence[Running], length: Length) -> Iterator[None]:
    """Times a step of every way in each round, in another order in each, and yields.

    The order is shuffled so that no way mostly follows the same other, whose memory it
    finds in the cache or whose heat it finds in the clock; it is alike each time.
    """
    order = random.Random(0)
    begun = time.perf_counter()
    for done in range(1, (length.rounds or _MOST) + 1):
        for runner in order.sample(list(runners), len(runners)):
            timed(runner)
        yield
        if length.rounds is None and _is_enough(runners, done, begun, length.seconds):
            return


def timed(runner: Running) -> None:
    """Notes the time of one step, from its data to the end of its work."""
    device = runner.device
    batch = runner.batch() if runner.task.data is None else None
    finish(device)
    start = time.perf_counter()
    if batch is None:
        batch = runner.batch()
        finish(device)
    loaded = time.perf_counter()
    runner.step(batch)
    finish(device)
    runner.seconds.append(time.perf_counter() - start)
    runner.data_seconds.append(loaded - start)


def least_of_steps(runner: Running | None, call: Call) -> float:
    """The least time of `FEWEST` steps with these arguments, after two that settle.

    The least is the time that other programs disturb least.
    """
    assert runner is not None
    times = []
    for _ in range(FEWEST + 2):
        batch = runner.as_taken(call)
        finish(runner.device)
        start = time.perf_counter()
        runner.step(batch)
        finish(runner.device)
        times.append(time.perf_counter() - start)
    return min(times[2:])


def _is_enough(
    runners: Sequence[Running], done: int, begun: float, seconds: float
) -> bool:
    if done < FEWEST:
        return False
    if time.perf_counter() - begun >= seconds:
        return True
    if done < _ENOUGH:
        return False
    base = runners[0].seconds
    errors = [ratio(r.seconds, base, paired=True)[1] for r in runners]
    own = statistics.stdev(base) / statistics.median(base)
    return max(own, *errors) / math.sqrt(done) <= _CLOSE


def ratio(
    times: Sequence[float], base: Sequence[float], *, paired: bool
) -> tuple[float, float]:
    """The ratio of times to those of the base, and its standard deviation.

    Args:
        paired: whether the n-th times are of one round: then the ratio is the median of
            the rounds' ratios, and else the ratio of the medians.
    """
    if paired:
        shares = [mine / its for mine, its in zip(times, base, strict=False)]
        return statistics.median(shares), sigma(shares)
    middle = statistics.median(times) / statistics.median(base)
    spread = [sigma(each) / statistics.median(each) for each in (times, base)]
    return middle, middle * math.hypot(*spread)


def sigma(values: Sequence[float]) -> float:
    """The standard deviation of a sample; 0.0 of a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def outliers(times: Sequence[float]) -> int:
    """How many times lie so far from the median that something disturbed them."""
    middle = statistics.median(times)
    deviation = statistics.median(abs(t - middle) for t in times)
    limit = _FAR * 1.4826 * deviation
    return sum(abs(t - middle) > limit for t in times) if deviation else 0
