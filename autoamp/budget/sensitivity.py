"""How much the rounding of each op, and of each cast, moves a model's results.

Each rounding makes an error e of a tensor v.  To first order a result R moves by
<dR/dv, e>.  The elements of e are taken to be independent with mean zero (rounding to
nearest), so that the expected square of the move is the sum of (dR/dv)^2 e^2, and the
squares of different roundings add up.

Of many numbers (all outputs, all gradients) the norm of the move is wanted.  With r
drawn from a standard normal distribution, E <r, move>^2 = ||move||^2, so that one
backward with r in the place of the outputs' gradient gives all that is needed.

A gradient moves in two ways: the forward values that it is computed with are rounded,
and gradients inside the backward are rounded.  With a random direction s of the
weights, <s, gradient> is the derivative of the loss along s.  So

* a rounding of the forward value v moves <s, gradient> by <dh/ds, e>, where h is the
  loss's gradient with respect to v, and dh/ds its derivative along s;
* a rounding of the gradient h moves it by <dv/ds, e>.

Both derivatives are differences between two steps, one at the weights and one at the
weights moved along s.  (This is the tangent that forward-mode differentiation gives;
Griewank and Walther, "Evaluating Derivatives", 2008, chapters 3 and 5.)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autoamp.budget.probe import Edge, Trace, Use, rounding_error
from autoamp.dtypes import largest, needs_loss_scale
from autoamp.place.assign import OpKey

_LEAST = 1e-60
"""Stands for the size of a result that is zero, whose relative error has no meaning."""


@dataclass
class Squares:
    """Squares of errors that add up, for one measure, each relative to the result.

    Attributes:
        own: op to the square that it costs to have the op low.
        down: edge to the square if the reader is low and the value is not.
        up: edge to the square if the value is low and the reader is not.
        known: the ops from which a derivative of the result was found.
    """

    own: dict[OpKey, float] = field(default_factory=lambda: defaultdict(float))
    down: dict[Edge, float] = field(default_factory=lambda: defaultdict(float))
    up: dict[Edge, float] = field(default_factory=lambda: defaultdict(float))
    known: set[OpKey] = field(default_factory=set)


class Rounding:
    """Sums the squares of each measure over calls.

    Attributes:
        low: the compute dtype.
        found: the squares of each measure, by the measure's name.
        calls: how many calls the squares are averaged over.
    """

    def __init__(
        self, low: torch.dtype, found: Mapping[str, Squares], calls: int = 1
    ) -> None:
        self.low, self.found, self.calls = low, found, calls

    def moved(
        self, measure: str, trace: Trace, flows: Mapping[Use, Tensor], size: float
    ) -> None:
        """Adds what roundings of values do to a result.

        Args:
            flows: the derivative of the result with respect to each value and use.
            size: the square of the result's norm.
        """
        squares, size = self.found[measure], max(size * self.calls, _LEAST)
        for use, error in trace.errors.items():
            if use in flows:
                squares.known.add(trace.maker(use))
                square = _square(flows[use], error)
                squares.own[trace.maker(use)] += square / size
        for use, value in trace.used.items():
            edge = trace.edge(use)
            if use in flows and edge.is_rounded:
                squares.known.update(filter(None, (edge.reader,)))
                square = _square(flows[use], rounding_error(value, self.low))
                squares.down[edge] += square / size

    def moved_backward(
        self,
        measure: str,
        trace: Trace,
        tangents: Mapping[Use, Tensor],
        flows: Mapping[Use, Tensor],
        size: float,
    ) -> None:
        """Adds what roundings of gradients do to the gradients of weights.

        Args:
            tangents: the derivative of each use along the direction.
            flows: the loss's gradient with respect to each use.
            size: the square of the gradients' norm.
        """
        squares, size = self.found[measure], max(size * self.calls, _LEAST)
        scale = _loss_scale(flows.values(), self.low)
        for use, tangent in tangents.items():
            if use not in flows:
                continue
            error = rounding_error(flows[use] * scale, self.low) / scale
            square, edge = _square(tangent, error) / size, trace.edge(use)
            if edge.is_rounded and edge.reader is not None:
                squares.own[edge.reader] += square
            if edge.maker is not None:
                squares.up[edge] += square


def _square(flow: Tensor, error: Tensor) -> float:
    moved = (flow * error).masked_fill_(flow == 0, 0.0)  # an infinity that goes nowhere
    found = float(moved.square().sum(dtype=torch.float64))
    return math.inf if math.isnan(found) else found


def _loss_scale(flows: Iterable[Tensor], low: torch.dtype) -> float:
    """The loss scale with which gradients are rounded, a power of two."""
    if not needs_loss_scale(low):
        return 1.0
    most = max((float(f.abs().max()) for f in flows if f.numel()), default=0.0)
    if not 0.0 < most < math.inf:
        return 1.0
    return 2.0 ** min(15, math.floor(math.log2(largest(low) / most)) - 1)
