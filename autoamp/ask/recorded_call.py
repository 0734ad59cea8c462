"""Runs a call of a stand-in and its backward, and records a trail of all numbers."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoamp.ask.stand_in import StandIn, copied, outcome_of, untouched
from autoamp.node_by_node.held import Held
from autoamp.node_by_node.runner import Runner
from autoamp.options import Options
from autoamp.overflow.location import INPUT, WEIGHT, Location
from autoamp.overflow.python_calls import Listening
from autoamp.overflow.recorder import Recorder
from autoamp.overflow.trail import Step, Trail
from autoamp.pipeline.prepared import Prepared


@dataclass
class RecordedCall:
    """One call, and its backward.

    Attributes:
        trail: the values and gradients of the call.
        loss: the step that made the loss; None without a backward.
    """

    trail: Trail
    loss: Step | None = None


class Recording(StandIn):
    """A stand-in whose calls leave trails."""

    def recorded(self, options: Options, scale: float) -> RecordedCall:
        """One call and its backward.

        Args:
            options: the options under which the graphs are placed.
            scale: the loss scale.
        """
        trail, shadows = Trail(), dict[int, Tensor]()
        self.records(options)  # before the region below, in which autograd is slow
        call = copied(self.call)
        names = self._names(*call)

        def play(prepared: Prepared, given: tuple[Any, ...]) -> Any:
            inputs = [_shadow(value, shadows, names) for value in given]
            recorder = Recorder(trail, names, exact=True)
            gm = self.record(prepared, options).gm
            return Runner(gm, [Held(), recorder]).run(*inputs)

        self.engine.play = play
        try:
            with untouched(self.twin, trains=self.trains), _lines_recorded():
                found = outcome_of(
                    self.twin,
                    call,
                    self.loss_fn,
                    shadows.values(),
                    trains=self.trains,
                    scale=scale,
                    around_loss=Listening(trail),
                )
            trail.let_go()
            return RecordedCall(trail, trail.maker(found.loss))
        finally:
            self.engine.play = None

    def _names(self, args: Any, kwargs: Any) -> dict[int, Location]:
        """The names of the model's tensors and of the arguments, by `id`."""
        own = [*self.twin.named_parameters(), *self.twin.named_buffers()]
        found = {id(tensor): Location(WEIGHT, name=path) for path, tensor in own}
        for name, value in _by_name(self.twin, args, kwargs).items():
            for path, leaf in pytree.tree_leaves_with_path(value):
                if isinstance(leaf, Tensor):
                    location = Location(INPUT, name=name + pytree.keystr(path))
                    found[id(leaf)] = location
        return found


def _shadow(value: Any, shadows: dict[int, Tensor], names: dict[int, Location]) -> Any:
    """A leaf in place of the leaf `value`, to leave its hooks and `.grad` alone."""
    if not (isinstance(value, Tensor) and value.is_leaf and value.requires_grad):
        return value
    if id(value) not in shadows:
        shadow = value.detach().requires_grad_()
        if isinstance(value, nn.Parameter):
            shadow = nn.Parameter(value.detach())
        shadows[id(value)] = shadow
        if id(value) in names:
            names[id(shadow)] = names[id(value)]
    return shadows[id(value)]


def _lines_recorded() -> contextlib.AbstractContextManager[Any]:
    """A region in which autograd records the lines of Python code between graphs."""
    return torch.autograd.set_detect_anomaly(True, check_nan=False)


def _by_name(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments by the names that the model's `forward` gives them."""
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
        return dict(bound.arguments)
    except (TypeError, ValueError):
        named = {f"input.{at}": value for at, value in enumerate(args)}
        return {**named, **kwargs}
