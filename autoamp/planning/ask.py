"""`plan`: predicts the time and the memory of a step on tensors without data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from autoamp.ask.examine import checked_model, options_for, refuse_options
from autoamp.ask.stand_in import Call
from autoamp.benchmark.step.batch import batch_size, token_count
from autoamp.dtypes import short_name
from autoamp.errors import AutoampError, OptionError, UnsupportedModelError
from autoamp.inspect.report import Report
from autoamp.inspect.text import counted
from autoamp.model.eligible import parameters_of, required_precision
from autoamp.place.devices import memory_of, named_device, product_of
from autoamp.planning.fakes import bytes_of
from autoamp.planning.memory import StepMemory
from autoamp.planning.named import named_model
from autoamp.planning.optimizer import Make, OptimizerCost, optimizer_cost
from autoamp.planning.progress import telling
from autoamp.planning.record import PlannedWay
from autoamp.planning.result import Plan
from autoamp.planning.ways import AUTOAMP, AUTOCAST, FP32, memory_of_ways
from autoamp.printable import class_name, printable_line

ELSEWHERE = "cuda:sm_80"
"""The default device of a plan on a machine without a GPU."""


def plan(
    model: nn.Module | str,
    *args: Any,
    device: str | None = None,
    batch: int = 1,
    sequence: int | None = None,
    infer: bool = False,
    optimizer: str | Make = "adamw",
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Plan:
    """Predicts a step on one device; the arguments are those of `autoamp.plan`.

    Raises:
        AutoampError: the model, the device or an option cannot be used.
    """
    if batch < 1 or (sequence is not None and sequence < 1):
        raise OptionError("batch and sequence must be numbers above 0")
    with telling() as tell:
        if isinstance(model, str):
            if args or kwargs:
                raise OptionError(
                    "plan() makes the arguments of a named model itself; give none"
                )
            tell(f"making {model}")
            made = named_model(model, batch=batch, sequence=sequence, trains=not infer)
            model, args, kwargs = made.model, (), made.kwargs
        refuse_options("plan", model, kwargs)
        name = device or ("cuda" if torch.cuda.is_available() else ELSEWHERE)
        cost = optimizer_cost(parameters_of(model), "none" if infer else optimizer)
        return _planned(
            model,
            (args, dict(kwargs)),
            name,
            cost,
            options,
            trains=not infer,
            tell=tell,
        )


def _planned(
    model: nn.Module,
    call: Call,
    device: str,
    cost: OptimizerCost,
    given: Mapping[str, Any] | None,
    *,
    trains: bool,
    tell: Any,
) -> Plan:
    model = checked_model(model)
    options = options_for(model, given)
    low, _ = required_precision(model, options, device)
    asked = named_device(device, low)
    parameters = parameters_of(model)
    try:
        memory, report = memory_of_ways(
            model, call, options, low, asked, trains=trains, tell=tell
        )
    except AutoampError:
        raise
    except Exception as error:
        said = printable_line(f"{type(error).__name__}: {error}", 300)
        raise UnsupportedModelError(
            f"{class_name(model)} cannot be run on tensors without data: {said}. A "
            "model that reads a tensor's value cannot be planned. If the inputs are "
            "wrong, give a model and the arguments of its call, or MODULE:FACTORY on "
            "the command line"
        ) from error
    ways = _ways(model, memory, report, cost, asked.bytes_per_ns, trains=trains)
    return Plan(
        model=class_name(model),
        device=device,
        hardware=product_of(device) or asked.name,
        memory=memory_of(device),
        precision=short_name(low),
        trains=trains,
        optimizer=cost.name,
        parameters=sum(p.numel() for p in parameters),
        samples=batch_size(call),
        tokens=token_count(call),
        graphs=len(report.graphs),
        ways=ways,
        notes=tuple(_notes(report)),
    )


def _ways(
    model: nn.Module,
    memory: Mapping[str, StepMemory],
    report: Report,
    cost: OptimizerCost,
    bytes_per_ns: float,
    *,
    trains: bool,
) -> tuple[PlannedWay, ...]:
    parameters = parameters_of(model)
    weights = bytes_of([parameters, list(model.buffers())])
    gradients = bytes_of([p for p in parameters if p.requires_grad]) if trains else 0
    seconds = _seconds(report)
    ways = []
    for name, each in memory.items():
        # A weight's cast reads 4 bytes and writes 2 for each element: under autocast at
        # every call, with autoamp after every step.  The times of `explain` leave these
        # casts out.
        casts = 3 * each.copies if trains or name == AUTOCAST else 0
        told = seconds[name]
        more = (cost.moved + casts) / bytes_per_ns * 1e-9
        ways.append(
            PlannedWay(
                name=name,
                seconds=None if told is None else told + more,
                weights=weights,
                gradients=gradients,
                optimizer=cost.state,
                saved=each.saved,
                copies=each.copies,
                peak=weights + cost.state + each.most,
            )
        )
    return tuple(ways)


def _seconds(report: Report) -> dict[str, float | None]:
    """The predicted times of forward and backward; None if no graph was captured."""
    found = report.headline
    times = (found.seconds_fp32, found.seconds_autocast, found.seconds)
    return dict(zip((FP32, AUTOCAST, AUTOAMP), times, strict=True))


def _notes(report: Report) -> Iterator[str]:
    left = [what for what, why in report.skipped if not what.startswith("graph ")]
    if left:
        yield (
            f"{counted(len(left), 'part')} of the model cannot be captured and does "
            "not count in the predicted time: autoamp.explain names the lines."
        )
    if not report.graphs:
        yield "No graph was captured, so no time is predicted."
