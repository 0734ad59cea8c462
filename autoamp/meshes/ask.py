"""`plan` with a mesh: the figures of each way, and of other numbers of devices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from autoamp.ask.examine import options_for
from autoamp.ask.stand_in import Call
from autoamp.benchmark.step.batch import batch_size, token_count
from autoamp.dtypes import short_name
from autoamp.errors import AutoampError, OptionError, UnsupportedModelError
from autoamp.meshes.links import NETWORK, NODE, links_of
from autoamp.meshes.one_rank import check_sizes
from autoamp.meshes.predict import WAYS, way_of
from autoamp.meshes.rank import Found, Made, check_stages, found_for
from autoamp.meshes.record import Scale
from autoamp.meshes.result import MeshPlan
from autoamp.meshes.spec import Mesh, parsed_mesh, scaled
from autoamp.meshes.ways import Setting
from autoamp.model.eligible import parameters_of, required_precision
from autoamp.place.devices import memory_of, named_device, product_of
from autoamp.planning.ask import ELSEWHERE
from autoamp.planning.named import named_model
from autoamp.planning.optimizer import Make
from autoamp.planning.progress import telling
from autoamp.printable import class_name, printable_line

SCALES = (8, 512, 16_000)
"""Numbers of devices that each plan is scaled to."""

LEAST_BATCHES = 4
"""Micro-batches for each stage, where none are given."""


def planned(
    make: Made,
    mesh: str,
    *,
    device: str | None = None,
    node: int = NODE,
    network: int = NETWORK,
    microbatches: int | None = None,
    optimizer: str | Make = "adamw",
    options: Mapping[str, Any] | None = None,
) -> MeshPlan:
    """Predicts a training step on a mesh.

    Args:
        make: makes the model and a call of it; it may parallelize the model itself, on
            the process group that is up when it is called.
        mesh: such as "dp=512,tp=8,pp=4".
        device: the device, such as "cuda:sm_90".
        node: devices of a node.
        network: gigabits a second of the network of each device.
        microbatches: micro-batches of a step.
        optimizer, options: as for `autoamp.plan`.

    Raises:
        AutoampError: the mesh does not fit the model, or the model cannot be planned.
    """
    wanted, device = parsed_mesh(mesh), device or ELSEWHERE
    if microbatches is not None and microbatches < 1:
        raise OptionError("microbatches must be a number above 0")
    links_of(wanted, device, node, network)  # says what is wrong before the long work
    model, call = make() if wanted.tp == 1 else _made_alone(make, wanted.tp)
    name = class_name(model)
    chosen = options_for(model, options)
    low, _ = required_precision(model, chosen, device)
    setting = Setting(chosen, low, named_device(device, low))
    check_sizes(model, wanted.tp)
    meshes = [wanted, *(scaled(wanted, count) for count in SCALES)]
    found: dict[int, Found] = {}
    with telling() as tell:
        for tp in dict.fromkeys(each.tp for each in meshes):
            found[tp] = _found(make, tp, setting, optimizer, tell=tell, name=name)
    for each in meshes:
        check_stages(found[each.tp], each.pp, name)

    def scale(each: Mesh) -> Scale:
        links = links_of(each, device, node, network)
        count = microbatches or (LEAST_BATCHES * each.pp if each.pp > 1 else 1)
        rank, tokens = found[each.tp].rank, token_count(call)
        ways = tuple(way_of(rank, way, each, links, count) for way in WAYS)
        total = None if tokens is None else tokens * count * each.dp
        return Scale(each.devices, str(each), count, total, ways)

    here = found[wanted.tp]
    return MeshPlan(
        model=name,
        device=device,
        hardware=product_of(device) or setting.device.name,
        memory=memory_of(device),
        precision=short_name(low),
        optimizer=here.cost.name,
        parameters=sum(p.numel() for p in parameters_of(model)),
        node=node,
        network=network,
        samples=batch_size(call),
        tokens=token_count(call),
        layers=here.rank.layers,
        linear=here.linear,
        rewritten=here.rewritten,
        here=scale(wanted),
        scales=tuple(map(scale, meshes[1:])),
        notes=tuple(_notes(here, wanted)),
    )


def _found(
    make: Made,
    tp: int,
    setting: Setting,
    optimizer: str | Make,
    *,
    tell: Callable[[str], None],
    name: str,
) -> Found:
    try:
        return found_for(make, tp, setting, optimizer, tell)
    except AutoampError:
        raise
    except Exception as error:
        said = printable_line(f"{type(error).__name__}: {error}", 300)
        raise UnsupportedModelError(
            f"a rank of {name} cannot be run on tensors without data: {said}"
        ) from error


def _made_alone(make: Made, tp: int) -> tuple[nn.Module, Call]:
    from autoamp.meshes.one_rank import as_rank

    with as_rank(0, tp):
        return make()


def _notes(found: Found, mesh: Mesh) -> Iterator[str]:
    if not found.linear:
        yield "The model was captured in all its depth: no depth predicts another."
    if found.difference:
        yield f"The ranks of tp do not run the same ops: {found.difference}."
    elif mesh.tp > 1:
        yield f"All {mesh.tp} ranks of tp run the same ops on the same shapes."
    if not found.rewritten:
        yield (
            "autoamp runs this model, or parts of it, under torch.autocast, since its "
            "graphs cannot be captured or rewritten."
        )


def maker_of_name(name: str, batch: int, sequence: int | None) -> Made:
    """Makes a model of transformers by its name."""

    def make() -> tuple[nn.Module, Call]:
        made = named_model(name, batch=batch, sequence=sequence, trains=True)
        return made.model, ((), made.kwargs)

    return make


def maker_of_module(model: nn.Module, call: Call) -> Made:
    """Makes copies of a module without data, which can be split over devices."""

    def make() -> tuple[nn.Module, Call]:
        memo: dict[int, Any] = {}
        for each in model.parameters():
            made = nn.Parameter(each.detach().to("meta"), each.requires_grad)
            memo[id(each)] = made
        for buffer in model.buffers():
            memo[id(buffer)] = buffer.to("meta")
        return copy.deepcopy(model, memo), call

    return make
