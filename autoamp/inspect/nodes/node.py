"""One entry per node of a section, as the node is before the pass and after it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autoamp.analyse.nodes import tensors_of
from autoamp.dtypes import short_name
from autoamp.inspect.nodes.calls import by_call
from autoamp.inspect.nodes.homes import Group, homes_of, tree_of
from autoamp.inspect.nodes.plumbing import plumbing_of
from autoamp.inspect.rows import CastRow, OpRow, Section, target_name
from autoamp.inspect.text import op_title, shorten
from autoamp.inspect.why import undecided
from autoamp.rewrite.emitted import is_use

_LATE = frozenset({"weight", "constant", "state", "body", "cast", "use"})
"""Kinds of nodes that are drawn where the readers of the node are drawn."""


@dataclass(frozen=True)
class Side:
    """A node in the graph before the pass, or in the graph after it.

    Attributes:
        operands: the names of the nodes that the node reads.
        values: the tensors of the node's result, as "bf16 [2, 8]".
        precision: the short name of the dtype of the first float tensor, or "".
    """

    operands: tuple[str, ...]
    values: tuple[str, ...]
    precision: str


@dataclass(frozen=True)
class Node:
    """One node of a section.

    Attributes:
        name: the name of the node.
        kind: "op", "cast", "weight", "input", "constant", "state", "body", "use" or
            "output".
        op: the name of the op or function.
        title: the short name of the op, or of a weight inside its module.
        group: the index of the box that the node is drawn in.
        module: the path of the module of that box.
        source: the user's line, shortened; "" where unknown.
        before, after: the node in each graph; None in a graph that lacks it.
        decision: the row of a float op.
        cast: the row of a cast.
        note: on a node that is neither a float op nor a cast, a sentence without its
            subject, the node.
        body: the key of the body that the node names, or "".
        is_plumbing: whether the node is a running statistic or a counter.
    """

    name: str
    kind: str
    op: str
    title: str
    group: int
    module: str
    source: str
    before: Side | None
    after: Side | None
    decision: OpRow | None
    cast: CastRow | None
    note: str
    body: str
    is_plumbing: bool


class Nodes:
    """The nodes of one section, in the order of the page.

    Attributes:
        names: the nodes of the rewritten graph, in order, each followed by the nodes
            that only the graph before has at that place.
        index: node to its position in `names`.
        groups: the boxes that the nodes are drawn in, parents before children.
        group_of: node to the index of its box.
    """

    def __init__(self, section: Section, label: str) -> None:
        """Args: `label` is the text of the outermost box."""
        self._section = section
        self._ops = {row.name: row for row in section.ops}
        self._casts = {row.name: row for row in section.casts}
        self._before = section.before
        self._after = {n.name: n for n in section.rewritten.gm.graph.nodes}
        self.names = _merged(list(self._before), list(self._after))
        self.index = {name: place for place, name in enumerate(self.names)}
        self._plumbing = self._find_plumbing()
        self._kinds = {name: self._kind(name) for name in self.names}
        operands, readers = self._operands(), defaultdict[str, list[str]](list)
        for name, read in operands.items():
            for operand in read:
                readers[operand].append(name)
        modules = {n: self._module(n) for n in self.names}
        homes = homes_of(by_call(modules, operands), readers)
        self.groups: list[Group]
        self.groups, self.group_of = tree_of(
            homes, self._drawn_with_readers(readers), label
        )

    @cached_property
    def entries(self) -> tuple[Node, ...]:
        """The nodes."""
        return tuple(map(self._entry, self.names))

    def _entry(self, name: str) -> Node:
        node = self._node(name)
        row, cast, fact = self._ops.get(name), self._casts.get(name), self._fact(name)
        return Node(
            name=name,
            kind=self._kinds[name],
            op=row.op if row else target_name(node),
            title=self._title(name, node, row),
            group=self.group_of[name],
            module=self.groups[self.group_of[name]].path,
            source=shorten(fact.source) if fact else "",
            before=_side(self._before.get(name)),
            after=_side(self._after.get(name)),
            decision=row,
            cast=cast,
            note="" if row or cast else self._note(name),
            body=self._body(node),
            is_plumbing=name in self._plumbing,
        )

    def _node(self, name: str) -> fx.Node:
        return self._after.get(name) or self._before[name]

    def _title(self, name: str, node: fx.Node, row: OpRow | None) -> str:
        """The short name: that of the op, or of a weight inside its module."""
        if self._kinds[name] not in ("weight", "constant", "state"):
            return op_title(row.op if row else target_name(node))
        path = self.groups[self.group_of[name]].path.replace(".", "_")
        inner = name.lstrip("_").removeprefix(f"{path}_")
        return inner if path else name

    def _kind(self, name: str) -> str:
        node = self._node(name)
        if name in self._casts:
            return "cast"
        if name not in self._before and is_use(node):
            return "use"
        if node.op == "get_attr":
            is_body = self._body(node) or _is_graph(node)
            return "body" if is_body else "constant"
        if node.op == "placeholder":
            if name in self._plumbing:
                return "state"
            facts = self._section.rewritten.facts
            return "weight" if name in facts.weights else "input"
        return "output" if node.op == "output" else "op"

    def _fact(self, name: str) -> Any:
        return self._section.rewritten.facts.nodes.get(name)

    def _module(self, name: str) -> str | None:
        if self._kinds[name] in _LATE:
            return None
        fact = self._fact(name)
        return fact.module if fact else "" if name in self._before else None

    def _find_plumbing(self) -> frozenset[str]:
        """The nodes that are plumbing in every graph that has them."""
        rewritten = self._section.rewritten
        sides = [
            ({n.name for n in graph.nodes}, plumbing_of(graph, self._ops))
            for graph in (rewritten.before.graph, rewritten.gm.graph)
        ]
        return frozenset(
            name
            for name in self.names
            if all(name in found for known, found in sides if name in known)
        )

    def _operands(self) -> dict[str, list[str]]:
        """The nodes that each node reads, before the pass and after."""
        found: dict[str, list[str]] = defaultdict(list)
        for nodes in (self._before, self._after):
            for node in nodes.values():
                found[node.name] += (operand.name for operand in node.all_input_nodes)
        return found

    def _drawn_with_readers(self, readers: Mapping[str, Sequence[str]]) -> list[str]:
        """The nodes in graph order, but weights and casts just before a reader."""
        place: dict[str, int] = {}
        for name in reversed(self.names):
            places = [place[r] for r in readers.get(name, ()) if r in place]
            late = self._kinds[name] in _LATE and places
            place[name] = min(places) if late else self.index[name]
        return sorted(self.names, key=lambda name: (place[name], self.index[name]))

    def _note(self, name: str) -> str:
        if self._kinds[name] == "use":
            return "joins the uses of a value, so that gradients are summed in fp32."
        if self._kinds[name] == "output":
            return "returns the results of the graph; floats are cast back to fp32."
        if self._kinds[name] == "body":
            return "is a sub-graph that its reader calls."
        return undecided(self._section, name) if self._fact(name) else ""

    def _body(self, node: fx.Node) -> str:
        """The key of the section of the body that `node` names, or ""."""
        if node.op != "get_attr" or not _is_graph(node):
            return ""
        section = self._section
        child = getattr(section.rewritten.gm, str(node.target), None)
        if not any(child is body.gm for body in section.rewritten.bodies):
            return ""
        path = f"{section.body}/{node.target}" if section.body else str(node.target)
        return f"{section.graph}/{path}"


def _merged(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """The names of `after`; a name of `before` alone follows its predecessor."""
    known = set(after)
    behind: dict[str, list[str]] = defaultdict(list)
    last = ""
    for name in before:
        if name in known:
            last = name
        else:
            behind[last].append(name)
    merged = behind[""][:]
    for name in after:
        merged += [name, *behind[name]]
    return merged


def _is_graph(node: fx.Node) -> bool:
    owner = node.graph.owning_module
    return isinstance(getattr(owner, str(node.target), None), fx.GraphModule)


def _side(node: fx.Node | None) -> Side | None:
    if node is None:
        return None
    values = tensors_of(node.meta.get("val"))
    floats = [t for t in values if t.is_floating_point()]
    return Side(
        tuple(operand.name for operand in node.all_input_nodes),
        tuple(map(_described, values)),
        short_name(floats[0].dtype) if floats else "",
    )


def _described(tensor: torch.Tensor) -> str:
    sizes = ", ".join(str(size) for size in tensor.shape)
    return f"{short_name(tensor.dtype)} [{sizes}]"
