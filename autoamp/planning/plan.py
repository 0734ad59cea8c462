"""`plan`: predicts the time and the memory of a step on tensors without data."""

from __future__ import annotations

import contextlib
import copy
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, overload

import torch
from torch import nn

from autoamp.ask.examine import checked_model, options_for, refuse_options
from autoamp.ask.stand_in import Call
from autoamp.benchmark.step import batch_size, token_count
from autoamp.dtypes import short_name
from autoamp.errors import AutoampError, OptionError, UnsupportedModelError
from autoamp.inspect.report import Report
from autoamp.inspect.text import counted
from autoamp.model.eligible import parameters_of, required_precision
from autoamp.place.devices import memory_of, named_device, product_of
from autoamp.planning.links import links_of, parsed_mesh
from autoamp.planning.mesh import planned_mesh
from autoamp.planning.named import named_model
from autoamp.planning.optimizer import Make, OptimizerCost, optimizer_cost
from autoamp.planning.ranks import Maker, as_rank
from autoamp.planning.result import MeshPlan, Plan, PlannedWay
from autoamp.planning.step import bytes_of
from autoamp.planning.ways import AUTOCAST, Setting, Tell, WayStep, steps_of
from autoamp.printable import class_name, printable_line

ELSEWHERE = "cuda:sm_80"
"""The default device of a plan on a machine without a GPU."""

QUIET = 2.0
"""Seconds after which stderr tells what is being done."""


@overload
def plan(
    model: nn.Module | str,
    *args: Any,
    device: str | None = None,
    batch: int = 1,
    sequence: int | None = None,
    infer: bool = False,
    optimizer: str | Make = "adamw",
    options: Mapping[str, Any] | None = None,
    mesh: None = None,
    node: int = 8,
    network: int = 400,
    microbatches: int | None = None,
    **kwargs: Any,
) -> Plan: ...


@overload
def plan(
    model: nn.Module | str,
    *args: Any,
    device: str | None = None,
    batch: int = 1,
    sequence: int | None = None,
    infer: bool = False,
    optimizer: str | Make = "adamw",
    options: Mapping[str, Any] | None = None,
    mesh: str,
    node: int = 8,
    network: int = 400,
    microbatches: int | None = None,
    **kwargs: Any,
) -> MeshPlan: ...


def plan(
    model: nn.Module | str,
    *args: Any,
    device: str | None = None,
    batch: int = 1,
    sequence: int | None = None,
    infer: bool = False,
    optimizer: str | Make = "adamw",
    options: Mapping[str, Any] | None = None,
    mesh: str | None = None,
    node: int = 8,
    network: int = 400,
    microbatches: int | None = None,
    **kwargs: Any,
) -> Plan | MeshPlan:
    """Predicts time and peak memory of a step in fp32, autocast and autoamp.

    No weights are needed and nothing is downloaded: a model may be named, or stand on
    the meta device.  Memory is counted by running the step on tensors that hold no
    data; times are the predictions of `autoamp.explain`.

    Args:
        model: a `torch.nn.Module`, which is not changed, or the name of one: a
            configuration of transformers with literal arguments, such as
            "transformers:LlamaConfig(num_hidden_layers=8)"; a type of model, such as
            "transformers:gpt2"; or the path of a config.json of Hugging Face.
        *args: the arguments of a call, where the model is a module.
        device: the device to plan for, as for `autoamp.explain`; by default the GPU of
            this machine, and "cuda:sm_80" where there is none.
        batch: samples of a step of a named model.
        sequence: tokens of a sample of a named model; by default as many as the model
            takes, at most 1,024.
        infer: whether a step is a call in eval mode without gradients.
        optimizer: "adamw", "sgd" (with momentum), "none", or a function that makes an
            optimizer of a list of parameters.
        options: keyword arguments of `convert`, such as `{"precision": "bf16"}`.
        mesh: many devices, such as "dp=512,tp=8,pp=4": replicas, devices that share
            each layer, and stages; `batch` is then a micro-batch of one replica.  The
            layers of a model of transformers are split by the plan of its class.
        node: devices of a node of a mesh.
        network: gigabits a second of the network of each device of a mesh.
        microbatches: micro-batches of a step on a mesh; by default four for each stage.
        **kwargs: keyword arguments of the call.

    Returns:
        The figures in bytes and seconds, on a mesh those of one device; `print(plan)`
        shows them as a table, and `plan.to_json()` writes them.

    Raises:
        AutoampError: the model, the device or an option cannot be used; a model that
            reads a value of a tensor cannot be planned.

    Example:
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(4096, 4096)
        >>> found = autoamp.plan(model, torch.empty(512, 4096), device="cuda:sm_80")
        >>> found.way("fp32").weights, found.way("fp32").optimizer
        (67125248, 134250504)
    """
    refuse_options("plan", model, kwargs)
    if isinstance(model, str):
        if args or kwargs:
            raise OptionError(
                "plan() makes the arguments of a named model itself; give none"
            )
        make = maker_of_name(model, batch, sequence, trains=not infer)
    else:
        make = _maker_of_module(checked_model(model), (args, dict(kwargs)), mesh)
    if batch < 1 or (sequence is not None and sequence < 1):
        raise OptionError("batch and sequence must be numbers above 0")
    return plan_of(
        make,
        device=device,
        infer=infer,
        optimizer=optimizer,
        options=options,
        mesh=mesh,
        node=node,
        network=network,
        microbatches=microbatches,
    )


def maker_of_name(
    name: str, batch: int, sequence: int | None, *, trains: bool
) -> Maker:
    """Makes a model of transformers by its name."""

    def make() -> tuple[nn.Module, Call]:
        made = named_model(name, batch=batch, sequence=sequence, trains=trains)
        return made.model, ((), made.kwargs)

    return make


def _maker_of_module(model: nn.Module, call: Call, mesh: str | None) -> Maker:
    """Gives the module, or on a mesh copies without data, which can be split."""

    def make() -> tuple[nn.Module, Call]:
        if mesh is None:
            return model, call
        memo: dict[int, Any] = {}
        for each in model.parameters():
            made = nn.Parameter(each.detach().to("meta"), each.requires_grad)
            memo[id(each)] = made
        for buffer in model.buffers():
            memo[id(buffer)] = buffer.to("meta")
        return copy.deepcopy(model, memo), call

    return make


def plan_of(
    make: Maker,
    *,
    device: str | None = None,
    infer: bool = False,
    optimizer: str | Make = "adamw",
    options: Mapping[str, Any] | None = None,
    mesh: str | None = None,
    node: int = 8,
    network: int = 400,
    microbatches: int | None = None,
) -> Plan | MeshPlan:
    """Predicts a step of what `make` gives; the arguments are those of `plan`."""
    if mesh is None:
        device = device or ("cuda" if torch.cuda.is_available() else ELSEWHERE)
        with _telling() as tell:
            tell("making the model")
            model, call = make()
            setting = _setting(model, options, device, infer=infer)
            cost = optimizer_cost(parameters_of(model), "none" if infer else optimizer)
            with _named_errors(class_name(model)):
                steps = steps_of(model, call, setting, tell=tell)
        return _plan(model, call, setting, steps, device=device, cost=cost)
    if infer:
        raise OptionError("a mesh is planned for training steps; leave out infer")
    if microbatches is not None and microbatches < 1:
        raise OptionError("microbatches must be a number above 0")
    wanted, device = parsed_mesh(mesh), device or ELSEWHERE
    links_of(wanted, device, node, network)  # says what is wrong before the long work
    with _telling() as tell:
        with as_rank(0, wanted.tp):
            made = make()
        setting = _setting(made[0], options, device, on_mesh=True)
        with _named_errors(f"a rank of {class_name(made[0])}"):
            return planned_mesh(
                make,
                made,
                wanted,
                setting,
                device=device,
                optimizer=optimizer,
                tell=tell,
                node=node,
                network=network,
                microbatches=microbatches,
            )


def _setting(
    model: nn.Module,
    given: Mapping[str, Any] | None,
    device: str,
    *,
    infer: bool = False,
    on_mesh: bool = False,
) -> Setting:
    options = options_for(checked_model(model), given)
    low, _ = required_precision(model, options, device)
    return Setting(options, low, named_device(device, low), not infer, on_mesh)


@contextlib.contextmanager
def _named_errors(name: str) -> Iterator[None]:
    """Says that a model cannot be planned, where it raises an error of its own."""
    try:
        yield
    except AutoampError:
        raise
    except Exception as error:
        said = printable_line(f"{type(error).__name__}: {error}", 300)
        raise UnsupportedModelError(
            f"{name} cannot be run on tensors without data: {said}. A model that reads "
            "a tensor's value cannot be planned. If the inputs are wrong, give a model "
            "and the arguments of its call, or MODULE:FACTORY on the command line"
        ) from error


def _plan(
    model: nn.Module,
    call: Call,
    setting: Setting,
    steps: Mapping[str, WayStep],
    *,
    device: str,
    cost: OptimizerCost,
) -> Plan:
    parameters = parameters_of(model)
    report = next(step.report for step in steps.values() if step.report is not None)
    weights = bytes_of([parameters, list(model.buffers())])
    trained = [p for p in parameters if p.requires_grad] if setting.trains else []
    times = report.headline
    seconds = (times.seconds_fp32, times.seconds_autocast, times.seconds)
    ways = []
    for (name, step), told in zip(steps.items(), seconds, strict=True):
        # A weight's cast reads 4 bytes and writes 2 for each element: under autocast at
        # every call, with autoamp after every step.  The times of `explain` leave these
        # casts out.
        casts = 3 * step.first.low if setting.trains or name == AUTOCAST else 0
        more = (cost.moved + casts) / setting.device.bytes_per_ns * 1e-9
        ways.append(
            PlannedWay(
                name=name,
                seconds=None if told is None else told + more,
                weights=weights,
                gradients=bytes_of(trained),
                optimizer=cost.state,
                saved=step.first.saved,
                copies=step.first.low,
                peak=weights + cost.state + step.first.most,
            )
        )
    return Plan(
        model=class_name(model),
        device=device,
        hardware=product_of(device) or setting.device.name,
        memory=memory_of(device),
        precision=short_name(setting.low),
        trains=setting.trains,
        optimizer=cost.name,
        parameters=sum(p.numel() for p in parameters),
        samples=batch_size(call),
        tokens=token_count(call),
        graphs=len(report.graphs),
        ways=tuple(ways),
        notes=tuple(_notes(report)),
    )


def _notes(report: Report) -> Iterator[str]:
    left = [what for what, why in report.skipped if not what.startswith("graph ")]
    if left:
        yield (
            f"{counted(len(left), 'part')} of the model cannot be captured and does "
            "not count in the predicted time: autoamp.explain names the lines."
        )
    if not report.graphs:
        yield "No graph was captured, so no time is predicted."


@contextlib.contextmanager
def _telling() -> Iterator[Tell]:
    """Yields a function that says on stderr what is being done, if work takes long."""
    start = time.monotonic()

    def tell(doing: str) -> None:
        if time.monotonic() - start > QUIET:
            sys.stderr.write(f"autoamp plan: {doing} ...\n")
            sys.stderr.flush()

    yield tell
