"""`plan`: predicts the time and the memory of a step on tensors without data."""

from __future__ import annotations

import contextlib
import copy
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Unpack, overload

import torch
from torch import nn

from autoamp.dtypes import short_name
from autoamp.errors import AutoampError, OptionError, UnsupportedModelError
from autoamp.messages import class_name, counted
from autoamp.passes.decide.devices import full_name, memory_of, named_device, product_of
from autoamp.report.report import Report
from autoamp.runtime.eligible import parameters_of, required_precision
from autoamp.runtime.examine import call_keywords, checked_model, options_for
from autoamp.runtime.stand_in import Call
from autoamp.tools.bench_step import batch_size, token_count
from autoamp.tools.named import made_by, refuse_below_one
from autoamp.tools.plan_mesh import (
    MESH_WAYS,
    Mesh,
    links_of,
    parsed_mesh,
    scaled,
    way_of,
)
from autoamp.tools.plan_ranks import FEWEST, Maker, Rank, as_rank, rank_of
from autoamp.tools.plan_result import MeshPlan, Plan, PlannedWay, Scale
from autoamp.tools.plan_step import (
    Make,
    OptimizerCost,
    OptimizerName,
    bytes_of,
    optimizer_cost,
    said_by,
)
from autoamp.tools.plan_ways import AUTOCAST, Setting, Tell, WayStep, steps_of
from autoamp.training.options import ConvertOptions

ELSEWHERE = "cuda:sm_80"
"""The default device of a plan on a machine without a GPU."""

QUIET = 2.0
"""Seconds after which stderr tells what is being done."""

SCALES = (8, 512, 16_000)
"""Numbers of devices that each plan on a mesh is scaled to."""

LEAST_BATCHES = 4
"""Micro-batches for each stage, where none are given."""


class _PlanOptions(ConvertOptions, total=False):
    kwargs: Mapping[str, Any] | None
    device: str | None
    batch: int | None
    sequence: int | None
    inference: bool
    optimizer: OptimizerName | Make
    node: int
    network: int
    microbatches: int | None


@overload
def plan(
    model: nn.Module | str,
    *args: Any,
    mesh: None = None,
    **asked: Unpack[_PlanOptions],
) -> Plan: ...


@overload
def plan(
    model: nn.Module | str, *args: Any, mesh: str, **asked: Unpack[_PlanOptions]
) -> MeshPlan: ...


def plan(
    model: nn.Module | str,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    device: str | None = None,
    batch: int | None = None,
    sequence: int | None = None,
    inference: bool = False,
    optimizer: OptimizerName | Make = "adamw",
    mesh: str | None = None,
    node: int = 8,
    network: int = 400,
    microbatches: int | None = None,
    **options: Unpack[ConvertOptions],
) -> Plan | MeshPlan:
    """Predicts time and peak memory of a step in fp32, autocast and autoamp.

    No weights are needed and nothing is downloaded: a model may be named, or stand on
    the meta device.  Memory is counted by running the step on tensors that hold no
    data; times are the predictions of `autoamp.explain`.

    Args:
        model: a `torch.nn.Module`, which is not changed, or the name of one: a
            configuration of transformers with literal arguments, such as
            "transformers:LlamaConfig(num_hidden_layers=8)"; a type of model, such as
            "transformers:gpt2"; the path of a config.json of Hugging Face; or that of a
            function that returns (model, args), "pkg.module:f" or "file.py:f".
        *args, kwargs: the arguments of a call, where the model is a module.
        device: the device to plan for, as for `autoamp.explain` ("h100", "rtx4090"); by
            default the GPU of this machine, and "cuda:sm_80" where there is none.
        batch: samples of a step of a model of transformers; by default 1.
        sequence: tokens of a sample of a model of transformers; by default as many as
            the model takes, at most 1,024.
        inference: whether a step is a call in eval mode without gradients.
        optimizer: "adamw", "sgd" (with momentum), "none", or a function that makes an
            optimizer of a list of parameters.
        mesh: many devices, such as "dp=512,tp=8,pp=4": replicas, devices that share
            each layer, and stages; `batch` is then a micro-batch of one replica.  The
            layers of a model of transformers are split by the plan of its class.
        node: devices of a node of a mesh.
        network: gigabits a second of the network of each device of a mesh.
        microbatches: micro-batches of a step on a mesh; by default four for each stage.
        **options: as for `convert`; they are added to the options of a converted
            model.

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
    named = call_keywords("plan", kwargs, options)
    if isinstance(model, str):
        if args or named:
            raise OptionError(
                "plan() makes the arguments of a named model itself; give none"
            )
        make = partial(_named, model, batch, sequence, not inference)
    else:
        make = partial(_given, checked_model(model), (args, named), mesh)
    refuse_below_one(batch=batch, sequence=sequence)
    asked = Asked(
        device, inference, optimizer, options, mesh, node, network, microbatches
    )
    return plan_of(make, asked)


def _named(
    name: str, batch: int | None, sequence: int | None, trains: bool
) -> tuple[nn.Module, Call]:
    with torch.device("meta"):  # a factory is called as if it had no data
        made = made_by(name, batch=batch, sequence=sequence, trains=trains, meta=True)
    return made.model, (made.args, made.kwargs)


def _given(model: nn.Module, call: Call, mesh: str | None) -> tuple[nn.Module, Call]:
    """The module, or on a mesh a copy without data, which can be split."""
    if mesh is None:
        return model, call
    memo: dict[int, Any] = {}
    for each in model.parameters():
        made = nn.Parameter(each.detach().to("meta"), each.requires_grad)
        memo[id(each)] = made
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(model, memo), call


class Asked(NamedTuple):
    """The arguments of `plan` that are not about the model."""

    device: str | None = None
    infer: bool = False
    optimizer: str | Make = "adamw"
    options: Mapping[str, Any] | None = None
    mesh: str | None = None
    node: int = 8
    network: int = 400
    microbatches: int | None = None


def plan_of(make: Maker, asked: Asked) -> Plan | MeshPlan:
    """Predicts a step of the model and the call that `make` gives."""
    with _telling() as tell:
        if asked.mesh is None:
            return _on_one_device(make, asked, tell)
        return _on_a_mesh(make, asked, parsed_mesh(asked.mesh), tell)


def _setting(
    model: nn.Module, asked: Asked, device: str, *, on_mesh: bool = False
) -> Setting:
    options = options_for(checked_model(model), asked.options)
    low, _ = required_precision(model, options, device)
    return Setting(options, low, named_device(device, low), not asked.infer, on_mesh)


def _facts(
    model: nn.Module, call: Call, setting: Setting, device: str, optimizer: str
) -> dict[str, Any]:
    """The facts that every plan tells."""
    return {
        "model": class_name(model),
        "device": device,
        "hardware": product_of(device) or setting.device.name,
        "memory": memory_of(device),
        "precision": short_name(setting.low),
        "optimizer": optimizer,
        "parameters": sum(p.numel() for p in parameters_of(model)),
        "samples": batch_size(call),
        "tokens": token_count(call),
    }


@contextlib.contextmanager
def _named_errors(name: str) -> Iterator[None]:
    """Says that a model cannot be planned, where it raises an error of its own."""
    try:
        yield
    except AutoampError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{name} cannot be run on tensors without data: {said_by(error)}. A model "
            "that reads a tensor's value cannot be planned. If the inputs are wrong, "
            "give a model and the arguments of its call, or MODULE:FACTORY on the "
            "command line"
        ) from error


@contextlib.contextmanager
def _telling() -> Iterator[Tell]:
    """Yields a function that says on stderr what is being done, if work takes long."""
    start = time.monotonic()

    def tell(doing: str) -> None:
        if time.monotonic() - start > QUIET:
            sys.stderr.write(f"autoamp plan: {doing} ...\n")
            sys.stderr.flush()

    yield tell


# -- one device ------------------------------------------------------------------------


def _on_one_device(make: Maker, asked: Asked, tell: Tell) -> Plan:
    here = "cuda" if torch.cuda.is_available() else ELSEWHERE
    device = full_name(asked.device or here)
    tell("making the model")
    model, call = make()
    setting = _setting(model, asked, device)
    optimizer = "none" if asked.infer else asked.optimizer
    cost = optimizer_cost(parameters_of(model), optimizer)
    with _named_errors(class_name(model)):
        steps = steps_of(model, call, setting, tell=tell)
    report = next(step.report for step in steps.values() if step.report is not None)
    return Plan(
        **_facts(model, call, setting, device, cost.name),
        trains=setting.trains,
        graphs=len(report.graphs),
        ways=tuple(_ways(model, setting, steps, report, cost)),
        notes=tuple(_notes(report)),
    )


def _ways(
    model: nn.Module,
    setting: Setting,
    steps: Mapping[str, WayStep],
    report: Report,
    cost: OptimizerCost,
) -> Iterator[PlannedWay]:
    parameters, times = parameters_of(model), report.headline
    weights = bytes_of([parameters, list(model.buffers())])
    trained = [p for p in parameters if p.requires_grad] if setting.trains else []
    seconds = (times.seconds_fp32, times.seconds_autocast, times.seconds)
    for (name, step), told in zip(steps.items(), seconds, strict=True):
        # A weight's cast reads 4 bytes and writes 2 for each element: under autocast at
        # every call, with autoamp after every step.  The times of `explain` leave these
        # casts out.
        casts = 3 * step.first.low if setting.trains or name == AUTOCAST else 0
        more = (cost.moved + casts) / setting.device.bytes_per_ns * 1e-9
        yield PlannedWay(
            name=name,
            seconds=None if told is None else told + more,
            weights=weights,
            gradients=bytes_of(trained),
            optimizer=cost.state,
            saved=step.first.saved,
            copies=step.first.low,
            peak=weights + cost.state + step.first.most,
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


# -- a mesh ----------------------------------------------------------------------------


def _on_a_mesh(make: Maker, asked: Asked, mesh: Mesh, tell: Tell) -> MeshPlan:
    if asked.infer:
        raise OptionError("a mesh is planned for training steps; leave out infer")
    if asked.microbatches is not None and asked.microbatches < 1:
        raise OptionError("microbatches must be a number above 0")
    device, node = full_name(asked.device or ELSEWHERE), asked.node
    network = asked.network
    links_of(mesh, device, node, network)  # says what is wrong before the long work
    with as_rank(0, mesh.tp):
        model, call = make()
    setting, name = _setting(model, asked, device, on_mesh=True), class_name(model)
    meshes = [mesh, *(scaled(mesh, count) for count in SCALES)]
    with _named_errors(f"a rank of {name}"):
        ranks = {
            tp: rank_of(make, tp, setting, asked.optimizer, tell)
            for tp in dict.fromkeys(each.tp for each in meshes)
        }
    facts = _facts(model, call, setting, device, ranks[mesh.tp].optimizer)

    def scale(each: Mesh) -> Scale:
        rank, links = ranks[each.tp], links_of(each, device, node, network)
        _check_stages(rank, each.pp, name)
        least = LEAST_BATCHES * each.pp if each.pp > 1 else 1
        count = asked.microbatches or least
        total = None if facts["tokens"] is None else facts["tokens"] * count * each.dp
        ways = tuple(way_of(rank, way, each, links, count) for way in MESH_WAYS)
        return Scale(each.devices, str(each), count, total, ways)

    here, *others = map(scale, meshes)
    rank = ranks[mesh.tp]
    return MeshPlan(
        **facts,
        node=node,
        network=network,
        layers=rank.layers,
        linear=rank.linear,
        rewritten=rank.rewritten,
        here=here,
        scales=tuple(others),
        notes=tuple(_notes_on(rank, mesh)),
    )


def _check_stages(rank: Rank, stages: int, name: str) -> None:
    if stages > 1 and not rank.linear:
        raise OptionError(
            f"pp={stages}: the layers of {name} are not alike, or fewer than {FEWEST}, "
            "so that no stages can be made of them; give pp=1"
        )
    if stages > max(rank.layers, 1):
        raise OptionError(
            f"pp={stages} is more than the {rank.layers} layers of {name}; give at "
            f"most pp={rank.layers}"
        )


def _notes_on(rank: Rank, mesh: Mesh) -> Iterator[str]:
    if not rank.linear:
        yield "The model was captured in all its depth: no depth predicts another."
    if rank.difference:
        yield f"The ranks of tp do not run the same ops: {rank.difference}."
    elif mesh.tp > 1:
        yield f"All {mesh.tp} ranks of tp run the same ops on the same shapes."
    if not rank.rewritten:
        yield (
            "autoamp runs this model, or parts of it, under torch.autocast, since its "
            "graphs cannot be captured or rewritten."
        )
