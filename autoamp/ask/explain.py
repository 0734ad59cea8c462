"""`explain`: the report of what `convert` would do, for this machine or another one.

A stand-in of the model, which shares the model's modules and weights, is captured as a
converted model is.  The captured graphs go through the pass, and the call runs the
graphs as they were captured, in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autoamp.capture.captured import CapturedGraph, Prepared
from autoamp.capture.engine import Engine
from autoamp.capture.prepare import as_it_is
from autoamp.capture.record import Record
from autoamp.errors import UnsupportedModelError
from autoamp.inspect.report import Report
from autoamp.loss_scale import resolve_loss_scale
from autoamp.model.calls import CompiledCall
from autoamp.model.conversion import conversion_of, inside_wrappers, without_ours
from autoamp.model.eligible import choose_precision, parameters_of, unsupported
from autoamp.model.forward import forward_of
from autoamp.model.installed import install
from autoamp.model.reporting import report_of
from autoamp.model.warmup import capture_now
from autoamp.optimizer.meeting import new_scaling, stop_meeting
from autoamp.options import Options
from autoamp.place.devices import device_of, named_device
from autoamp.plain import class_name


def explain_model(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Options,
    device: str | None = None,
) -> Report:
    """The report of what `convert` would do to `model`; see `autoamp.explain`.

    Args:
        args, kwargs: the arguments of one call.
        device: the device to explain for, as for `named_device`; by default the
            device of the model.

    Raises:
        UnsupportedModelError: `model` is not a module, or cannot be captured.
        OptionError: `device` is unknown.
    """
    model = inside_wrappers(model)
    reason = unsupported(model, needs_data=False)
    if reason is not None:
        raise UnsupportedModelError(reason)
    label = class_name(model)
    on_meta = any(parameter.is_meta for parameter in parameters_of(model))
    if device is None and on_meta:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    low, why_not = choose_precision(model, options, device)
    if low is None:
        return Report(label, (), (), [(label, why_not)])
    if on_meta:
        args, kwargs = pytree.tree_map_only(torch.Tensor, _as_meta, (args, kwargs))
    twin = _twin(model)
    state = install(twin)
    scale = resolve_loss_scale(options.loss_scale, low)
    scaling = new_scaling(options, scale, label)
    try:
        engine = _Examiner(
            options.replace(backend="eager"), Record(label, low, scaling)
        )
        engine.device = None if device is None else named_device(device, low)
        method = forward_of(type(twin), state.previous is None)
        # No graphs are shared with models alike: those graphs are for their own device.
        state.call = CompiledCall(method._replace(shared=None), engine)
        capture_now(twin, args, kwargs)
    finally:
        stop_meeting(scaling)
    return report_of(engine.record, model, _where(engine, model))


def options_for(model: nn.Module, given: Mapping[str, Any] | None) -> Options:
    """The options given, over those of the model's own conversion where it has one."""
    state = conversion_of(model)
    own = state.options if state is not None else None
    return (own or Options()).replace(**(given or {}))


def _where(engine: Engine, model: nn.Module) -> str:
    """The device that the report is for, with its model where the table has one."""
    if engine.device is not None:
        return engine.device.name
    parameters = parameters_of(model)
    device = parameters[0].device if parameters else torch.device("cpu")
    return device_of(device, engine.record.low).name


def _twin(model: nn.Module) -> nn.Module:
    """A module of the same class with the same children, weights and attributes."""
    twin = type(model).__new__(type(model))
    twin.__dict__.update(without_ours(model.__dict__, model))
    return twin


def _as_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


@dataclass(eq=False)
class _Examiner(Engine):
    """Has graphs rewritten for the record, and runs them as they were captured."""

    _plain: dict[Prepared, Callable[..., Any]] = field(default_factory=dict)

    def prepared(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Prepared:
        found = super().prepared(gm, example_inputs)
        # Only now, because it has the bodies in `gm` run as Python does.
        self._plain[found] = as_it_is(gm, example_inputs, self.options, "").run
        return found

    def _bind(self, prepared: Prepared, _: Sequence[Any]) -> Callable[..., Any]:
        for why in prepared.notes:
            self.record.note(why)
        captured = CapturedGraph(prepared)
        self.record.add(captured)

        def call(*args: Any) -> Any:
            self.local.runs += 1
            self.local.rewritten += prepared.rewritten is not None
            captured.runs += 1
            return self._plain[prepared](*args)

        return call
