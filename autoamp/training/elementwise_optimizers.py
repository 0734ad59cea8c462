"""The optimizers known to step each parameter by itself, whatever the others are.

Such an optimizer may step its parameters in several parts, one after the other, with
the same result to the bit.  The list is closed: a person has read the step of each
class in it.  A class that derives from one of them is not on the list.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import optim
from torch.optim import Optimizer

_TORCH: list[Any] = [
    *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
    *(optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD),
    *(optim.Adafactor, optim.Muon, optim.SparseAdam),
]
"""Torch's classes whose `step` visits one parameter after the other, or by `foreach`
ops, which do the same to each (a test records the ops of each class)."""

_STEPS = [inspect.unwrap(each.step) for each in _TORCH]

_OF_MATRICES = [inspect.unwrap(each.step) for each in (optim.Adafactor, optim.Muon)]
"""Those that do not treat each element of a parameter by itself."""

_OTHERS = {
    # Read in lion-pytorch 0.2.5: no value outlives a round of the loop.
    ("lion_pytorch.lion_pytorch", "Lion"),
    # Read in schedulefree 1.4.1: what a step counts stands as numbers in the groups,
    # and is the same function of the group's own numbers in each part.
    ("schedulefree.adamw_schedulefree", "AdamWScheduleFree"),
    ("schedulefree.radam_schedulefree", "RAdamScheduleFree"),
    ("schedulefree.sgd_schedulefree", "SGDScheduleFree"),
    # Read in transformers 5.24.0: the rate follows each parameter's own root mean
    # square, and the state is of one parameter.
    ("transformers.optimization", "Adafactor"),
}
"""Classes of other packages, by module and name."""


def body_of(optimizer: Optimizer) -> Callable[..., Any] | None:
    """The step of a class without torch's hooks, if it steps each parameter by itself.

    None for any other class, and where the script has exchanged the class's `step`.
    """
    kind: Any = type(optimizer)
    if not hasattr(kind.step, "hooked"):
        return None
    # Torch marks the function that calls the hooks so, and wraps the step with it.
    body: Callable[..., Any] = kind.step.__wrapped__
    if kind in _TORCH:
        return body if inspect.unwrap(body) in _STEPS else None
    own = inspect.unwrap(body).__qualname__ == f"{kind.__name__}.step"
    return body if own and (kind.__module__, kind.__qualname__) in _OTHERS else None


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether an optimizer is known to step each element of a parameter by itself."""
    step: Any = inspect.unwrap(type(optimizer).step)
    return step in _STEPS and step not in _OF_MATRICES


def part_of(
    optimizer: Optimizer,
    instead: Mapping[int, torch.Tensor],
    state: Mapping[torch.Tensor, Any],
) -> Optimizer:
    """An optimizer of the same class and settings for some of the parameters.

    Args:
        instead: the tensor that takes a parameter's place, by the parameter's id.
        state: the state of each of these tensors that has one.
    """
    kind: Any = type(optimizer)
    part = object.__new__(kind)
    # A method that stands on the instance is the whole optimizer's.
    part.__dict__.update(
        (name, value)
        for name, value in vars(optimizer).items()
        if not (callable(value) and hasattr(kind, name))
    )
    part.param_groups = []
    for group in optimizer.param_groups:
        params = [instead[i] for i in map(id, group["params"]) if i in instead]
        if params:
            part.param_groups.append({**group, "params": params})
    part.state = state
    made: Optimizer = part
    return made
