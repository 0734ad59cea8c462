"""What one device sends in a step, on each axis of the mesh."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autoamp.meshes.links import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    SEND,
    Link,
    nanoseconds,
    on_the_wire,
)
from autoamp.meshes.step import Sent

BUCKET = 25 * 2**20
"""Bytes of a bucket of gradients, the default of DistributedDataParallel."""


@dataclass(frozen=True)
class Transfer:
    """Collectives of one kind in one step.

    Attributes:
        axis: "dp", "tp" or "pp".
        kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "send".
        phase: "forward" or "backward", of the step that sends.
        dtype: the dtype of what is sent.
        count: how many there are.
        wire: bytes that the device sends in all of them.
        link: the link that they are counted on.
        seconds: predicted time of all of them, one after another.
    """

    axis: str
    kind: str
    phase: str
    dtype: str
    count: int
    wire: int
    link: str
    seconds: float


def transfer(axis: str, sent: Sent, count: int, devices: int, link: Link) -> Transfer:
    """`count` like collectives between `devices`."""
    return Transfer(
        axis,
        sent.kind,
        sent.phase,
        sent.dtype,
        count,
        round(count * on_the_wire(sent.kind, sent.size, devices)),
        link.name,
        count * nanoseconds(sent.kind, sent.size, devices, link) * 1e-9,
    )


def within_layers(
    sent: Mapping[Sent, int], times: int, devices: int, link: Link
) -> list[Transfer]:
    """The collectives inside layers, of `times` micro-batches."""
    return [
        transfer("tp", each, times * count, devices, link)
        for each, count in sorted(sent.items())
    ]


def reduced(gradients: int, devices: int, link: Link) -> list[Transfer]:
    """The gradients that DistributedDataParallel reduces in fp32, in buckets."""
    if devices == 1 or not gradients:
        return []
    count = math.ceil(gradients / BUCKET)
    each = Sent("backward", ALL_REDUCE, "fp32", math.ceil(gradients / count))
    return [transfer("dp", each, count, devices, link)]


@dataclass(frozen=True)
class Sharded:
    """The weights of one stage that FSDP2 shards.

    Attributes:
        layers: the number of layers.
        layer: bytes of a layer's weights in fp32.
        copies: bytes of the low copies that stand for weights of a layer.
        edges: bytes of the weights around the layers, the root of FSDP2.
        low: the name of the low dtype.
    """

    layers: int
    layer: int
    copies: int
    edges: int
    low: str

    @property
    def gathered(self) -> int:
        """Bytes of a layer as it is gathered: low where a low copy is read.

        A copy of `copies` bytes stands for a weight of twice as many.
        """
        return self.layer - self.copies

    @property
    def dtype(self) -> str:
        """The dtype of what is gathered, of most of it where there are two."""
        return self.low if self.copies else "fp32"


def sharded(
    weights: Sharded, times: int, devices: int, link: Link
) -> Iterator[Transfer]:
    """What FSDP2 gathers and reduces in `times` micro-batches.

    Each layer is gathered for the forward and again for the backward, and its gradients
    are reduced in fp32.  The root is gathered once, in fp32, since it is not resharded.
    """
    if devices == 1:
        return
    sent: Counter[Sent] = Counter()
    for phase in ("forward", "backward"):
        gather = Sent(phase, ALL_GATHER, weights.dtype, weights.gathered)
        sent[gather] += weights.layers * times
    sent[Sent("backward", REDUCE_SCATTER, "fp32", weights.layer)] += (
        weights.layers * times
    )
    if weights.edges:
        sent[Sent("forward", ALL_GATHER, "fp32", weights.edges)] += times
        sent[Sent("backward", REDUCE_SCATTER, "fp32", weights.edges)] += times
    for each, count in sorted(sent.items()):
        yield transfer("dp", each, count, devices, link)


def between_stages(
    boundary: tuple[int, str], times: int, stages: int, link: Link
) -> list[Transfer]:
    """What a stage gives to the next, and the gradient that it gives back."""
    if stages == 1:
        return []
    size, dtype = boundary
    return [
        transfer("pp", Sent(phase, SEND, dtype, size), times, stages, link)
        for phase in ("forward", "backward")
    ]


def seconds_of(transfers: list[Transfer], phase: str | None = None) -> float:
    """The time of transfers one after another, of one phase or of both."""
    return sum(each.seconds for each in transfers if phase in (None, each.phase))
