"""The links between devices, and how long a collective takes on them.

The figures, each with its source, stand in `links.toml`.  The formulas are those of
rings: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", Journal of Parallel and Distributed Computing 69 (2009), 117-124.  An
all-reduce takes two binary trees instead where a ring has too many messages: Sanders,
Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and
scan", Parallel Computing 35 (2009), 581-594.
"""

from __future__ import annotations

import functools
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoamp.errors import OptionError
from autoamp.meshes.spec import Mesh

NODE, NETWORK = 8, 400
"""Devices of a node, and gigabits a second of a device's network, by default."""

ALL_REDUCE, ALL_GATHER = "all-reduce", "all-gather"
REDUCE_SCATTER, ALL_TO_ALL, SEND = "reduce-scatter", "all-to-all", "send"


@dataclass(frozen=True)
class Link:
    """A link of one device.

    Attributes:
        name: the link, for tables.
        bytes_per_ns: what a device sends at most, in GB/s.
        latency_ns: the time of one message without content.
    """

    name: str
    bytes_per_ns: float
    latency_ns: float


@functools.cache
def _figures() -> dict[str, Any]:
    text = Path(__file__).with_name("links.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def link_in_node(device: str) -> Link:
    """The link between the devices of a node, for a device such as "cuda:sm_90".

    Raises:
        OptionError: no link of the device is known.
    """
    known = _figures()["devices"]
    kind, _, model = device.partition(":")
    if kind != "cuda" or model not in known:
        names = ", ".join(f"cuda:{name}" for name in known)
        raise OptionError(
            f"device={device!r}: a mesh is planned for {names}; give one of these"
        )
    row = _figures()["links"][known[model]]
    return Link(row["name"], float(row["bytes_per_ns"]), float(row["latency_ns"]))


def network_link(gigabits: int) -> Link:
    """The network of one device, which sends `gigabits` a second.

    Raises:
        OptionError: `gigabits` is no number above 0.
    """
    if gigabits < 1:
        raise OptionError(f"network={gigabits}: give gigabits a second, above 0")
    latency = float(_figures()["network"]["latency_ns"])
    return Link(f"{gigabits} Gb/s", gigabits / 8, latency)


def links_of(mesh: Mesh, device: str, node: int, network: int) -> dict[str, Link]:
    """The link of each axis.

    Devices of one layer lie innermost, then replicas, then stages.  An axis that
    leaves the node is counted at the speed of the network: a ring is as fast as its
    slowest link.

    Raises:
        OptionError: no link is known, or a node has no devices.
    """
    if node < 1:
        raise OptionError(f"node={node}: give the devices of a node, above 0")
    inside, outside = link_in_node(device), network_link(network)
    found, reach = {}, 1
    for axis in ("tp", "dp", "pp"):
        reach *= getattr(mesh, axis)
        found[axis] = inside if reach <= node else outside
    return found


def on_the_wire(kind: str, size: float, devices: int) -> float:
    """The bytes that each device sends in a collective.

    Args:
        size: bytes of the whole tensor: what an all-gather makes, what a
            reduce-scatter takes.
    """
    if devices == 1:
        return 0.0
    if kind == SEND:
        return size
    times = 2 if kind == ALL_REDUCE else 1
    return times * size * (devices - 1) / devices


def nanoseconds(kind: str, size: float, devices: int, link: Link) -> float:
    """The time of a collective on a ring, or on trees where an all-reduce is faster."""
    if devices == 1:
        return 0.0
    sent = on_the_wire(kind, size, devices) / link.bytes_per_ns
    if kind == SEND:
        return link.latency_ns + sent
    if kind != ALL_REDUCE:
        return (devices - 1) * link.latency_ns + sent
    ring = 2 * (devices - 1) * link.latency_ns + sent
    messages = 2 * math.ceil(math.log2(devices))
    return min(ring, messages * link.latency_ns + 2 * size / link.bytes_per_ns)
