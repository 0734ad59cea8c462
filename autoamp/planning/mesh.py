"""A plan on a mesh: the memory, time and transfers of one device, from one rank."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from torch import Tensor, nn

from autoamp.ask.stand_in import Call
from autoamp.benchmark.step import batch_size, token_count
from autoamp.dtypes import short_name
from autoamp.errors import OptionError
from autoamp.model.eligible import parameters_of
from autoamp.place.devices import memory_of, product_of
from autoamp.planning.depth import (
    DEPTHS,
    FEWEST,
    Figures,
    Line,
    Stack,
    line_of,
    stack_of,
    whole,
    with_layers,
)
from autoamp.planning.links import (
    Link,
    Mesh,
    links_of,
    nanoseconds,
    on_the_wire,
    scaled,
)
from autoamp.planning.optimizer import Make, optimizer_cost
from autoamp.planning.ranks import Maker, as_rank, check_sizes, parallelized
from autoamp.planning.result import MeshPlan, MeshWay, Scale, Stage, Transfer
from autoamp.planning.step import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    SEND,
    Sent,
    bytes_of,
    own_part,
)
from autoamp.planning.ways import (
    AUTOAMP,
    AUTOCAST,
    FP32,
    Boundary,
    Setting,
    Tell,
    WayStep,
    steps_of,
)
from autoamp.printable import class_name

FSDP2 = "autoamp, FSDP2"
MESH_WAYS = (FP32, AUTOCAST, AUTOAMP, FSDP2)

SCALES = (8, 512, 16_000)
"""Numbers of devices that each plan is scaled to."""

LEAST_BATCHES = 4
"""Micro-batches for each stage, where none are given."""

BUCKET = 25 * 2**20
"""Bytes of a bucket of gradients, the default of DistributedDataParallel."""

GATHERED_AT_ONCE = 2
"""Layers that FSDP2 holds whole at one time: one that computes, and the next."""


class Around(NamedTuple):
    """Bytes before the layers, of one layer, and after the layers."""

    before: int
    layer: int
    after: int


@dataclass(frozen=True)
class Rank:
    """One rank of tp of the whole model.

    Attributes:
        layers: the number of layers; 0 if they are not known.
        linear: whether `steps` were extrapolated from a few layers.
        weights, trained: bytes of weights and buffers, and of the trained ones.
        state, moved: bytes of the optimizer's state, and of what a step of it moves,
            for each byte of a trained weight.
        steps: the figures of each way by the number of layers.
        boundary: what a layer gives to the next, in each way.
        rewritten: whether autoamp's graphs are rewritten.
        gathers_low: whether FSDP2 gathers weights in the compute dtype.
        low: the name of the compute dtype.
        bytes_per_ns: the bandwidth of the device's memory.
        optimizer: the class of the optimizer.
        difference: where another rank runs another op; "" if nowhere.
    """

    layers: int
    linear: bool
    weights: Around
    trained: Around
    state: float
    moved: float
    steps: dict[str, Line]
    boundary: dict[str, Boundary]
    rewritten: bool
    gathers_low: bool
    low: str
    bytes_per_ns: float
    optimizer: str = ""
    difference: str = ""


def planned_mesh(
    make: Maker,
    made: tuple[nn.Module, Call],
    mesh: Mesh,
    setting: Setting,
    *,
    device: str,
    optimizer: str | Make,
    tell: Tell,
    node: int,
    network: int,
    microbatches: int | None,
) -> MeshPlan:
    """Predicts a training step on a mesh.

    Args:
        make: makes the model and a call of it; it may parallelize the model itself, on
            the process group that is up when it is called.
        made: what `make` gave on one rank.
    """
    model, call = made
    name = class_name(model)
    check_sizes(model, mesh.tp)
    meshes = [mesh, *(scaled(mesh, count) for count in SCALES)]
    ranks: dict[int, Rank] = {}
    for tp in dict.fromkeys(each.tp for each in meshes):
        ranks[tp] = _rank(make, tp, setting, optimizer, tell)
    for each in meshes:
        _check_stages(ranks[each.tp], each.pp, name)
    tokens = token_count(call)

    def scale(each: Mesh) -> Scale:
        links = links_of(each, device, node, network)
        count = microbatches or (LEAST_BATCHES * each.pp if each.pp > 1 else 1)
        ways = tuple(way_of(ranks[each.tp], w, each, links, count) for w in MESH_WAYS)
        total = None if tokens is None else tokens * count * each.dp
        return Scale(each.devices, str(each), count, total, ways)

    here = ranks[mesh.tp]
    return MeshPlan(
        model=name,
        device=device,
        hardware=product_of(device) or setting.device.name,
        memory=memory_of(device),
        precision=short_name(setting.low),
        optimizer=here.optimizer,
        parameters=sum(p.numel() for p in parameters_of(model)),
        node=node,
        network=network,
        samples=batch_size(call),
        tokens=tokens,
        layers=here.layers,
        linear=here.linear,
        rewritten=here.rewritten,
        here=scale(mesh),
        scales=tuple(map(scale, meshes[1:])),
        notes=tuple(_notes(here, mesh)),
    )


def _notes(rank: Rank, mesh: Mesh) -> Iterator[str]:
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


# -- one rank --------------------------------------------------------------------------


def _rank(
    make: Maker, size: int, setting: Setting, optimizer: str | Make, tell: Tell
) -> Rank:
    """Rank 0 of `size`, compared with the other ranks."""
    with as_rank(0, size):
        tell(f"making rank 0 of {size}")
        model, call = make()
        parallelized(model, size)
        stack = stack_of(model)
        steps, lines, ops = _steps(model, call, setting, stack, tell)
        parameters = parameters_of(model)
        parts = [nn.Parameter(own_part(p), p.requires_grad) for p in parameters]
        cost = optimizer_cost(parts, optimizer)
    weights, trained = _weights(model, stack)
    layers = len(stack) if stack is not None else 0
    total = max(trained.before + max(layers, 1) * trained.layer + trained.after, 1)
    rewritten = steps[AUTOAMP].rewritten
    # Autoamp's graphs give results in the dtypes of the model's fp32 code.
    like = FP32 if rewritten else AUTOCAST
    boundary = {name: steps[name].boundary for name in (FP32, AUTOCAST)}
    return Rank(
        layers=layers,
        linear=lines is not None,
        weights=weights,
        trained=trained,
        state=cost.state / total,
        moved=cost.moved / total,
        steps=lines or {name: whole(step) for name, step in steps.items()},
        boundary={**boundary, AUTOAMP: boundary[like]},
        rewritten=rewritten,
        gathers_low=rewritten and size == 1,
        low=short_name(setting.low),
        bytes_per_ns=setting.device.bytes_per_ns,
        optimizer=cost.name,
        difference=_difference(make, size, setting, ops, tell),
    )


def _steps(
    model: nn.Module, call: Call, setting: Setting, stack: Stack | None, tell: Tell
) -> tuple[dict[str, WayStep], dict[str, Line] | None, list[str]]:
    """A step in each way, the lines of a few depths, and the ops for `_difference`.

    The lines are None where no depth predicts another; the step is then of all layers.
    """
    layer = None if stack is None else stack[0]
    ops: list[str] = []
    if stack is not None and len(stack) >= FEWEST:
        seen = []
        for depth in DEPTHS:
            tell(f"running a step of {depth} of {len(stack)} layers")
            with with_layers(stack, depth):
                seen.append(steps_of(model, call, setting, layer=layer))
        ops = seen[0][AUTOAMP].first.ops
        lines = {name: line_of([each[name] for each in seen]) for name in seen[0]}
        found = {name: line for name, line in lines.items() if line is not None}
        if len(found) == len(lines):
            return seen[-1], found, ops
    tell("running a step of all layers")
    steps = steps_of(model, call, setting, layer=layer)
    return steps, None, ops or steps[AUTOAMP].first.ops


def _difference(
    make: Maker, size: int, setting: Setting, first: list[str], tell: Tell
) -> str:
    """The first op in which a rank differs from rank 0; "" if there is none.

    Ranks of many layers run two of them with autoamp.
    """
    found = ""
    for number in range(1, size):
        tell(f"comparing rank {number} of {size}")
        with as_rank(number, size):
            model, call = make()
            stack = stack_of(model)
            is_deep = stack is not None and len(stack) >= FEWEST
            with with_layers(stack if is_deep else None, DEPTHS[0]):
                parallelized(model, size)
                step = steps_of(model, call, setting, names=[AUTOAMP])
        for at, (one, other) in enumerate(zip_longest(first, step[AUTOAMP].first.ops)):
            if one != other and not found:
                found = (
                    f"rank 0 and rank {number} differ in op {at}: "
                    f"{one or 'nothing'}, but {other or 'nothing'}"
                )
    return found


def _weights(model: nn.Module, stack: Stack | None) -> tuple[Around, Around]:
    """Bytes of weights and buffers around and in the layers, and of the trained."""
    inside = [] if stack is None else _tensors(stack)
    layer = [] if stack is None else _tensors(stack[0])
    ids = set(map(id, inside))
    before: list[Tensor] = []
    after: list[Tensor] = []
    met = False
    for each in _tensors(model):
        if id(each) in ids:
            met = True
        else:
            (after if met else before).append(each)
    groups = (before, layer, after)
    trained = [[each for each in group if each.requires_grad] for group in groups]
    return Around(*map(bytes_of, groups)), Around(*map(bytes_of, trained))


def _tensors(module: nn.Module) -> list[Tensor]:
    """Weights and buffers in the order of the modules that hold them."""
    found: dict[int, Tensor] = {}
    for each in module.modules():
        for tensor in (*each.parameters(recurse=False), *each.buffers(recurse=False)):
            found.setdefault(id(tensor), tensor)
    return list(found.values())


# -- one way on a mesh -----------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """The part of a model in one stage.

    Attributes:
        name: "first", "middle", "last" or "only".
        at: its number, from 0.
        layers: its layers.
        weights, trained: bytes of all its weights, and of the trained ones.
        edges: the part of `weights` that is in no layer.
        figures: one micro-batch of it.
        shards: the devices that FSDP2 shards it over; None without FSDP2.
    """

    name: str
    at: int
    layers: int
    weights: int
    trained: int
    edges: int
    figures: Figures
    shards: int | None

    @property
    def seconds(self) -> float:
        """The time in which one micro-batch is computed."""
        return (self.figures.forward + self.figures.backward) * 1e-9


def way_of(
    rank: Rank, way: str, mesh: Mesh, links: dict[str, Link], microbatches: int
) -> MeshWay:
    """One way on a mesh."""
    base = AUTOAMP if way == FSDP2 else way
    shards = mesh.dp if way == FSDP2 else None
    parts = _parts(rank, rank.steps[base], mesh.pp, shards)
    stages = tuple(_stage(rank, part, mesh, microbatches) for part in parts)
    inner = [
        _transfers("tp", part.figures.sent, mesh.tp, links["tp"], microbatches)
        for part in parts
    ]
    times = [
        part.seconds + _seconds(sent) / microbatches
        for part, sent in zip(parts, inner, strict=True)
    ]
    slow = times.index(max(times))
    part = parts[slow]
    compute, within = microbatches * part.seconds, _seconds(inner[slow])
    replicas = _between_replicas(rank, part, mesh.dp, links["dp"], microbatches)
    sends = _between_stages(rank.boundary[base], mesh.pp, links["pp"], microbatches)
    exposed = _exposed(replicas, part, microbatches)
    exposed += (mesh.pp - 1) * _seconds(sends) / microbatches
    bubble = (mesh.pp - 1) * times[slow]
    refresh = 3 * part.figures.copies if shards is None else 0
    step = (part.trained / (shards or 1) * rank.moved + refresh) / rank.bytes_per_ns
    step *= 1e-9
    return MeshWay(
        way,
        compute + within + exposed + bubble + step,
        compute,
        within,
        exposed,
        bubble,
        step,
        stages,
        (*inner[slow], *replicas, *sends),
    )


def _parts(rank: Rank, line: Line, stages: int, shards: int | None) -> list[Part]:
    """The first, a middle and the last stage of an even split of the layers.

    The first stages have one layer more where the split leaves some over.  What is
    before the layers is in the first stage.  The time and the activations of all that
    surrounds the layers count in the last, where the head is.
    """
    layers, weights, trained = max(rank.layers, 1), rank.weights, rank.trained
    names = {0: "first", stages // 2: "middle", stages - 1: "last"}
    found = []
    for at in sorted(names):
        count = layers // stages + (at < layers % stages)
        is_first, is_last = at == 0, at == stages - 1
        edges = weights.before * is_first + weights.after * is_last
        ends = trained.before * is_first + trained.after * is_last
        found.append(
            Part(
                names[at] if stages > 1 else "only",
                at,
                count,
                edges + count * weights.layer,
                ends + count * trained.layer,
                edges,
                line.at(count, edges=is_last),
                shards,
            )
        )
    return found


def _stage(rank: Rank, part: Part, mesh: Mesh, microbatches: int) -> Stage:
    """What one device of a stage holds."""
    figures, shards = part.figures, part.shards or 1
    under_way = min(mesh.pp - part.at, microbatches)
    weights = math.ceil(part.weights / shards)
    gradients = math.ceil(part.trained / shards)
    state = round(part.trained * rank.state / shards)
    # Low copies that autocast made, which each micro-batch keeps for its backward.
    of_a_batch = figures.low - figures.copies
    more = (under_way - 1) * (figures.saved + of_a_batch)
    copies = figures.low + (under_way - 1) * of_a_batch
    held = gradients + figures.again
    if part.shards is not None:
        count, layer, _ = _gathered(rank, part)
        gathered = min(GATHERED_AT_ONCE, count) * layer + part.edges
        held += gathered - figures.copies
        copies += gathered - figures.copies
    elif mesh.pp == microbatches == 1:
        held = figures.most
    return Stage(
        name=part.name,
        seconds=part.seconds,
        weights=weights,
        gradients=gradients,
        optimizer=state,
        saved=under_way * figures.saved,
        copies=copies,
        peak=weights + state + held + more,
        layers=part.layers,
    )


# -- transfers -------------------------------------------------------------------------


def _gathered(rank: Rank, part: Part) -> tuple[int, int, str]:
    """How many layers FSDP2 gathers, the bytes and the dtype of each.

    A layer is gathered low where a low copy is read; a copy stands for a weight of
    twice its bytes.  A model without known layers is gathered as one.
    """
    if not rank.linear:
        return 1, part.weights - part.edges, "fp32"
    copies = int(rank.steps[AUTOAMP].slope["copies"]) if rank.gathers_low else 0
    dtype = rank.low if copies else "fp32"
    return part.layers, rank.weights.layer - copies, dtype


def _between_replicas(
    rank: Rank, part: Part, devices: int, link: Link, microbatches: int
) -> list[Transfer]:
    """What replicas exchange in a step, by DistributedDataParallel or by FSDP2.

    DistributedDataParallel reduces gradients in fp32, in buckets.  FSDP2 gathers each
    layer for the forward and again for the backward, and reduces its gradients in fp32.
    It gathers the root once, in fp32, since the root is not resharded.
    """
    sent: Counter[Sent] = Counter()
    if devices == 1:
        return []
    if part.shards is None:
        if part.trained:
            count = math.ceil(part.trained / BUCKET)
            size = math.ceil(part.trained / count)
            sent[Sent("backward", ALL_REDUCE, "fp32", size)] = count
        return _transfers("dp", sent, devices, link, 1)
    layers, size, dtype = _gathered(rank, part)
    layer = rank.weights.layer if rank.linear else size
    for phase in ("forward", "backward"):
        sent[Sent(phase, ALL_GATHER, dtype, size)] += layers
    sent[Sent("backward", REDUCE_SCATTER, "fp32", layer)] += layers
    if part.edges:
        sent[Sent("forward", ALL_GATHER, "fp32", part.edges)] += 1
        sent[Sent("backward", REDUCE_SCATTER, "fp32", part.edges)] += 1
    return _transfers("dp", dict(sorted(sent.items())), devices, link, microbatches)


def _between_stages(
    boundary: Boundary, stages: int, link: Link, microbatches: int
) -> list[Transfer]:
    """What a stage gives to the next, and the gradient that it gives back."""
    if stages == 1:
        return []
    size, dtype = boundary
    sent = {Sent(phase, SEND, dtype, size): 1 for phase in ("forward", "backward")}
    return _transfers("pp", sent, stages, link, microbatches)


def _transfers(
    axis: str, sent: Mapping[Sent, int], devices: int, link: Link, times: int
) -> list[Transfer]:
    """What is sent in `times` micro-batches, from what is sent in one."""
    return [
        Transfer(
            axis,
            each.kind,
            each.phase,
            each.dtype,
            times * count,
            round(times * count * on_the_wire(each.kind, each.size, devices)),
            link.name,
            times * count * nanoseconds(each.kind, each.size, devices, link) * 1e-9,
        )
        for each, count in sent.items()
    ]


def _exposed(transfers: list[Transfer], part: Part, microbatches: int) -> float:
    """The time of transfers between replicas that no computation hides.

    DistributedDataParallel reduces beside the last backward.  FSDP2 gathers beside each
    forward, and gathers and reduces beside each backward.
    """
    times = 1 if part.shards is None else microbatches
    forward = _seconds(transfers, "forward") - times * part.figures.forward * 1e-9
    backward = _seconds(transfers, "backward") - times * part.figures.backward * 1e-9
    return max(0.0, forward) + max(0.0, backward)


def _seconds(transfers: list[Transfer], phase: str | None = None) -> float:
    """The time of transfers one after another, of one phase or of both."""
    return sum(each.seconds for each in transfers if phase in (None, each.phase))
