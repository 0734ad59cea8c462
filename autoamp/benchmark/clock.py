"""Times the ways in turn until the times are precise enough, with their spread."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoamp.ask.stand_in import Call
from autoamp.benchmark.step.running import Running
from autoamp.calibrate.clock import finish

FEWEST = 5
"""The least rounds: with fewer, the sign test can prove no way faster than another."""

_ALTERNATING = 0.2
"""Seconds for which steps of two sizes alternate, if `FEWEST` pairs take less."""

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
        rounds: the exact number of rounds; None lets the spread of the times decide.
        seconds: after this time no round begins, once there were `FEWEST`.
    """

    rounds: int | None = None
    seconds: float = 10.0


def in_rounds(runners: Sequence[Running], length: Length) -> Iterator[None]:
    """Times a step of every way in each round, and yields after each round.

    The order is shuffled in each round, with a fixed seed.  If one way always followed
    the same other way, that way's data in the cache and heat in the chip would bias the
    times.
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


def growth_of_steps(runner: Running | None, one: Call, other: Call) -> float:
    """The time of a step with the other arguments over the time of a step with these.

    The steps alternate, so that both meet the same disturbances, after two untimed
    steps of each. The ratio is that of the least times, which other programs have
    disturbed least; short steps are repeated until `_ALTERNATING` seconds have passed.
    """
    assert runner is not None
    for call in (one, other) * 2:
        _time_of_step(runner, call)
    begun, pairs = time.perf_counter(), 0
    least = [math.inf, math.inf]
    while pairs < FEWEST or time.perf_counter() - begun < _ALTERNATING:
        now = (_time_of_step(runner, call) for call in (one, other))
        least = [min(pair) for pair in zip(least, now, strict=True)]
        pairs += 1
    return least[1] / least[0]


def _time_of_step(runner: Running, call: Call) -> float:
    batch = runner.as_taken(call)
    finish(runner.device)
    start = time.perf_counter()
    runner.step(batch)
    finish(runner.device)
    return time.perf_counter() - start


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
    """The ratio of times to the times of the base, and its standard deviation.

    Args:
        paired: whether the n-th times belong to one round.  If so, the ratio is the
            median of the rounds' ratios; if not, it is the ratio of the medians.
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
    """How many times lie far from the median, which means that they were disturbed."""
    middle = statistics.median(times)
    deviation = statistics.median(abs(t - middle) for t in times)
    limit = _FAR * 1.4826 * deviation
    return sum(abs(t - middle) > limit for t in times) if deviation else 0
