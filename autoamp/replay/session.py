"""One run of the deadly step: what happens at a training's calls and steps."""

from __future__ import annotations

import contextlib
import inspect
import linecache
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autoamp import compat
from autoamp.flight.death import is_nobodys
from autoamp.flight.recorder import parameters_in
from autoamp.flight.values import class_of, tensors_in
from autoamp.model.conversion import conversion_of
from autoamp.node_by_node.observer import Observer
from autoamp.options import Options
from autoamp.overflow.location import INPUT, Location
from autoamp.overflow.python_calls import Listening
from autoamp.overflow.recorder import Recorder
from autoamp.overflow.remedy import Remedy
from autoamp.overflow.trail import Step, Trail, floats_in, largest_in
from autoamp.replay import placed
from autoamp.replay.recorded import Recorded
from autoamp.rewrite.rewritten import Rewritten
from autoamp.training.step.boundary import OptimizerBoundary


class ReplayEnds(BaseException):
    """Ends the script once the step has run; `except Exception` lets it pass."""


@dataclass
class Outcome:
    """What one run of the deadly step came to.

    Attributes:
        reached: whether the model was called.
        loss: the loss of the last backward, or None.
        loss_step: the step of the trail that made the loss.
        trail: the values and gradients of the step.
        bad: the names of parameters whose gradients are not finite.
        largest: the largest gradient.
        skipped: whether the optimizer's step was skipped; None before a step.
        step_line: the line that called the optimizer.
        scale: the loss scale, or None.
        records: the graphs that ran.
        notes: what could not be put in place, or was another model.
    """

    trail: Trail = field(default_factory=Trail)
    reached: bool = False
    loss: float | None = None
    loss_step: Step | None = None
    bad: list[str] = field(default_factory=list)
    largest: float = 0.0
    skipped: bool | None = None
    step_line: str = ""
    scale: float | None = None
    records: list[Rewritten] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def died(self) -> bool:
        """Whether the loss or a gradient was not finite, or the step was skipped."""
        loss = self.loss is not None and not math.isfinite(self.loss)
        return loss or bool(self.bad) or self.skipped is True


class Session:
    """Puts a death's state into the first training call like the recorded one."""

    def __init__(self, recorded: Recorded, remedy: Remedy) -> None:
        self.recorded, self.remedy = recorded, remedy
        self.outcome = Outcome()
        self.target: nn.Module | None = None
        self.done = False
        self._calls = 0
        self._names: dict[int, Location] = {}
        self._kept: list[Any] = []  # what `_names` knows by `id`
        self._inside = False
        self._region = contextlib.ExitStack()

    @property
    def listeners(self) -> dict[str, Any]:
        """See `autoamp.flight.instead.Replay`."""
        return {"on_step": (self.stepped,), "observers": (self._observer,)}

    def options_for(self, model: nn.Module, options: Options) -> Options:
        """Options that leave a trail: graphs that a compiler makes leave none."""
        options = options.replace(record=None, heal=False, backend="eager")
        if class_of(model) == self.recorded.facts["class"]:
            options = self.remedy.on(options)
        return options

    def _observer(self) -> Observer:
        if not self._inside:
            return Observer()
        return Recorder(self.outcome.trail, self._names, exact=True)

    # -- a call ----------------------------------------------------------------------

    def begin(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Places what was recorded before the model's own call runs."""
        self._pause()
        if self.done:
            raise ReplayEnds
        if not self._is_target(model):
            return args, kwargs
        if self._calls == len(self.recorded.calls):
            self.finish()
            raise ReplayEnds
        if self.target is None:
            self.target, self.outcome.reached = model, True
            self.outcome.notes += placed.place_weights(model, self.recorded)
        call = self.recorded.calls[self._calls]
        self._calls += 1
        self._place_scale(model, call.scale)
        args, kwargs = placed.arguments(call, args, kwargs, model)
        self._name_arguments(model, args, kwargs)
        if self._calls == len(self.recorded.calls):
            frame = sys._getframe(1)
            named = placed.place_locals(self.recorded.frames, model, frame)
            self._name_locals(named, frame)
        self.outcome.notes += placed.place_generators(call)
        self._inside = True
        return args, kwargs

    def end(self, result: Any) -> None:
        """Has the loss noticed, and what is made of the model's results."""
        if self._inside:
            self._inside = False
            for each in tensors_in(result):
                if not each.is_floating_point():
                    continue
                if each.grad_fn is not None:
                    compat.hook_gradient(each, self._reached)
                if each.numel() == 1 and not math.isfinite(float(each.detach())):
                    self.outcome.loss = float(each.detach())
                    self.outcome.loss_step = self.outcome.trail.maker(each)
        if self.target is not None and not self.done:
            self._region.close()
            self._region.enter_context(Listening(self.outcome.trail))

    def _pause(self) -> None:
        self._region.close()

    def _is_target(self, model: nn.Module) -> bool:
        if self.target is not None:
            return model is self.target
        facts = self.recorded.facts
        if class_of(model) != facts["class"]:
            return False
        if model.training != self.recorded.calls[0].training:
            return False
        if parameters_in(model) == facts["parameters"]:
            return True
        self.outcome.notes.append(
            f"the script's {facts['label']} has other parameters than the recorded one"
        )
        return False

    def _place_scale(self, model: nn.Module, scale: float | None) -> None:
        state = conversion_of(model)
        if state is None or state.engine is None:
            return
        scaling = state.engine.record.scaling
        if not scaling.enabled:
            return
        if scale is not None and scaling.adapts:
            loss_scale: Any = scaling.domain.loss_scale
            now, steps = loss_scale.position
            loss_scale.set_agreed(torch.full_like(now, scale), steps)
        self.outcome.scale = float(scaling.loss_scale.scale)

    def _name_arguments(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self._kept.append((args, kwargs))
        for name, value in _by_name(model, args, kwargs).items():
            for path, tensor in placed.tensors_by_path(value, name):
                self._names[id(tensor)] = Location(INPUT, name=path)

    def _name_locals(self, names: Mapping[int, str], frame: Any) -> None:
        """Begins the trail at the caller's tensors, so that the loss's are named."""
        for each in compat.frames_from(frame):
            for value in [*each.f_locals.values()]:
                for tensor in tensors_in(value):
                    if id(tensor) not in names or not floats_in(tensor):
                        continue
                    place = Location(INPUT, name=names[id(tensor)])
                    step = Step(
                        None, largest_in([tensor]), tensor.dtype, location=place
                    )
                    self._kept.append(tensor)
                    if self.outcome.trail.maker(tensor) is None:
                        self.outcome.trail.add(step, [tensor])

    # -- a backward, a step ----------------------------------------------------------

    @compat.never_captured
    def _reached(self, _: Tensor) -> None:
        losses, _frame = compat.running_losses()
        if losses:
            self.outcome.loss = float(losses[0].detach().float().mean())
            self.outcome.loss_step = self.outcome.trail.maker(losses[0])

    def stepped(
        self, boundary: OptimizerBoundary, skipped: Any, _: dict[int, Any]
    ) -> None:
        """Ends the run at the step of an optimizer of the model."""
        target = self.target
        if target is None or self.done:
            return
        mine = {id(p) for p in target.parameters()}
        if mine.isdisjoint(id(p) for p in boundary.params):
            return
        self.outcome.skipped = bool(float(skipped))
        self.outcome.step_line = _line_outside()
        self.finish()
        raise ReplayEnds

    def finish(self) -> None:
        """Reads what the step came to."""
        self._pause()
        self.done = True
        target, outcome = self.target, self.outcome
        if target is None:
            return
        grads = [
            (n, p.grad) for n, p in target.named_parameters() if p.grad is not None
        ]
        outcome.bad = [n for n, g in grads if bool(compat.any_not_finite([g]))]
        largest = compat.largest_magnitude([g for _, g in grads])
        outcome.largest = 0.0 if largest is None else float(largest)
        state = conversion_of(target)
        engine = None if state is None else state.engine
        graphs: Sequence[Any] = () if engine is None else engine.record.graphs
        outcome.records = [g.rewritten for g in graphs if g.rewritten is not None]


def _by_name(model: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments by the names that the model's `forward` gives them."""
    try:
        bound = inspect.signature(type(model).forward).bind(model, *args, **kwargs)
    except (TypeError, ValueError):
        named = {f"input.{at}": value for at, value in enumerate(args)}
        return {**named, **kwargs}
    found = dict(bound.arguments)
    found.pop(next(iter(found)), None)  # `self`
    return found


def _line_outside() -> str:
    """`train.py:12: optimizer.step()`: the innermost line of the script's own."""
    for each in compat.frames_from(sys._getframe(1)):
        if not is_nobodys(each.f_code.co_filename):
            line = linecache.getline(each.f_code.co_filename, each.f_lineno).strip()
            return f"{each.f_code.co_filename}:{each.f_lineno}: {line}"
    return ""
