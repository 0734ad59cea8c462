"""Memory and time of each way on a mesh, of the figures of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoamp.meshes import collectives
from autoamp.meshes.collectives import Sharded, Transfer, seconds_of
from autoamp.meshes.lines import Figures, Line
from autoamp.meshes.links import Link
from autoamp.meshes.record import MeshWay, Stage
from autoamp.meshes.spec import Mesh
from autoamp.planning.ways import AUTOAMP, AUTOCAST, FP32

SHARDED = "autoamp, FSDP2"
WAYS = (FP32, AUTOCAST, AUTOAMP, SHARDED)

GATHERED_AT_ONCE = 2
"""Layers that FSDP2 holds whole at one time: one that computes, and the next."""


@dataclass(frozen=True)
class Weights:
    """Bytes of weights on one rank of tp, with buffers.

    Attributes:
        before, layer, after: of what comes before the layers, of one, and after them.
        trained: the trained part of each of these three.
        state, moved: bytes of the optimizer's state, and of what a step of it moves,
            for each byte of a trained weight.
    """

    before: int
    layer: int
    after: int
    trained: tuple[int, int, int]
    state: float
    moved: float


@dataclass(frozen=True)
class Rank:
    """One rank of tp of the whole model.

    Attributes:
        layers: the number of layers; 0 if they are not known.
        weights: its weights.
        steps: for each way its line, or its figures where it was captured whole.
        boundary: for each way bytes and dtype of what a layer gives to the next.
        gathers_low: whether FSDP2 gathers weights low.
        low: the name of the compute dtype.
        bytes_per_ns: the bandwidth of the device's memory.
    """

    layers: int
    weights: Weights
    steps: dict[str, Line | Figures]
    boundary: dict[str, tuple[int, str]]
    gathers_low: bool
    low: str
    bytes_per_ns: float


@dataclass(frozen=True)
class Part:
    """One stage.

    Attributes:
        name: "first", "middle", "last" or "only".
        at: its number, from 0.
        layers: its layers.
        weights, trained: bytes of all its weights, and of the trained ones.
        edges: the part of `weights` that is in no layer.
        figures: one micro-batch of it.
    """

    name: str
    at: int
    layers: int
    weights: int
    trained: int
    edges: int
    figures: Figures


def parts_of(rank: Rank, way: str, stages: int) -> list[Part]:
    """The first, a middle and the last stage of an even split of the layers.

    The first stages have one layer more where the split leaves some over.  What is
    before the layers is in the first stage.  The time and the activations of all that
    surrounds the layers count in the last, where the head is.
    """
    step, w = rank.steps[way], rank.weights
    if stages == 1:
        figures = step.at(rank.layers) if isinstance(step, Line) else step
        count = max(rank.layers, 1)
        held = w.before + count * w.layer + w.after
        trained = w.trained[0] + count * w.trained[1] + w.trained[2]
        edges = w.before + w.after
        return [Part("only", 0, count, held, trained, edges, figures)]
    assert isinstance(step, Line), "stages are made of layers that are alike"
    names = {0: "first", stages // 2: "middle", stages - 1: "last"}
    found = []
    for at in sorted({0, stages // 2, stages - 1}):
        count = rank.layers // stages + (at < rank.layers % stages)
        is_first, is_last = at == 0, at == stages - 1
        edges = w.before * is_first + w.after * is_last
        ends = w.trained[0] * is_first + w.trained[2] * is_last
        found.append(
            Part(
                names[at],
                at,
                count,
                edges + count * w.layer,
                ends + count * w.trained[1],
                edges,
                step.at(count, edges=is_last),
            )
        )
    return found


def way_of(
    rank: Rank, way: str, mesh: Mesh, links: dict[str, Link], microbatches: int
) -> MeshWay:
    """One way on a mesh."""
    is_sharded = way == SHARDED
    parts = parts_of(rank, AUTOAMP if is_sharded else way, mesh.pp)
    stages = tuple(
        _stage(rank, part, mesh, microbatches, is_sharded=is_sharded) for part in parts
    )
    inner = [
        collectives.within_layers(p.figures.sent, microbatches, mesh.tp, links["tp"])
        for p in parts
    ]
    times = [
        stage.seconds + seconds_of(sent) / microbatches
        for stage, sent in zip(stages, inner, strict=True)
    ]
    slow = times.index(max(times))
    part, within = parts[slow], seconds_of(inner[slow])
    compute = microbatches * stages[slow].seconds
    times_sharded = microbatches if is_sharded else None
    outer = [*_between_replicas(rank, part, mesh.dp, links["dp"], times_sharded)]
    boundary = rank.boundary[AUTOAMP if is_sharded else way]
    stage_to_stage = collectives.between_stages(
        boundary, microbatches, mesh.pp, links["pp"]
    )
    exposed = _exposed(outer, part.figures, microbatches, is_sharded=is_sharded)
    exposed += (mesh.pp - 1) * seconds_of(stage_to_stage) / microbatches
    bubble = (mesh.pp - 1) * times[slow]
    trained = part.trained / (mesh.dp if is_sharded else 1)
    refresh = 0 if is_sharded else 3 * part.figures.copies
    step = (trained * rank.weights.moved + refresh) / rank.bytes_per_ns * 1e-9
    return MeshWay(
        way,
        compute + within + exposed + bubble + step,
        compute,
        within,
        exposed,
        bubble,
        step,
        stages,
        (*inner[slow], *outer, *stage_to_stage),
    )


def _between_replicas(
    rank: Rank, part: Part, devices: int, link: Link, times: int | None
) -> Iterator[Transfer]:
    """What replicas exchange: sharded in `times` micro-batches, or by DDP (None)."""
    if times is None:
        yield from collectives.reduced(part.trained, devices, link)
    else:
        yield from collectives.sharded(_shards(rank, part), times, devices, link)


def _shards(rank: Rank, part: Part) -> Sharded:
    step = rank.steps[AUTOAMP]
    copies = 0
    if rank.gathers_low and isinstance(step, Line):
        copies = int(step.slope["copies"])
    whole = not isinstance(step, Line)
    return Sharded(
        1 if whole else part.layers,
        part.weights - part.edges if whole else rank.weights.layer,
        copies,
        part.edges,
        rank.low,
    )


def _exposed(
    outer: list[Transfer], figures: Figures, microbatches: int, *, is_sharded: bool
) -> float:
    """The time of transfers between replicas that no computation hides.

    DistributedDataParallel reduces beside the last backward.  FSDP2 gathers beside each
    forward, and gathers and reduces beside each backward.
    """
    times = microbatches if is_sharded else 1
    forward = seconds_of(outer, "forward") - times * figures.forward * 1e-9
    backward = seconds_of(outer, "backward") - times * figures.backward * 1e-9
    return max(0.0, forward) + max(0.0, backward)


def _stage(
    rank: Rank, part: Part, mesh: Mesh, microbatches: int, *, is_sharded: bool
) -> Stage:
    figures, shards = part.figures, mesh.dp if is_sharded else 1
    under_way = min(mesh.pp - part.at, microbatches)
    weights = -(-part.weights // shards)
    gradients = -(-part.trained // shards)
    state = round(part.trained * rank.weights.state / shards)
    # Low copies that autocast made, which each micro-batch keeps for its backward.
    of_a_batch = figures.low - figures.copies
    more = (under_way - 1) * (figures.saved + of_a_batch)
    copies = figures.low + (under_way - 1) * of_a_batch
    if is_sharded:
        gathered = _gathered(_shards(rank, part))
        held = gradients + figures.again - figures.copies + gathered
        copies += gathered - figures.copies
    elif mesh.pp > 1:
        held = gradients + figures.again
    else:
        held = figures.most if microbatches == 1 else gradients + figures.again
    return Stage(
        part.name,
        part.layers,
        weights,
        gradients,
        state,
        under_way * figures.saved,
        copies,
        weights + state + held + more,
        (figures.forward + figures.backward) * 1e-9,
    )


def _gathered(weights: Sharded) -> int:
    """Bytes of whole weights that FSDP2 holds at one time."""
    return min(GATHERED_AT_ONCE, weights.layers) * weights.gathered + weights.edges
