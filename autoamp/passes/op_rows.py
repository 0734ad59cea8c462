"""The rows of a report: one per float op, one per cast; and a saved report of them.

Text, JSON, page, Graphviz and `diff` read these rows, whether a report was made in this
process (`passes/rows.py`) or read from a file (`load.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoamp.dtypes import HIGH_DTYPE, short_name

SCHEMA = "autoamp.report"
VERSION = 1
"""Raised when a key is removed or changes its meaning, not when a key is added."""

FP32 = short_name(HIGH_DTYPE)

_PLACE = re.compile(r"^.*?:\d+: ")


@dataclass(frozen=True)
class OpRow:
    """One float op: its precision and why.

    A file of an older version may lack all but the first eight attributes; those from
    `heading` on are in no file.

    Attributes:
        graph, body: the section of the op; `body` is "" outside bodies.
        name: the name of the op's node, the same before and after rewriting.
        op: the full op name, such as "aten::linear.default".
        precision: "fp32" or the low dtype's short name.
        reason: a sentence; never empty.
        module: path of the module that calls the op, "" at the top.
        source: "file:line: code" of the user's line, "" where unknown.
        category: allow, deny, infer or clear.
        origin: the rules file, user list or part of the pass behind the reason.
        listed: whether any rule knows the op.
        bytes: fp32 bytes that the op reads and writes; 0 for a view.
        kernel: the name of the kernel, where the op stands for a chain of the model's
            calls (`unfused=` takes its name), else "".
        calls: the number of the model's calls that the op stands for.
        cost_fp32, cost_low: the op's price in either precision, without casts and
            without the reward for lowering it, in the unit of its section: 0.1 ns or
            bytes.
        heading: the reason without the details of this op; ops are grouped by it.
        rule: the part of the reason that comes from the rule for the op's category.
        pinned: why the op must be fp32, "" if it may be low.
        flops: flops of its forward, for products.
        trains: whether a gradient flows through the op.
        reads: the numbers that it reads, which a backward may need.
    """

    graph: int
    body: str
    name: str
    op: str
    precision: str
    reason: str
    module: str
    source: str
    category: str = ""
    origin: str = ""
    listed: bool = True
    bytes: int = 0
    kernel: str = ""
    calls: int = 1
    cost_fp32: int = 0
    cost_low: int = 0
    heading: str = ""
    rule: str = ""
    pinned: str = ""
    flops: int = 0
    trains: bool = False
    reads: int = 0

    @property
    def is_low(self) -> bool:
        return self.precision != FP32

    @property
    def key(self) -> tuple[int, str, str]:
        """The section and the name."""
        return self.graph, self.body, self.name

    @property
    def cost(self) -> int:
        """The price in the op's precision."""
        return self.cost_low if self.is_low else self.cost_fp32

    @property
    def choice(self) -> str:
        """The part of the reason that comes from the placement, or ""."""
        return self.reason.removeprefix(self.rule).removeprefix("; ")

    @property
    def code(self) -> str:
        """The source line without its place, which moves when lines are added."""
        return _PLACE.sub("", self.source, count=1)


@dataclass(frozen=True)
class CastRow:
    """One inserted cast.

    Attributes:
        graph, body: the section of the cast.
        name: the name of the cast's node.
        value: the name of the node that is cast.
        kind: "weight", "down" or "up".
        dtype: the short name of the dtype cast to.
        bytes: bytes that the cast writes (a hint where the size is symbolic).
        every_call: False for a weight copy that is kept until the weight changes.
        producer: the op that made the value, such as "aten::add.Tensor"; "input" or
            "weight" for a value from outside the graph.
        readers: the names of the nodes that read the cast.
        source: the user's line that made the value, "" where unknown.
        compiled: what inductor makes of the cast: "written" to memory, "partly" (also
            read before it is written), "inside" a kernel or "removed"; "" where no
            compiler gets the graph or torch does not tell.
    """

    graph: int
    body: str
    name: str
    value: str
    kind: str
    dtype: str
    bytes: int
    every_call: bool = True
    producer: str = ""
    readers: tuple[str, ...] = ()
    source: str = ""
    compiled: str = ""


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
    ops: tuple[OpRow, ...]
    casts: tuple[CastRow, ...] = ()

    @property
    def key(self) -> str:
        """`0` for a graph, `0/body_0` for a body."""
        return f"{self.graph}/{self.body}" if self.body else str(self.graph)


@dataclass(frozen=True)
class SavedReport:
    """A saved report, as far as a comparison of reports reads it.

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
        return sum(op.is_low for g in self.graphs for op in g.ops)
