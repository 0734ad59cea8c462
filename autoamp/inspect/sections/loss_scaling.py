"""The state of a model's loss scaling at the moment of a report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LossScaleReport:
    """The loss scaling of a model at the moment of the report.

    Attributes:
        kind: "DynamicLossScale", "StaticLossScale", or "NoLossScale" where the guard
            alone has skipped steps.
        scale: the factor by which gradients are multiplied inside the graphs.
        growth_tracker: steps without an overflow since the scale last moved.
        skipped_steps: number of optimizer steps skipped so far because of an overflow
            in the model: two optimizers that skip after one backward count two.
        skips: for each skipped step that is known, its number and the op whose
            gradient overflowed.
        foreign: whether an enabled GradScaler steps the model's optimizer, so that
            autoamp's loss scale is not in force.
    """

    kind: str
    scale: float
    growth_tracker: int
    skipped_steps: int
    skips: tuple[str, ...] = ()
    foreign: bool = False
