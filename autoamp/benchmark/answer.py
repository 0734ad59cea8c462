"""The sentence that answers whether mixed precision helps a model here."""

from __future__ import annotations

from dataclasses import dataclass

from autoamp.benchmark.record import Measured, Row
from autoamp.tuning.clock import surely_less

_OURS = ("autoamp", "tuned")


@dataclass(frozen=True)
class Answer:
    """Whether autoamp helps, and the sentence that says so.

    Attributes:
        helps: whether a step is surely shorter in mixed precision; None where the
            times do not tell.
        sentence: the answer, with its figure.
    """

    helps: bool | None
    sentence: str


def answer(bench: Measured) -> Answer:
    """Compares the measured times of autoamp with those of fp32."""
    base, ours = _pair(bench)
    if base is None or ours is None:
        return Answer(None, "unknown: fp32 and autoamp were not both measured")
    step = "a training step" if bench.work == "training" else "a step"
    where = f" at batch {ours.batch}" if len(bench.batches) > 1 else ""
    takes = (
        f"with {ours.way} {step}{where} takes {ours.ratio:.2f} of fp32's time "
        f"(± {ours.ratio_sigma:.2f})"
    )
    if _surely_less(ours, base, bench):
        return Answer(True, f"yes: {takes}")
    if _surely_less(base, ours, bench):
        return Answer(False, f"no: {takes}")
    return Answer(None, f"no difference was measured: {takes}")


def _surely_less(one: Row, other: Row, bench: Measured) -> bool:
    """Whether chance alone would seldom make one way's times so often the shorter."""
    count = min(len(one.times), len(other.times))
    if bench.interleaved:
        return surely_less(one.times[:count], other.times[:count])
    return max(one.times) < min(other.times)


def _pair(bench: Measured) -> tuple[Row | None, Row | None]:
    """The rows of fp32 and of the faster autoamp, at the last batch with both."""
    for batch in reversed(bench.batches):
        rows = [r for r in bench.rows if r.batch == batch and r.ratio is not None]
        base = next((r for r in rows if r.kind == "fp32" and not r.compiled), None)
        ours = [r for r in rows if r.kind in _OURS]
        if base is not None and ours:
            return base, min(ours, key=lambda r: r.ratio or 0.0)
    return None, None
