"""A mesh: its text, the links between its devices, and one way to run a rank on it.

The figures of links, each with its source, stand in `links.toml`.  The formulas are
those of rings: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", Journal of Parallel and Distributed Computing 69 (2009),
117-124.  An all-reduce takes two binary trees instead where a ring has too many
messages: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan", Parallel Computing 35 (2009), 581-594.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from autoamp.dtypes import short_name
from autoamp.errors import OptionError
from autoamp.tools.plan_ranks import Figures, Line, Rank
from autoamp.tools.plan_result import MeshWay, Stage, Transfer
from autoamp.tools.plan_step import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, SEND, Sent
from autoamp.tools.plan_ways import AUTOAMP, AUTOCAST, FP32

FSDP2 = "autoamp, FSDP2"
MESH_WAYS = (FP32, AUTOCAST, AUTOAMP, FSDP2)

BUCKET = 25 * 2**20
"""Bytes of a bucket of gradients, the default of DistributedDataParallel."""

GATHERED_AT_ONCE = 2
"""Layers that FSDP2 holds whole at one time: one that computes, and the next."""

AXES = ("dp", "tp", "pp")
MOST_DEVICES = 10**6


class Mesh(NamedTuple):
    """Replicas (dp), devices that share each layer (tp), and stages (pp)."""

    dp: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.dp * self.tp * self.pp

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in zip(AXES, self, strict=True))


def parsed_mesh(text: str) -> Mesh:
    """The mesh of a text such as "dp=512,tp=8,pp=4"; an axis left out has size 1.

    Raises:
        OptionError: the text names no mesh, or one of more than a million devices.
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, size = (each.strip() for each in part.partition("="))
        if axis not in AXES or not equals:
            raise OptionError(
                f"mesh={text!r}: {part.strip()!r} is no axis; write axes as "
                '"dp=512,tp=8,pp=4"'
            )
        if axis in found:
            raise OptionError(f"mesh={text!r} gives {axis} twice; give it once")
        if not (size.isascii() and size.isdigit() and int(size[:8]) >= 1):
            raise OptionError(
                f"mesh={text!r}: {axis}={size} must be a whole number above 0"
            )
        found[axis] = int(size[:8])
    mesh = Mesh(**found)
    if mesh.devices > MOST_DEVICES:
        raise OptionError(
            f"mesh={text!r} has {mesh.devices:,} devices; at most {MOST_DEVICES:,} are "
            "planned"
        )
    return mesh


def scaled(mesh: Mesh, devices: int) -> Mesh:
    """The mesh with as many replicas as `devices` hold, tp and pp kept where they fit.

    Where one replica needs more devices there are fewer stages, and then fewer devices
    to a layer.
    """

    def fitting(size: int, room: int) -> int:
        return max(d for d in range(1, min(size, room) + 1) if size % d == 0)

    tp = fitting(mesh.tp, devices)
    pp = fitting(mesh.pp, devices // tp)
    return Mesh(devices // (tp * pp), tp, pp)


class Link(NamedTuple):
    """A link of one device: its GB/s at most, and the time of an empty message."""

    name: str
    bytes_per_ns: float
    latency_ns: float


@functools.cache
def _figures() -> dict[str, Any]:
    text = Path(__file__).with_name("links.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def links_of(mesh: Mesh, device: str, node: int, network: int) -> dict[str, Link]:
    """The link of each axis, on nodes of `node` devices.

    Devices of one layer lie innermost, then replicas, then stages.  An axis that
    leaves the node is counted at the speed of the network: a ring is as fast as its
    slowest link.

    Args:
        network: gigabits a second of the network of each device.

    Raises:
        OptionError: no link is known, or a number is not above 0.
    """
    if node < 1:
        raise OptionError(f"node={node}: give the devices of a node, above 0")
    if network < 1:
        raise OptionError(f"network={network}: give gigabits a second, above 0")
    figures = _figures()
    known = figures["devices"]
    kind, _, model = device.partition(":")
    if kind != "cuda" or model not in known:
        names = ", ".join(f"cuda:{name}" for name in known)
        raise OptionError(
            f"device={device!r}: a mesh is planned for {names}; give one of these"
        )
    row = figures["links"][known[model]]
    inside = Link(row["name"], float(row["bytes_per_ns"]), float(row["latency_ns"]))
    latency = float(figures["network"]["latency_ns"])
    outside = Link(f"{network} Gb/s", network / 8, latency)
    found, reach = {}, 1
    for axis in ("tp", "dp", "pp"):
        reach *= getattr(mesh, axis)
        found[axis] = inside if reach <= node else outside
    return found


def collective(kind: str, size: float, devices: int, link: Link) -> tuple[float, float]:
    """The bytes that each device sends in a collective, and its time in nanoseconds.

    Args:
        size: bytes of the whole tensor: what an all-gather makes, what a
            reduce-scatter takes.
    """
    if devices == 1:
        return 0.0, 0.0
    if kind == SEND:
        return size, link.latency_ns + size / link.bytes_per_ns
    rounds = 2 if kind == ALL_REDUCE else 1
    wire = rounds * size * (devices - 1) / devices
    ring = rounds * (devices - 1) * link.latency_ns + wire / link.bytes_per_ns
    if kind != ALL_REDUCE:
        return wire, ring
    messages = 2 * math.ceil(math.log2(devices))
    trees = messages * link.latency_ns + 2 * size / link.bytes_per_ns
    return wire, min(ring, trees)


# -- one way on a mesh -----------------------------------------------------------------


class Part(NamedTuple):
    """The part of a model in one stage, of which one micro-batch takes `figures`.

    `weights` and `trained` are bytes of all its weights, and `edges` of those in no
    layer.
    """

    at: int
    layers: int
    weights: int
    trained: int
    edges: int
    figures: Figures

    @property
    def seconds(self) -> float:
        """The time in which one micro-batch is computed."""
        return (self.figures.forward + self.figures.backward) * 1e-9


def way_of(
    rank: Rank, way: str, mesh: Mesh, links: Mapping[str, Link], microbatches: int
) -> MeshWay:
    """One way on a mesh; the times are those of the slowest stage."""
    run = _Run(rank, mesh, links, microbatches, sharded=way == FSDP2)
    base = AUTOAMP if run.sharded else way
    parts = run.parts(rank.steps[base])
    inner = [run.transfers("tp", part.figures.sent, microbatches) for part in parts]
    times = [
        part.seconds + _seconds(sent) / microbatches
        for part, sent in zip(parts, inner, strict=True)
    ]
    slow = times.index(max(times))
    part, within = parts[slow], _seconds(inner[slow])
    replicas = run.between_replicas(part)
    # What a stage gives to the next, and the gradient that it gives back.
    size, dtype = rank.boundary[base]
    sends = {Sent(phase, SEND, dtype, size): 1 for phase in ("forward", "backward")}
    between = run.transfers("pp", sends, microbatches)
    exposed = run.exposed(replicas, part)
    exposed += (mesh.pp - 1) * _seconds(between) / microbatches
    compute, bubble = microbatches * part.seconds, (mesh.pp - 1) * times[slow]
    refresh = 0 if run.sharded else 3 * part.figures.copies
    step = part.trained / run.shards * rank.moved + refresh
    step = step / rank.setting.device.bytes_per_ns * 1e-9
    return MeshWay(
        name=way,
        seconds=compute + within + exposed + bubble + step,
        compute=compute,
        within_layers=within,
        exposed=exposed,
        bubble=bubble,
        optimizer_step=step,
        stages=tuple(map(run.stage, parts)),
        transfers=(*inner[slow], *replicas, *between),
    )


@dataclass(frozen=True)
class _Run:
    """A rank's model on a mesh, its state sharded over the replicas or not."""

    rank: Rank
    mesh: Mesh
    links: Mapping[str, Link]
    microbatches: int
    sharded: bool

    @property
    def shards(self) -> int:
        """The devices that share the state of a stage."""
        return self.mesh.dp if self.sharded else 1

    def parts(self, line: Line) -> list[Part]:
        """The first, a middle and the last stage of an even split of the layers.

        The first stages have one layer more where the split leaves some over.  What is
        before the layers is in the first stage.  The time and the activations of all
        that surrounds the layers count in the last, where the head is.
        """
        layers, stages = max(self.rank.layers, 1), self.mesh.pp
        weights, trained = self.rank.weights, self.rank.trained
        found = []
        for at in sorted({0, stages // 2, stages - 1}):
            count = layers // stages + (at < layers % stages)
            is_first, is_last = at == 0, at == stages - 1
            edges, ends = (
                each.before * is_first + each.after * is_last
                for each in (weights, trained)
            )
            found.append(
                Part(
                    at=at,
                    layers=count,
                    weights=edges + count * weights.layer,
                    trained=ends + count * trained.layer,
                    edges=edges,
                    figures=line.at(count, edges=is_last),
                )
            )
        return found

    def stage(self, part: Part) -> Stage:
        """The bytes that one device of a stage holds."""
        figures, stages = part.figures, self.mesh.pp
        names = {0: "first", stages // 2: "middle", stages - 1: "last"}
        under_way = min(stages - part.at, self.microbatches)
        weights = math.ceil(part.weights / self.shards)
        gradients = math.ceil(part.trained / self.shards)
        state = round(part.trained * self.rank.state / self.shards)
        # Low copies that autocast made, which each micro-batch keeps for its backward.
        of_a_batch = figures.low - figures.copies
        more = (under_way - 1) * (figures.saved + of_a_batch)
        copies = figures.low + (under_way - 1) * of_a_batch
        held = gradients + figures.again
        if self.sharded:
            count, layer, _ = self.gathered(part)
            gathered = min(GATHERED_AT_ONCE, count) * layer + part.edges
            held += gathered - figures.copies
            copies += gathered - figures.copies
        elif stages == self.microbatches == 1:
            held = figures.most
        return Stage(
            name=names[part.at] if stages > 1 else "only",
            seconds=part.seconds,
            weights=weights,
            gradients=gradients,
            optimizer=state,
            saved=under_way * figures.saved,
            copies=copies,
            peak=weights + state + held + more,
            layers=part.layers,
        )

    def gathered(self, part: Part) -> tuple[int, int, str]:
        """How many layers FSDP2 gathers, the bytes and the dtype of each.

        A layer is gathered low where a low copy is read and no layer is split; a copy
        stands for a weight of twice its bytes.  A model without known layers is
        gathered as one.
        """
        rank, line = self.rank, self.rank.steps[AUTOAMP]
        if not rank.linear:
            return 1, part.weights - part.edges, "fp32"
        low = rank.rewritten and self.mesh.tp == 1
        copies = int(line.slope["copies"]) if low else 0
        dtype = short_name(rank.setting.low) if copies else "fp32"
        return part.layers, rank.weights.layer - copies, dtype

    def between_replicas(self, part: Part) -> list[Transfer]:
        """What replicas exchange in a step, by DistributedDataParallel or by FSDP2.

        DistributedDataParallel reduces gradients in fp32, in buckets.  FSDP2 gathers
        each layer for the forward and again for the backward, and reduces its gradients
        in fp32.  It gathers the root once, in fp32, since the root is not resharded.
        """
        sent: Counter[Sent] = Counter()
        if not self.sharded:
            if part.trained:
                count = math.ceil(part.trained / BUCKET)
                size = math.ceil(part.trained / count)
                sent[Sent("backward", ALL_REDUCE, "fp32", size)] = count
            return self.transfers("dp", sent, 1)
        layers, size, dtype = self.gathered(part)
        layer = self.rank.weights.layer if self.rank.linear else size
        for phase in ("forward", "backward"):
            sent[Sent(phase, ALL_GATHER, dtype, size)] += layers
        sent[Sent("backward", REDUCE_SCATTER, "fp32", layer)] += layers
        if part.edges:
            sent[Sent("forward", ALL_GATHER, "fp32", part.edges)] += 1
            sent[Sent("backward", REDUCE_SCATTER, "fp32", part.edges)] += 1
        return self.transfers("dp", dict(sorted(sent.items())), self.microbatches)

    def transfers(
        self, axis: str, sent: Mapping[Sent, int], times: int
    ) -> list[Transfer]:
        """What is sent in `times` micro-batches, from what is sent in one."""
        devices, link = getattr(self.mesh, axis), self.links[axis]
        found = []
        for each, count in sent.items() if devices > 1 else ():
            wire, took = collective(each.kind, each.size, devices, link)
            found.append(
                Transfer(
                    axis=axis,
                    kind=each.kind,
                    phase=each.phase,
                    dtype=each.dtype,
                    count=times * count,
                    wire=round(times * count * wire),
                    link=link.name,
                    seconds=times * count * took * 1e-9,
                )
            )
        return found

    def exposed(self, transfers: Sequence[Transfer], part: Part) -> float:
        """The time of transfers between replicas that no computation hides.

        DistributedDataParallel reduces beside the last backward.  FSDP2 gathers beside
        each forward, and gathers and reduces beside each backward.
        """
        times = self.microbatches if self.sharded else 1
        computing = {"forward": part.figures.forward, "backward": part.figures.backward}
        return sum(
            max(0.0, _seconds(transfers, phase) - times * nanoseconds * 1e-9)
            for phase, nanoseconds in computing.items()
        )


def _seconds(transfers: Sequence[Transfer], phase: str | None = None) -> float:
    """The time of transfers one after another, of one phase or of both."""
    return sum(each.seconds for each in transfers if phase in (None, each.phase))
