"""One step of one rank in fp32, under `torch.autocast` and with autoamp."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.ask.examine import examined
from autoamp.ask.stand_in import Call, default_loss, floats_of
from autoamp.dtypes import short_name
from autoamp.kernels.table import TOGETHER
from autoamp.meshes.step import Observed, observed_step
from autoamp.model.eligible import parameters_of
from autoamp.model.kept import capture_now, left_as_it_is
from autoamp.options import Options
from autoamp.place.devices import Device
from autoamp.planning.fakes import without_memory
from autoamp.planning.memory import own_part
from autoamp.planning.ways import (
    AUTOAMP,
    AUTOCAST,
    FP32,
    Copies,
    autocast_of,
    tensors_of,
)


@dataclass(frozen=True)
class Setting:
    """What a step is planned with.

    Attributes:
        options: the options of the conversion.
        low: the compute dtype.
        device: the device whose figures give the times.
    """

    options: Options
    low: torch.dtype
    device: Device


@dataclass(frozen=True)
class WayStep:
    """A step in one way.

    Attributes:
        first: the step, without gradients before it.
        again: the same step where the gradients of another are held.
        copies: bytes of low copies that autoamp keeps; 0 in the other ways.
        boundary: bytes and dtype of what one layer gives to the next.
        rewritten: whether autoamp's graphs are rewritten.
    """

    first: Observed
    again: Observed
    copies: int
    boundary: tuple[int, str]
    rewritten: bool = True


def steps_of(
    model: nn.Module,
    call: Call,
    setting: Setting,
    layer: nn.Module | None,
    names: Iterable[str] = (FP32, AUTOCAST, AUTOAMP),
    *,
    again: bool = True,
) -> dict[str, WayStep]:
    """A step in each way; the model is left as it was.

    Args:
        layer: a layer whose result is the boundary between two stages.
        names: the ways that are wanted.
        again: whether the step also runs with the gradients of another; otherwise
            `again` of each way is its `first`.
    """
    with left_as_it_is(model), without_memory(model, call) as given:
        model.train()
        runner = _Runner(model, given, setting, layer, again=again)
        found = {}
        if FP32 in names:
            found[FP32] = runner.plain(contextlib.nullcontext)
        if AUTOCAST in names:
            found[AUTOCAST] = runner.plain(
                lambda: autocast_of(setting.low, setting.device)
            )
        if AUTOAMP in names:
            found[AUTOAMP] = runner.ours()
    return found


class _Runner:
    """Runs one model on one call, in several ways."""

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        setting: Setting,
        layer: nn.Module | None,
        *,
        again: bool,
    ) -> None:
        self.model, self.setting, self.layer = model, setting, layer
        self.count = 2 if again else 1
        self.args, self.kwargs = call
        self.weights = tensors_of(model)
        self.boundary = (0, "")
        leaves = pytree.tree_leaves(call)
        self.given = [each for each in leaves if isinstance(each, Tensor)]

    def plain(self, region: Any) -> WayStep:
        """A step of the model's own code."""
        hook = None
        if self.layer is not None:
            hook = self.layer.register_forward_hook(self._note)
        try:
            return self._both(self.model, region, {}.values())
        finally:
            if hook is not None:
                hook.remove()

    def ours(self) -> WayStep:
        """A step with autoamp's graphs."""
        setting = self.setting
        # The few numbers that loss scaling adds to a graph's inputs are left out, and
        # gradients arrive one by one, as they do among ranks.
        unfused = (*setting.options.unfused, TOGETHER)
        options = setting.options.replace(loss_scale="off", unfused=unfused)
        with examined(self.model, options, setting.low, setting.device) as (
            twin,
            engine,
        ):
            copies = Copies(setting.low)
            engine.play = copies.play
            as_captured = engine.as_captured

            def by_autocast(prepared: Any, args: Any) -> Any:
                with autocast_of(setting.low, setting.device):
                    return as_captured(prepared, args)

            # As `convert` runs graphs that it cannot rewrite.
            engine.as_captured = by_autocast  # type: ignore[method-assign]
            capture_now(twin, self.args, self.kwargs)
            graphs = engine.record.graphs
            rewritten = bool(graphs) and all(g.rewritten is not None for g in graphs)
            return self._both(
                twin, contextlib.nullcontext, copies.made.values(), rewritten=rewritten
            )

    def _both(
        self,
        called: nn.Module,
        region: Any,
        copies: Iterable[Tensor],
        *,
        rewritten: bool = True,
    ) -> WayStep:
        parameters = parameters_of(called)
        # DTensors run each kind of op once on the shapes of the whole, to learn those
        # of results.  So the steps of DTensors run twice, and the first are left out.
        is_split = any(map(compat.is_distributed, parameters))
        for _ in range(2 if is_split else 1):
            steps: list[Observed] = []
            try:
                for _ in range(self.count):
                    steps.append(self._step(called, region(), copies))
            finally:
                for parameter in parameters:
                    parameter.grad = None
        kept = sum(own_part(each).nbytes for each in copies)
        return WayStep(steps[0], steps[-1], kept, self.boundary, rewritten)

    def _step(
        self, called: nn.Module, region: Any, copies: Iterable[Tensor]
    ) -> Observed:
        """One step, with the gradients that are there as they are."""
        grads = [p.grad for p in parameters_of(called) if p.grad is not None]
        return observed_step(
            lambda: default_loss(called(*self.args, **self.kwargs)),
            region,
            (self.weights, [*self.given, *grads], copies),
            self.setting.device,
        )

    def _note(self, _: Any, __: Any, result: Any) -> None:
        floats = [own_part(each) for each in floats_of(result)]
        if floats:
            self.boundary = floats[0].nbytes, short_name(floats[0].dtype)
