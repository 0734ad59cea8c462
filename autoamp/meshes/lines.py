"""What a step takes at any depth, from three small depths.

Layers are alike, so bytes, collectives and times are linear in the number of layers.
That is proved on the third depth for each model: bytes and collectives must lie on the
line of the first two exactly, times to rounding.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from autoamp.meshes.step import Observed, Sent
from autoamp.meshes.ways import WayStep

DEPTHS = (2, 3, 4)
"""The depths that are captured.  With one layer no layer lies between two others."""

Values = dict[object, float]


@dataclass(frozen=True)
class Figures:
    """A step of some layers in one way.

    Attributes:
        saved: bytes kept for the backward, without weights and their low copies.
        low: bytes of low copies of weights at the end of the forward.
        copies: the part of `low` that autoamp keeps from step to step.
        most: the most bytes held at one time besides weights.
        again: the same, besides gradients that were there before.
        forward, backward: predicted nanoseconds of the ops.
        sent: how often each collective runs.
    """

    saved: int
    low: int
    copies: int
    most: int
    again: int
    forward: float
    backward: float
    sent: dict[Sent, int]


@dataclass(frozen=True)
class Line:
    """Figures that are linear in the number of layers.

    Attributes:
        at_zero, slope: what a model has without layers, and what each layer adds.
    """

    at_zero: Values
    slope: Values

    def at(self, layers: int, *, edges: bool = True) -> Figures:
        """The figures of a number of layers.

        Args:
            edges: whether what surrounds the layers counts.  Without it the peaks
                still hold the temporary values of the whole, which is too much.
        """
        values = {
            key: each * layers + (self.at_zero[key] if edges or _is_peak(key) else 0)
            for key, each in self.slope.items()
        }
        return _figures(values)


def _is_peak(key: object) -> bool:
    return isinstance(key, tuple)


def line_of(steps: list[WayStep]) -> Line | None:
    """The line of the steps at `DEPTHS`; None if the third does not lie on it."""
    found = []
    for name in ("first", "again"):
        windows = _windows([getattr(step, name) for step in steps])
        if windows is None:
            return None
        found.append(windows)
    points = [_values(step, *found) for step in steps]
    keys = {key for point in points for key in point}
    a, b, c = ({key: point.get(key, 0) for key in keys} for point in points)
    slope = {key: b[key] - a[key] for key in keys}
    for key in keys:
        predicted = b[key] + slope[key]
        is_time = isinstance(predicted, float)
        if not (math.isclose(predicted, c[key]) if is_time else predicted == c[key]):
            return None
    return Line({key: a[key] - DEPTHS[0] * slope[key] for key in keys}, slope)


def whole(step: WayStep) -> Figures:
    """The figures of a model that was captured in all its depth."""
    sizes = {
        name: max(map(len, (each.held["forward"], each.held["backward"])))
        for name, each in (("first", step.first), ("again", step.again))
    }
    windows = [{"forward": size, "backward": size} for size in sizes.values()]
    return _figures(_values(step, *windows))


def _windows(steps: list[Observed]) -> dict[str, int] | None:
    """For each phase the number of ops of one layer and of all that surrounds them."""
    found = {}
    for phase in ("forward", "backward"):
        a, b, c = (len(each.held[phase]) for each in steps)
        if b - a != c - b:
            return None
        found[phase] = b - DEPTHS[0] * (b - a)
    return found


def _values(step: WayStep, first: dict[str, int], again: dict[str, int]) -> Values:
    """The figures of a step that are linear.

    A peak is the most of three lines: the forward rises to its last ops; the backward
    holds most where it begins, or where it ends and all gradients are there.  Between,
    what is held is linear in the layer, so that no layer inside holds more than both.
    """
    values: Values = {
        "saved": step.first.memory.saved,
        "low": step.first.memory.copies,
        "copies": step.copies,
        "forward": step.first.nanoseconds["forward"],
        "backward": step.first.nanoseconds["backward"],
    }
    for name, seen, size in (("most", step.first, first), ("again", step.again, again)):
        forward, backward = seen.held["forward"], seen.held["backward"]
        values[name, "forward"] = max(forward[-size["forward"] :], default=0)
        values[name, "begin"] = max(backward[: size["backward"]], default=0)
        values[name, "end"] = max(backward[-size["backward"] :], default=0)
    values.update(Counter(step.first.sent))
    return values


def _figures(values: Values) -> Figures:
    peaks = {
        name: max(
            value
            for key, value in values.items()
            if isinstance(key, tuple) and key[0] == name
        )
        for name in ("most", "again")
    }
    return Figures(
        int(values["saved"]),
        int(values["low"]),
        int(values["copies"]),
        int(peaks["most"]),
        int(peaks["again"]),
        values["forward"],
        values["backward"],
        {k: int(n) for k, n in values.items() if isinstance(k, Sent) and n},
    )
