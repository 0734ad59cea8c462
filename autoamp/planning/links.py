"""The mesh of a plan, the links between its devices, and collectives on them.

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
from autoamp.planning.step import ALL_REDUCE, SEND

AXES = ("dp", "tp", "pp")
MOST_DEVICES = 10**6


@dataclass(frozen=True)
class Mesh:
    """A mesh of devices.

    Attributes:
        dp: devices that each train on other samples.
        tp: devices that share each layer.
        pp: stages that share the layers.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.dp * self.tp * self.pp

    def __str__(self) -> str:
        return ",".join(f"{axis}={getattr(self, axis)}" for axis in AXES)


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
