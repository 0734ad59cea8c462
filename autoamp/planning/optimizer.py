"""Finds the state that an optimizer keeps, by a step on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from autoamp.errors import OptionError
from autoamp.planning.step import bytes_of
from autoamp.printable import class_name, printable_line

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, foreach=False)


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)


OPTIMIZERS: dict[str, Make | None] = {"adamw": _adamw, "sgd": _sgd, "none": None}
"""The names that `optimizer=` takes; "sgd" has momentum."""


@dataclass(frozen=True)
class OptimizerCost:
    """The cost of an optimizer.

    Attributes:
        name: the optimizer's class, or "no optimizer".
        state: bytes of the state that it keeps between steps.
        moved: bytes that a step reads and writes: each weight and each state twice,
            each gradient once.
    """

    name: str
    state: int
    moved: int


def optimizer_cost(
    parameters: Sequence[nn.Parameter], optimizer: str | Make
) -> OptimizerCost:
    """The cost of an optimizer.

    Args:
        optimizer: a name in `OPTIMIZERS`, or a function from a list of parameters to an
            optimizer.

    Raises:
        OptionError: there is no such optimizer, or it cannot step on the meta device.
    """
    if isinstance(optimizer, str) and optimizer not in OPTIMIZERS:
        raise OptionError(
            f"optimizer={optimizer!r} is not one of {', '.join(OPTIMIZERS)}; give one "
            "of these, or a function from a list of parameters to an optimizer"
        )
    make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    trained = [_on_meta(each) for each in parameters if each.requires_grad]
    if make is None or not trained:
        return OptimizerCost("no optimizer", 0, 0)
    try:
        made = make(trained)
        made.step()
    except Exception as error:
        said = printable_line(f"{type(error).__name__}: {error}", 300)
        raise OptionError(
            f"the optimizer cannot step on the meta device: {said}; give "
            'optimizer="none", or an optimizer with foreach=False and fused=False'
        ) from error
    state = bytes_of(list(made.state.values()))
    size = bytes_of(trained)
    return OptimizerCost(class_name(made), state, 2 * (size + state) + size)


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    made = nn.Parameter(torch.empty_like(parameter, device="meta"))
    made.grad = torch.empty_like(made)
    return made
