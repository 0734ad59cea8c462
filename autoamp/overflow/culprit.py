"""Finds the step of a trail at which a number left its dtype's range."""

from __future__ import annotations

import math
from collections.abc import Collection

from autoamp.dtypes import largest
from autoamp.overflow.location import Location
from autoamp.overflow.trail import Step, Trail

Key = tuple[bool, Location]
"""A step's `key`."""


def root_of(step: Step) -> Step:
    """The step that first made the infinity or NaN which `step` shows."""
    while True:
        bad = [each for each in step.operands if not each.is_finite]
        if step.is_backward or not bad:
            return step
        if not math.isnan(step.largest):
            step = bad[0]
            continue
        nans = [each for each in bad if math.isnan(each.largest)]
        if nans:
            step = nans[0]
            continue
        # The NaN comes from infinities; a mask's infinities are there on purpose.
        roots = [root_of(each) for each in bad]
        return next((root for root in roots if not root.literal), step)


def harmful(trail: Trail, loss: Step | None = None) -> Step | None:
    """The step that made the loss, an output or a gradient infinite or NaN, or None."""
    ends = [*trail.outputs, *([loss] if loss is not None else [])]
    flows = (s for s in trail.steps if s.is_backward and not s.is_finite)
    first = next(flows, None)
    spoiled = [step for step in ends if not step.is_finite]
    if first is None or first.entered_bad or (loss is not None and loss in spoiled):
        roots = [root for root in map(root_of, reversed(spoiled)) if not root.literal]
        if roots:  # a number that was given may be state that no loss depends on
            return next((root for root in roots if not root.is_given), roots[0])
    if first is None:
        return None
    if not first.entered_bad:
        # The backward of an op reads its operands and its result.
        forward = first.operands[0]
        for step in (forward, *forward.operands):
            if not step.is_finite:
                root = root_of(step)
                if not (root.literal or root.is_given):
                    return root
    return first


def born(trail: Trail) -> list[Step]:
    """The steps that made an infinity or NaN of finite numbers, in order."""
    return [
        step
        for step in trail.steps
        if not step.is_finite
        and not step.literal
        and not (step.is_backward and step.entered_bad)
        and (step.is_backward or all(each.is_finite for each in step.operands))
    ]


def first_out_of_range(
    trail: Trail, loss: Step | None = None, known: Collection[Key] = ()
) -> Step | None:
    """The step to blame; steps whose key is in `known` are passed over.

    The step that spoiled the loss or a gradient comes first; where there is none, the
    first step that made an infinity of finite numbers, even if it did no harm.
    """
    step = harmful(trail, loss)
    if step is not None and step.key not in known:
        return step
    return next((each for each in born(trail) if each.key not in known), None)


def nearest(trail: Trail) -> tuple[float, Step] | None:
    """The finite value nearest to its dtype's limit: limit over magnitude, and step.

    Values exactly at the limit do not count: masks are filled with
    `torch.finfo(dtype).min`.
    """
    found = [
        (largest(step.dtype) / step.largest, step)
        for step in trail.steps
        if step.is_finite and step.largest and step.dtype.is_floating_point
        if step.largest < largest(step.dtype)
    ]
    return min(found, key=lambda pair: pair[0], default=None)
