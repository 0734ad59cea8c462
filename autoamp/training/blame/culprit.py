"""Finds the step of a trail at which a number left its dtype's range, and says so."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection

from torch import fx

from autoamp.dtypes import largest, short_name
from autoamp.passes.write.emitted import is_inserted
from autoamp.training.blame.trail import (
    INPUT,
    OP,
    Step,
    Trail,
    given_location,
    location_of,
    readers,
)


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
        # inf - inf and 0 * inf make a NaN; an attention mask is full of infinities that
        # do no harm.
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
        # A backward of finite gradients that gives an infinity has read an infinity, if
        # its operands hold one: then the forward is to blame.
        forward = first.operands[0]
        for step in (forward, *forward.operands):
            if not step.is_finite:
                root = root_of(step)
                if not (root.literal or root.is_given):
                    return root
    return first


def first_out_of_range(
    trail: Trail,
    loss: Step | None = None,
    known: Collection[object] = (),
) -> Step | None:
    """The step to blame; steps whose key is in `known` are passed over.

    The step that spoiled the loss or a gradient comes first; where there is none, the
    first step that made an infinity of finite numbers, even if it did no harm.
    """
    step = harmful(trail, loss)
    if step is not None and step.key not in known:
        return step
    born = filter(_bears, trail.steps)
    return next((each for each in born if each.key not in known), None)


def _bears(step: Step) -> bool:
    """Whether a step made an infinity or NaN of finite numbers."""
    if step.is_finite or step.literal:
        return False
    if step.is_backward:
        return not step.entered_bad
    return all(each.is_finite for each in step.operands)


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


def accused(step: Step, scale: float | None) -> str:
    """One clause that names the op, module path and source line of a culprit.

    Args:
        step: the culprit.
        scale: the loss scale that gradients had; None without one.
    """
    where, dtype = step.location, short_name(step.dtype)
    kind = "NaN" if math.isnan(step.largest) else "infinite"
    if step.entered_bad:
        output = _output_of(step)
        came = f"it came in with the gradient of {output}, so that " if output else ""
        return (
            f"a gradient that enters the model at {where} is not finite: {came}the "
            "loss, or other code outside of the model, overflowed"
        )
    if step.is_backward and scale is not None:
        return f"the gradient of {where} overflowed in {dtype} at scale {scale:g}"
    if step.is_backward:
        return f"the gradient of {where} became {kind} in {dtype}{_read(step)}"
    if step.is_given and not step.is_cast:
        how = ": it arrived in that argument" if where.kind == INPUT else ""
        return f"{where} holds a number that is not finite in {dtype}{how}"
    if step.is_cast and step.node is not None:
        read_by = (location_of(each, step.here) for each in readers(step.node))
        into = [at for at in read_by if at.kind == OP]
        read = f", in which {into[0]} reads it" if into else ""
        return f"{where} overflowed in {dtype}{read}"
    return f"{where} overflowed in {dtype}: its result is {kind}"


def _output_of(step: Step) -> str:
    """The output of the graph that the op of a backward makes, or ""."""
    if step.node is None:
        return ""
    nodes = {step.node, *_uses(step.node)}
    results = step.node.graph.output_node().args[0]
    if not isinstance(results, (list, tuple)):
        return ""
    outputs = (f"output {at}" for at, each in enumerate(results) if each in nodes)
    return next(outputs, "")


def _uses(node: fx.Node) -> list[fx.Node]:
    """The casts and the parts of the value of `node`."""
    mine = [u for u in node.users if is_inserted(u) or u.target is operator.getitem]
    return [each for user in mine for each in (user, *_uses(user))]


def _read(step: Step) -> str:
    """A clause about an operand of the forward, not finite, that a backward reads."""
    inputs = [each for each in step.operands[0].operands if each.is_given]
    bad = next((each for each in inputs if not each.is_finite), None)
    if bad is None:
        return ""
    return f", which reads {bad.location}, in which a number is not finite"


def near(times: float, step: Step, scale: float) -> str:
    """One clause about the number that came nearest to its limit in the next step."""
    where = step.location
    gradient = "the gradient of " if step.is_backward else ""
    return (
        f"in the next step, at scale {scale:g}, {gradient}{where} came nearest to "
        f"the limit of {short_name(step.dtype)}, {times:.3g} times below it"
    )


def last_bad_gradient(graph: fx.Graph, weights: Collection[fx.Node]) -> str:
    """A clause that names the last op of the forward whose gradient is not finite.

    A backward runs from the end of the forward to its beginning, and a gradient that is
    not finite spoils all gradients computed from it: so the overflow came from the op
    that stands last in the forward.

    Args:
        weights: the inputs of `graph` whose gradients are not finite.

    Returns:
        The clause; "" where no op of the model reads any of `weights`.
    """
    order = {node: at for at, node in enumerate(graph.nodes)}
    read = [(order[op], weight, op) for weight in weights for op in readers(weight)]
    if not read:
        return ""
    _, weight, op = max(read, key=operator.itemgetter(0))
    name = given_location(weight, is_weight=True).name
    return f"the gradient of {name}, read by {location_of(op)}, is not finite"
