"""A step of a deep model, from steps of the model with a few of its layers.

Layers are alike, so bytes, collectives and times are linear in the number of layers.
That is proved on a third depth for each model: bytes and collectives must lie on the
line of the first two exactly, times to rounding.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from autoamp import compat
from autoamp.planning.step import PHASES, Sent, StepWatch
from autoamp.planning.ways import WayStep

DEPTHS = (2, 3, 4)
"""The depths that are captured.  With one layer no layer lies between two others."""

FEWEST = 6
"""The fewest layers of a stack that is captured at smaller depths."""

_PLACES = ("index", "idx", "layer_id", "layer_number", "block_id")
"""Parts of names of attributes that say where in the stack a layer stands."""

Key = str | tuple[str, str] | Sent
"""A name of `Figures`, a peak (a name and the part of the step), or a collective."""

Stack = nn.ModuleList | nn.Sequential


def stack_of(model: nn.Module) -> Stack | None:
    """The longest list of modules that are alike; None if there is none."""
    found = [
        each
        for each in compat.modules_of(model)
        if isinstance(each, Stack) and len(each) > 1 and _are_alike(each)
    ]
    return max(found, key=len, default=None)


@contextlib.contextmanager
def with_layers(stack: Stack | None, count: int) -> Iterator[None]:
    """A region in which a stack has its first `count` layers alone."""
    if stack is None:
        yield
        return
    held = list(stack)
    del stack[count:]
    try:
        yield
    finally:
        for each in held[count:]:
            stack.append(each)


def _are_alike(stack: Stack) -> bool:
    first, *others = map(_facts, stack)
    return bool(first) and all(each == first for each in others)


def _facts(layer: nn.Module) -> list[Any]:
    """What tells layers apart: classes, shapes of weights, plain attributes."""
    weights = [
        (name, tuple(each.shape), each.dtype, each.requires_grad)
        for name, each in layer.named_parameters()
    ]
    modules = [
        (name, type(module), _settings(module))
        for name, module in layer.named_modules()
    ]
    return [weights, modules] if weights else []


def _settings(module: nn.Module) -> dict[str, object]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str | None)
        and not any(part in name for part in _PLACES)
    }


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
        at_zero: what a model has without layers.
        slope: what each layer adds; empty where the whole model was captured.
    """

    at_zero: dict[Key, float]
    slope: dict[Key, float]

    def at(self, layers: int, *, edges: bool = True) -> Figures:
        """The figures of a number of layers.

        Args:
            edges: whether the figures of all that surrounds the layers count.
                Without it the peaks still hold the temporary values of the whole,
                which is too much.
        """
        values: dict[Key, float] = {}
        for key, start in self.at_zero.items():
            is_peak = type(key) is tuple
            values[key] = self.slope.get(key, 0) * layers
            values[key] += start if edges or is_peak else 0
        sent = {key: n for key, n in values.items() if isinstance(key, Sent)}
        peaks = {"most": 0.0, "again": 0.0}
        for key, value in values.items():
            if type(key) is tuple:
                peaks[key[0]] = max(peaks[key[0]], value)
        return Figures(
            int(values["saved"]),
            int(values["low"]),
            int(values["copies"]),
            int(peaks["most"]),
            int(peaks["again"]),
            values["forward"],
            values["backward"],
            {each: int(n) for each, n in sorted(sent.items()) if n},
        )


def line_of(steps: Sequence[WayStep]) -> Line | None:
    """The line of the steps at `DEPTHS`; None if the third does not lie on it."""
    first, again = ([getattr(s, name) for s in steps] for name in ("first", "again"))
    windows = _windows(first), _windows(again)
    if None in windows:
        return None
    points = [_values(step, *windows) for step in steps]
    keys = {key for point in points for key in point}
    a, b, c = ({key: point.get(key, 0) for key in keys} for point in points)
    slope = {key: b[key] - a[key] for key in keys}
    for key in keys:
        predicted = b[key] + slope[key]
        is_time = isinstance(predicted, float)
        if not (math.isclose(predicted, c[key]) if is_time else predicted == c[key]):
            return None
    return Line({key: a[key] - DEPTHS[0] * slope[key] for key in keys}, slope)


def whole(step: WayStep) -> Line:
    """The figures of a model that was captured in all its depth."""
    return Line(_values(step, None, None), {})


Windows = dict[str, int] | None


def _windows(steps: Sequence[StepWatch]) -> Windows:
    """For each phase the number of ops of one layer and of all that surrounds them."""
    found = {}
    for phase in PHASES:
        a, b, c = (len(each.held[phase]) for each in steps)
        if b - a != c - b:
            return None
        found[phase] = b - DEPTHS[0] * (b - a)
    return found


def _values(step: WayStep, first: Windows, again: Windows) -> dict[Key, float]:
    """The figures of a step that are linear.

    A peak is the most of three lines: the forward rises to its last ops; the backward
    holds most where it begins, or where it ends and all gradients are there.  Between,
    what is held is linear in the layer, so that no layer inside holds more than both.
    """
    values: dict[Key, float] = {
        "saved": step.first.saved,
        "low": step.first.low,
        "copies": step.copies,
        "forward": step.first.nanoseconds["forward"],
        "backward": step.first.nanoseconds["backward"],
    }
    for name, seen, size in (("most", step.first, first), ("again", step.again, again)):
        forward, backward = seen.held["forward"], seen.held["backward"]
        if size is not None:
            forward = forward[-size["forward"] :]
        edge = len(backward) if size is None else size["backward"]
        values[name, "forward"] = max(forward, default=0)
        values[name, "begin"] = max(backward[:edge], default=0)
        values[name, "end"] = max(backward[-edge:], default=0)
    values.update(Counter(step.first.sent))
    return values
