"""The part of a saved report that a comparison of reports reads.

`docs/report-schema.md` describes the whole document.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SCHEMA = "autoamp.report"
VERSION = 1
"""Raised when a key is removed or changes its meaning, not when a key is added."""

FP32 = "fp32"

_PLACE = re.compile(r"^.*?:\d+: ")


@dataclass(frozen=True)
class SavedOp:
    """One float op of a saved report.

    Attributes:
        graph, body: the graph of the op, and the body in it; "" outside bodies.
        name: the name of the op's node.
        op: the full op name, such as "aten::linear.default".
        precision: "fp32", "bf16" or "fp16".
        reason: why the op has its precision.
        module: path of the module that calls the op, "" at the top.
        source: "file:line: code" of the user's line, "" where unknown.
    """

    graph: int
    body: str
    name: str
    op: str
    precision: str
    reason: str
    module: str
    source: str

    @property
    def code(self) -> str:
        """The source line without its place, which moves when lines are added."""
        return _PLACE.sub("", self.source, count=1)


@dataclass(frozen=True)
class SavedCast:
    """One cast of a saved report.

    Attributes:
        graph, body: the graph of the cast, and the body in it.
        name: the name of the cast's node.
        value: the name of the node that is cast.
        kind: "weight", "down" or "up".
        dtype: the short name of the dtype cast to.
        bytes: bytes that the cast writes.
    """

    graph: int
    body: str
    name: str
    value: str
    kind: str
    dtype: str
    bytes: int


@dataclass(frozen=True)
class SavedGraph:
    """One graph of a saved report, or a body in a graph.

    Attributes:
        graph: index of the graph, in order of capture.
        body: "" for the graph itself, else the path of the body.
        device: the device for which ops are priced.
        ops, casts: in graph order.
    """

    graph: int
    body: str
    device: str
    ops: tuple[SavedOp, ...]
    casts: tuple[SavedCast, ...] = ()

    @property
    def key(self) -> str:
        """`0` for a graph, `0/body_0` for a body."""
        return f"{self.graph}/{self.body}" if self.body else str(self.graph)


@dataclass(frozen=True)
class SavedReport:
    """A saved report.

    Attributes:
        path: the file, as the user named it.
        model: the class name of the model.
        compute_dtype: short name of the low dtype; "" where nothing was rewritten.
        graphs: every graph followed by its bodies, in order of capture.
        devices: the figures of each device that ops are priced for; none where an
            older version wrote the report.
    """

    path: str
    model: str
    compute_dtype: str
    graphs: tuple[SavedGraph, ...]
    devices: tuple[Mapping[str, Any], ...] = ()

    @property
    def low_ops(self) -> int:
        """The number of ops in low precision."""
        return sum(op.precision != FP32 for g in self.graphs for op in g.ops)
