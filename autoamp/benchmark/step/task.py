"""The work that is timed: one step of training, one call, or one generation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoamp.ask.stand_in import (
    Call,
    LossFn,
    check_loss,
    floats_for_loss,
    own_loss,
)
from autoamp.errors import OptionError

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

ADAMW = "AdamW, lr=1e-4"


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The default optimizer of a training step."""
    return torch.optim.AdamW(parameters, lr=1e-4)


@dataclass(frozen=True)
class Task:
    """The work of one step.

    Attributes:
        kind: "training" (forward, loss, backward, optimizer), "inference" (forward), or
            "generate" (the model's own `generate`).
        call: the arguments of a call.
        tokens: how many tokens a generation makes.
        loss_fn: gives the loss from the output; None lets `loss_of` choose.
        make_optimizer: makes the optimizer of a list of parameters.
        data: batches from which the arguments of each call come; None if every step
            gets `call`.
        targets: the random numbers that outputs without a loss are compared with.
    """

    kind: str
    call: Call
    tokens: int = 0
    loss_fn: LossFn | None = None
    make_optimizer: MakeOptimizer = adamw
    data: Iterable[Any] | None = None
    targets: dict[Any, Tensor] = field(default_factory=dict)

    @property
    def trains(self) -> bool:
        """Whether a step has a backward and an optimizer."""
        return self.kind == "training"

    def described(self) -> str:
        """The kind of the step, in words."""
        return f"generate {self.tokens}" if self.kind == "generate" else self.kind

    def loss_of(self, output: Any) -> tuple[Tensor, str]:
        """The loss of an output, and how the loss was made, in words.

        Raises:
            OptionError: `loss_fn` gives no tensor of one element, or the output has no
                float tensor to make a loss of.
        """
        if self.loss_fn is not None:
            return _scalar(self.loss_fn(output)), "loss_fn"
        loss = own_loss(output)
        if loss is not None:
            return _scalar(loss), "the output's loss"
        if isinstance(output, Tensor) and output.numel() == 1:
            return output.squeeze(), "the output, a scalar"
        floats = floats_for_loss(output)
        far = [
            (t.float() - self._target(i, t)).square().mean()
            for i, t in enumerate(floats)
        ]
        return torch.stack(far).sum(), "mean squared distance from fixed random numbers"

    def _target(self, place: int, like: Tensor) -> Tensor:
        key = place, like.shape, like.device
        if key not in self.targets:
            draws = torch.Generator("cpu").manual_seed(place)
            made = torch.randn(
                like.shape, generator=draws, dtype=torch.float32, device="cpu"
            )
            self.targets[key] = made.to(like.device)
        return self.targets[key]


def _scalar(loss: Any) -> Tensor:
    check_loss(loss)
    return loss.squeeze()  # type: ignore[no-any-return]


class Feed:
    """The arguments of one call after another, always in the same order."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self._task, self._device = task, device
        self._left: Iterator[Any] = iter(())

    def next(self) -> Call:
        """The arguments of the next call; data starts again at its end.

        Raises:
            OptionError: `data` has no batch.
        """
        data = self._task.data
        if data is None:
            return self._task.call
        nothing = object()
        batch = next(self._left, nothing)
        if batch is nothing:
            self._left = iter(data)
            batch = next(self._left, nothing)
        if batch is nothing:
            raise OptionError("data= has no batch (an iterator can be read only once)")
        moved: Call = pytree.tree_map_only(
            Tensor, lambda t: t.to(self._device), arguments_of(batch)
        )
        return moved


def arguments_of(batch: Any) -> Call:
    """The arguments of the call that a batch of `data=` stands for.

    A tuple `(args, kwargs)` of a tuple and a dict gives both kinds of arguments.
    Another tuple, or a list, gives positional arguments; a dict gives keyword
    arguments; any other object is the only argument.
    """
    match batch:
        case (tuple() as args, dict() as kwargs):
            return args, kwargs
        case dict():
            return (), dict(batch)
        case tuple() | list():
            return tuple(batch), {}
    return (batch,), {}
