"""`explain`: reports what `convert` would do, on this machine or on another device.

A stand-in of the model is captured like a converted model.  The captured graphs go
through the pass, and the call runs the graphs as they were captured, in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from autoamp.messages import class_name
from autoamp.passes.decide.devices import device_of, named_device
from autoamp.reports.report import Report
from autoamp.reports.reporting import report_of
from autoamp.runtime.eligible import choose_precision, home_of
from autoamp.runtime.examine import (
    checked_model,
    examined,
    on_the_models_device,
    without_data,
)
from autoamp.runtime.module_state import capture_now
from autoamp.tools.named import given
from autoamp.tools.step_memory import memory_of_step
from autoamp.training.options import Options


def explain_model(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Options,
    device: str | None = None,
) -> Report:
    """The report on what `convert` would do to `model`; see `autoamp.explain`.

    Args:
        args, kwargs: the arguments of one call.
        device: the device to explain for, as for `named_device`; by default the
            device of the model.

    Raises:
        UnsupportedModelError: `model` is not a module, or cannot be captured.
        OptionError: `device` is unknown.
    """
    made = given("explain", model, args, kwargs, meta=True)
    args, kwargs = made.args, made.kwargs
    model = checked_model(made.model, needs_data=False)
    if device is None and without_data(model):
        device = home_of(model).type
    low, why_not = choose_precision(model, options, device)
    label = class_name(model)
    if low is None:
        return Report(label, (), (), [(label, why_not)])
    args, kwargs = on_the_models_device(model, (args, dict(kwargs)))
    asked = None if device is None else named_device(device, low)
    with examined(model, options, low, asked) as (twin, engine):
        capture_now(twin, args, kwargs, weights=True)
    # Dynamo may begin a frame anew after it has captured a graph, which never runs.
    graphs = engine.record.graphs
    graphs[:] = [each for each in graphs if each.runs] or graphs
    report = report_of(
        engine.record, model, (asked or device_of(home_of(model), low)).name
    )
    return replace(report, memory=memory_of_step(model, report))
