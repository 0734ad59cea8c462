"""The memory of a step in fp32, under `torch.autocast` and with autoamp."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.ask.examine import examined
from autoamp.ask.stand_in import Call, default_loss
from autoamp.counted.ops import storage_key
from autoamp.inspect.report import Report
from autoamp.model.eligible import parameters_of
from autoamp.model.kept import capture_now, left_as_it_is
from autoamp.model.reporting import report_of
from autoamp.options import Options
from autoamp.pipeline.prepared import Prepared
from autoamp.place.devices import Device
from autoamp.planning.cuda_autocast import CudaAutocast
from autoamp.planning.fakes import without_memory
from autoamp.planning.memory import StepMemory, step_memory

FP32, AUTOCAST, AUTOAMP = "fp32", "torch.autocast", "autoamp"

Tell = Callable[[str], None]


def memory_of_ways(
    model: nn.Module,
    call: Call,
    options: Options,
    low: torch.dtype,
    device: Device,
    *,
    trains: bool,
    tell: Tell,
) -> tuple[Mapping[str, StepMemory], Report]:
    """The memory of each way, and the report on what `convert` would do.

    Args:
        tell: called with a description of each stage as it begins.
    """
    with left_as_it_is(model), without_memory(model, call) as (args, kwargs):
        model.train(trains)
        weights = tensors_of(model)
        leaves = pytree.tree_leaves((args, kwargs))
        given = [each for each in leaves if isinstance(each, Tensor)]

        def memory(
            called: nn.Module,
            region: contextlib.AbstractContextManager[Any],
            copies: Mapping[Any, Tensor] | None = None,
        ) -> StepMemory:
            found = step_memory(
                lambda: default_loss(called(*args, **kwargs)),
                region,
                weights,
                given,
                (copies or {}).values(),
                trains=trains,
            )
            for parameter in parameters_of(called):
                parameter.grad = None
            return found

        tell("counting the memory of a step in fp32")
        found = {FP32: memory(model, contextlib.nullcontext())}
        tell("counting the memory of a step under torch.autocast")
        found[AUTOCAST] = memory(model, autocast_of(low, device))
        tell("capturing the model")
        # The few numbers that loss scaling adds to a graph's inputs are left out.
        unscaled = options.replace(loss_scale="off")
        with examined(model, unscaled, low, device) as (twin, engine):
            copies = Copies(low)
            engine.play = copies.play
            capture_now(twin, args, kwargs)
            tell("counting the memory of a step with autoamp")
            found[AUTOAMP] = memory(twin, contextlib.nullcontext(), copies.made)
            report = report_of(engine.record, None, device.name)
    return found, report


@contextlib.contextmanager
def autocast_of(low: torch.dtype, device: Device) -> Any:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autocast("cpu", dtype=low))
        if device.type == "cuda":
            stack.enter_context(CudaAutocast())
        yield


class Copies:
    """Runs rewritten graphs with one low copy of each weight.

    Attributes:
        made: the copies by the weight's storage and the copy's memory format.
    """

    def __init__(self, low: torch.dtype) -> None:
        self.made: dict[Any, Tensor] = {}
        self._low = low

    def play(self, prepared: Prepared, args: tuple[Any, ...]) -> Any:
        """Runs one graph on the arguments of a call."""
        slots = prepared.weights
        layouts = prepared.layouts or (torch.preserve_format,) * len(slots)
        copies = [
            self._copy(args[i], layout)
            for i, layout in zip(slots, layouts, strict=True)
        ]
        return prepared.run(*args, *copies)

    def _copy(self, weight: Tensor, layout: torch.memory_format) -> Tensor:
        key = storage_key(weight), tuple(weight.shape), layout
        if key not in self.made:
            self.made[key] = torch.empty_like(
                weight.detach(), dtype=self._low, memory_format=layout
            )
        return self.made[key]


def tensors_of(model: nn.Module) -> list[Tensor]:
    """The weights and buffers of a model."""
    return [
        tensor
        for each in compat.modules_of(model)
        for place in (compat.parameters_here(each), compat.buffers_here(each))
        for tensor in place.values()
        if tensor is not None
    ]
