"""What can be had: predicted time against predicted error, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Errors = Mapping[str, float]
"""The error of each measure ("outputs", "gradients", "loss", "metric")."""


@dataclass(frozen=True)
class Point:
    """One placement.

    Attributes:
        nanoseconds: the predicted time of forward and backward.
        errors: the predicted error of each measure.
        low: how many ops are low.
        name: "fp32", "torch.autocast" or "all low" for the placements to compare with;
            else "".
    """

    nanoseconds: float
    errors: Errors
    low: int
    name: str = ""


@dataclass(frozen=True)
class Check:
    """The measured errors of the chosen placement on one batch.

    Attributes:
        batch: which batch of `calibrate_on`.
        held_out: whether nothing was learned from the batch.
        errors: the measured error of each measure.
        autocast: the same under `torch.autocast`; empty where autocast raises.
    """

    batch: int
    held_out: bool
    errors: Errors
    autocast: Errors


@dataclass(frozen=True)
class Frontier:
    """The placements of least predicted time for each error, and the one chosen.

    Attributes:
        budget: the budget, in the user's words.
        precision: the compute dtype.
        limits: the largest error that the budget allows, for each measure it limits.
        points: the placements, the most exact first, each faster than the one before.
        marks: placements to compare with.
        chosen: the place of the chosen placement among the points.
        checks: the measured errors of the chosen placement, batch by batch.
        below_ceiling: names of ops that are low though type promotion leaves them fp32.
        tried: how many placements were measured.
        steps: the time to find the points, in calls of the model in fp32, node by node
            and with their backward; without the capture and without the measuring.
        seconds: the time that all this took.
    """

    budget: str
    precision: str
    limits: Errors
    points: Sequence[Point]
    marks: Sequence[Point]
    chosen: int
    checks: Sequence[Check] = ()
    below_ceiling: Sequence[str] = ()
    tried: int = 1
    steps: float = field(default=0.0, compare=False)
    seconds: float = field(default=0.0, compare=False)

    @property
    def point(self) -> Point:
        """The chosen placement."""
        return self.points[self.chosen]

    @property
    def fp32(self) -> Point:
        """The placement with every op in fp32."""
        return next(each for each in self.marks if each.name == "fp32")

    def measured(self, measure: str) -> float:
        """The largest measured error of the chosen placement, over all batches."""
        found = [check.errors[measure] for check in self.checks]
        return max(found, key=lambda e: math.inf if math.isnan(e) else e, default=0.0)

    def sentences(self) -> list[str]:
        """The budget and what came of it, for a person."""
        point, fp32 = self.point, self.fp32
        limits = f" ({_listed(self.limits)})" if "autocast" in self.budget else ""
        predicted = f"{_listed(point.errors)}, in {_share(point, fp32)} of fp32's time"
        said = [
            f"The budget is {self.budget}{limits}.",
            f"Predicted: {predicted}; {_named(self.marks, fp32)}.",
        ]
        for check in self.checks:
            what = "held out" if check.held_out else "learned from"
            beside = (
                f"; torch.autocast: {_listed(check.autocast)}" if check.autocast else ""
            )
            said.append(
                f"Measured on batch {check.batch} ({what}): "
                f"{_listed(check.errors)}{beside}."
            )
        if len(self.checks) == 1:
            said.append("With two batches or more, the last one would be held out.")
        if self.below_ceiling:
            said.append(
                f"{len(self.below_ceiling)} ops are low that type promotion would "
                f"leave fp32, such as {self.below_ceiling[0]}."
            )
        return said

    def __str__(self) -> str:
        rows = [f"{'of fp32':>9}  {'low ops':>7}  predicted error"]
        for at, each in enumerate(self.points):
            mark = "  <- chosen" if at == self.chosen else ""
            rows.append(
                f"{_share(each, self.fp32):>9}  {each.low:>7}  "
                f"{_listed(each.errors)}{mark}"
            )
        return "\n".join([*self.sentences(), *rows])

    def as_json(self) -> dict[str, Any]:
        """The frontier as plain lists and dicts; the times it took are left out."""
        checks = [
            {
                "batch": each.batch,
                "held_out": each.held_out,
                "errors": _rows(each.errors),
                "autocast": _rows(each.autocast),
            }
            for each in self.checks
        ]
        return {
            "budget": self.budget,
            "precision": self.precision,
            "limits": _rows(self.limits),
            "points": [_plain(each) for each in self.points],
            "marks": [_plain(each) for each in self.marks],
            "chosen": self.chosen,
            "checks": checks,
            "below_ceiling": list(self.below_ceiling),
            "tried": self.tried,
        }


def _plain(point: Point) -> dict[str, Any]:
    return {
        "nanoseconds": point.nanoseconds,
        "errors": _rows(point.errors),
        "low": point.low,
        "name": point.name,
    }


def _rows(errors: Errors) -> list[dict[str, Any]]:
    """Errors for JSON, which knows no infinity."""
    return [
        {"measure": name, "error": error if math.isfinite(error) else None}
        for name, error in errors.items()
    ]


def _listed(errors: Errors) -> str:
    """Each measure with its error."""
    return ", ".join(f"{name} {error:.2g}" for name, error in errors.items()) or "none"


def _share(point: Point, fp32: Point) -> str:
    return f"{point.nanoseconds / fp32.nanoseconds:.2f}" if fp32.nanoseconds else "1.00"


def _named(marks: Sequence[Point], fp32: Point) -> str:
    """The placements to compare with: their time and their errors."""
    return "; ".join(
        f"{each.name}: {_share(each, fp32)} with {_listed(each.errors)}"
        for each in marks
        if each is not fp32
    )
