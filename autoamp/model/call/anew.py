"""Wrappers made anew round the same weights, none of which can share graphs.

A solver may wrap a network in a new module at each step.  Wrappers that are alike share
graphs; where one holds a new lambda, say, each would be captured anew.
"""

from __future__ import annotations

from collections import Counter

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from autoamp.model.eligible import parameters_of

_MOST = 4
"""How many models of one class may be captured round the same weight."""

_CAPTURED: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""For the first weight of models, how many were captured, by their class's name."""


def captured_often(model: nn.Module) -> str:
    """Notes that `model` is captured; why it should not be, where many like it were."""
    weight = next(iter(parameters_of(model)), None)
    if weight is None:
        return ""
    counts = _CAPTURED.setdefault(weight, Counter())
    owner = f"{type(model).__module__}.{type(model).__qualname__}"
    counts[owner] += 1
    if counts[owner] <= _MOST:
        return ""
    return (
        f"{_MOST} other modules of its class were captured round the same weights: "
        "make one, and call it each time"
    )
