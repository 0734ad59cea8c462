"""Says in words which op overflowed, and by which number."""

from __future__ import annotations

import math

from autoamp.dtypes import short_name
from autoamp.ranges.spot import OP, readers, spot_of
from autoamp.ranges.trail import Step


def accused(step: Step, scale: float) -> str:
    """One clause that names the op, module path and source line of a culprit.

    Args:
        step: the culprit.
        scale: the loss scale that gradients had.
    """
    dtype = short_name(step.dtype)
    if step.entered_bad:
        return (
            f"a gradient that enters the model at {step.spot} is not finite: the loss, "
            "or code outside of the model, made it so"
        )
    if step.is_backward:
        return f"the gradient of {step.spot} overflowed in {dtype} at scale {scale:g}"
    if step.is_given and not step.is_cast:
        return f"{step.spot} holds a number that is not finite in {dtype}"
    if step.is_cast and step.node is not None:
        into = [spot for spot in map(spot_of, readers(step.node)) if spot.kind == OP]
        read = f", in which {into[0]} reads it" if into else ""
        return f"{step.spot} overflowed in {dtype}{read}"
    kind = "NaN" if math.isnan(step.largest) else "infinite"
    return f"{step.spot} overflowed in {dtype}: its result is {kind}"


def near(times: float, step: Step, scale: float) -> str:
    """One clause about the number that came nearest to its limit in the next step."""
    gradient = "the gradient of " if step.is_backward else ""
    return (
        f"in the next step, at scale {scale:g}, {gradient}{step.spot} came nearest to "
        f"the limit of {short_name(step.dtype)}, {times:.3g} times below it"
    )
