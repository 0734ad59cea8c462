"""Finds how two graphs differ, and proves that all the rest is the same program.

A graph and the graph that a pass made of it go in.  A node stays, or it stands for
another node (`twins.py`); all other nodes form regions: calls that are gone, and the
calls that came in their place.  Every node that stays must read the values that it
read, in the same dtypes and shapes, and nothing may move past a write.

A region is not judged here: `alike.py` runs both sides of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import networkx as nx
import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.nodes import tensors_of, written_values
from autoamp.check.allowed_changes import May
from autoamp.check.bodies import copies_in, is_called
from autoamp.check.call_facts import calls_bodies, has_effect, literals, operands
from autoamp.check.standin import named, where
from autoamp.check.twins import Twins
from autoamp.errors import VerificationError


@dataclass(frozen=True)
class Region:
    """Calls that are gone, the calls in their place, and what both read and make.

    Attributes:
        old, new: the calls, each in graph order.
        inputs: each value read, as the node of each graph that has it.
        results: each value made that is read outside, as the node of each graph.
        again: further names of the values read, each to the node in `inputs`.
    """

    old: tuple[fx.Node, ...]
    new: tuple[fx.Node, ...]
    inputs: tuple[tuple[fx.Node, fx.Node], ...]
    results: tuple[tuple[fx.Node, fx.Node], ...]
    again: Mapping[fx.Node, fx.Node] = field(default_factory=dict)


def differences(
    before: fx.GraphModule, after: fx.GraphModule, may: May
) -> list[Region]:
    """The regions in which `after` differs from `before`, those of bodies included.

    Raises:
        VerificationError: `after` differs otherwise, or more than it `may`.
    """
    twins = Twins(before, after, may)
    regions = _Comparison(twins).regions()
    for name, body in _bodies(before).items():
        other = getattr(after, name, None)
        if other is body or not is_called(twins, name):
            continue
        if not isinstance(other, fx.GraphModule):
            raise VerificationError(f"the sub-graph {name} got lost")
        inner = replace(may, copies=copies_in(twins, name, other))
        regions += differences(body, other, inner)
    return regions


def _bodies(gm: fx.GraphModule) -> dict[str, fx.GraphModule]:
    children = gm.named_children()
    return {n: child for n, child in children if isinstance(child, fx.GraphModule)}


class _Comparison:
    """Two graphs, node by node and region by region."""

    def __init__(self, twins: Twins) -> None:
        self.twins = twins

    def regions(self) -> list[Region]:
        """The regions; checks every node that stays.

        Raises:
            VerificationError: something outside every region differs.
        """
        self._same_order()
        graph = nx.Graph()
        gone, added = set(self.twins.gone), set(self.twins.added)
        graph.add_nodes_from([*gone, *added])
        for node in (*gone, *added):
            for operand in node.all_input_nodes:
                if operand in gone or operand in added:
                    graph.add_edge(operand, node)
        for name in self.twins.staying:
            old, new = self.twins.old[name], self.twins.new[name]
            self._same_node(old, new, gone, added, graph)
        for node in self.twins.added:
            if node.name in self.twins.old and self.twins.old[node.name] in gone:
                graph.add_edge(node, self.twins.old[node.name])
        parts = nx.connected_components(graph)
        places = {n: i for gm in self.twins.gms for i, n in enumerate(gm.graph.nodes)}
        found = [self._region(part, gone, places) for part in parts]
        return [each for each in found if each is not None]

    def _same_order(self) -> None:
        one, other = (
            [n.name for n in gm.graph.nodes if n.name in self.twins.staying]
            for gm in self.twins.gms
        )
        if one != other:
            moved = [a for a, b in zip(one, other, strict=True) if a != b]
            raise VerificationError("the order of the program changed", nodes=moved[:1])

    def _same_node(
        self,
        old: fx.Node,
        new: fx.Node,
        gone: Collection[fx.Node],
        added: Collection[fx.Node],
        graph: nx.Graph,
    ) -> None:
        """Checks that a node that stays reads and gives the same.

        An operand that a region makes joins the region's two sides.
        """
        reads, rereads = list(operands(old)), list(operands(new))
        more = rereads[len(reads) :]
        renamed = old.target is not new.target and new.op == "call_function"
        if more and not (
            (calls_bodies(new) and self._are_copies(more, reads))
            or (renamed and all(n.name in self.twins.may.copies for n in more))
        ):
            self._differs(old, new)
        if len(rereads) < len(reads):
            self._differs(old, new)
        for one, other in zip(reads, rereads, strict=False):
            if one in gone and other in added:
                graph.add_edge(one, other)
            elif one.name == other.name and one.name in self.twins.staying:
                pass  # which is checked by itself
            elif self.twins.named(one, self.twins.old_stands) != self.twins.named(
                other, self.twins.new_stands
            ):
                self._differs(old, new)
            if _differ(one, other, strides=False):
                raise VerificationError(
                    f"{where(new)} reads {other.name} as "
                    f"{_kinds(other, strides=False)}, where it read "
                    f"{_kinds(one, strides=False)}",
                    nodes=(*named(old), *named(new)),
                )
        if not more and not renamed and literals(old) != literals(new):
            self._differs(old, new)
        redtyped = old.name in self.twins.may.redtyped
        if not redtyped and _differ(old, new, strides=not self.twins.may.lay_out):
            raise VerificationError(
                f"{where(new)} is recorded as {_kinds(new, strides=True)}, where it "
                f"was {_kinds(old, strides=True)}",
                nodes=named(old),
            )

    def _are_copies(self, more: list[fx.Node], reads: list[fx.Node]) -> bool:
        known = {self.twins.named(n, self.twins.old_stands) for n in reads}
        return all(self.twins.named(n, self.twins.new_stands) in known for n in more)

    def _differs(self, old: fx.Node, new: fx.Node) -> None:
        raise VerificationError(
            f"{where(new)} reads {_shown(new)}, where it read {_shown(old)}",
            nodes=(*named(old), *named(new)),
        )

    def _region(
        self,
        part: Collection[fx.Node],
        gone: Collection[fx.Node],
        places: Mapping[fx.Node, int],
    ) -> Region | None:
        old = sorted((n for n in part if n in gone), key=places.__getitem__)
        new = sorted((n for n in part if n not in gone), key=places.__getitem__)
        if not new and not any(_is_read(n, part) or has_effect(n.target) for n in old):
            return None  # nothing reads what is gone
        names = [n.name for n in old or new]
        if not self.twins.may.replace or not old or not new:
            raise VerificationError(
                f"{where((old or new)[0])} was {'removed' if old else 'added'}, and "
                "is neither a cast nor a use of one",
                nodes=names,
            )
        self._nothing_moved(old, new)
        inputs: dict[str, tuple[fx.Node, fx.Node]] = {}
        sides: tuple[dict[str, fx.Node], dict[str, fx.Node]] = {}, {}
        again: dict[fx.Node, fx.Node] = {}
        for side, nodes, stands in (
            (sides[0], old, self.twins.old_stands),
            (sides[1], new, self.twins.new_stands),
        ):
            for node in nodes:
                for operand in node.all_input_nodes:
                    if operand not in part:
                        name = self.twins.named(operand, stands)
                        first = side.setdefault(name, operand)
                        again[operand] = first
        old = self._with_closed(old, sides[0], sides[1], again)
        for name in sides[0] | sides[1]:
            one = sides[0].get(name) or self.twins.old.get(name)
            other = sides[1].get(name) or self.twins.new.get(name)
            if one is None or other is None:
                raise VerificationError(
                    f"{where(new[0])} reads {name}, which the graph did not have",
                    nodes=names,
                )
            inputs[name] = one, other
        results = self._results(old, part)
        given = tuple(inputs.values())
        return Region(tuple(old), tuple(new), given, results, again)

    def _with_closed(
        self,
        old: list[fx.Node],
        read: dict[str, fx.Node],
        reread: Mapping[str, fx.Node],
        again: Mapping[fx.Node, fx.Node],
    ) -> list[fx.Node]:
        """The old side with the calls that make what it alone reads from no input.

        A mask that the graph computes of sizes is known; the new side may rely on it.
        """
        closed: dict[fx.Node, None] = {}
        for name, node in list(read.items()):
            if name in reread or not _made_of_nothing(node):  # a size itself stays read
                continue
            del read[name]
            for each in (n for n, first in again.items() if first is node):
                closed |= dict.fromkeys(_made_of_nothing(each) or ())
        for node in closed:
            for operand in node.all_input_nodes:
                if operand not in closed:  # a size
                    read.setdefault(operand.name, operand)
        every = {*closed, *old}
        return [n for n in self.twins.gms[0].graph.nodes if n in every]

    def _results(
        self,
        old: list[fx.Node],
        part: Collection[fx.Node],
    ) -> tuple[tuple[fx.Node, fx.Node], ...]:
        """The values of a region that others read, as the node of each graph."""
        found: dict[tuple[fx.Node, fx.Node], None] = {}
        for node in old:
            if node.name in self.twins.staying:
                continue
            for user in node.users:
                if user in part or user.name not in self.twins.staying:
                    continue
                pairs = zip(
                    operands(user), operands(self.twins.new[user.name]), strict=False
                )
                found |= {(a, b): None for a, b in pairs if a is node}
        for one, other in found:
            if other not in part:
                self._differs(one, other)
        return tuple(found)

    def _nothing_moved(self, old: list[fx.Node], new: list[fx.Node]) -> None:
        """Checks that no value of a region is read, or recorded, on another side.

        No write to a value lies between the reads of it before and after, and no change
        of grad mode between calls that are differentiated.
        """
        place = self._places
        inside = {*old, *new}
        reads: dict[int, list[int]] = {}
        recorded: list[int] = []
        for node in (*old, *new):
            values = tensors_of(node.meta.get("val"))
            if any(t.requires_grad for t in values):
                recorded.append(place[node])
            for operand in node.all_input_nodes:
                if operand in inside:
                    continue
                for tensor in tensors_of(operand.meta.get("val")):
                    storage = compat.storage_id(tensor)
                    reads.setdefault(storage, []).append(place[node])
        spans = {storage: (min(at), max(at)) for storage, at in reads.items()}
        for at, node, storages in self._barriers:
            changes_mode = node.target in compat.MODE_CHANGES
            if changes_mode and recorded and min(recorded) <= at < max(recorded):
                self._moved(new, node)
            for storage in storages:
                first, last = spans.get(storage, (0, 0))
                if first <= at < last:
                    self._moved(new, node)

    def _moved(self, new: list[fx.Node], past: fx.Node) -> None:
        raise VerificationError(
            f"{where(new[0])} was moved past {where(past)}",
            nodes=[n.name for n in new],
        )

    @cached_property
    def _places(self) -> dict[fx.Node, int]:
        """For each node of both graphs how many nodes that stay come before it."""
        found: dict[fx.Node, int] = {}
        for gm in self.twins.gms:
            count = 0
            for node in gm.graph.nodes:
                found[node] = count
                count += node.name in self.twins.staying
        return found

    @cached_property
    def _barriers(self) -> list[tuple[int, fx.Node, set[int]]]:
        """The nodes that write, each with its place and the storages written to.

        A change of grad mode is among them, and writes to none.
        """
        nodes = self.twins.gms[0].graph.nodes
        order = [n for n in nodes if n.name in self.twins.staying]
        found = []
        for at, node in enumerate(order):
            values = [
                t for v in written_values(node) for t in tensors_of(v.meta.get("val"))
            ]
            if values or node.target in compat.MODE_CHANGES:
                found.append((at, node, {compat.storage_id(t) for t in values}))
        return found


def _made_of_nothing(node: fx.Node) -> list[fx.Node] | None:
    """The calls that make a value of literals and sizes; None where tensors come in."""
    found: dict[fx.Node, None] = {}
    pending = [node]
    while pending:
        each = pending.pop()
        if each in found or _is_a_size(each):
            continue
        if each.op != "call_function" or calls_bodies(each) or has_effect(each.target):
            return None
        found[each] = None
        pending += each.all_input_nodes
    return list(found)


def _is_a_size(node: fx.Node) -> bool:
    """Whether a node is a size: an input of the graph, or one that a call asks for."""
    if node.op == "placeholder":
        return not tensors_of(node.meta.get("val"))
    return node.target is torch.ops.aten.sym_size.int


def _kinds(node: fx.Node, *, strides: bool) -> list[Any]:
    """The dtype and shape of each tensor of a node's value, and the strides."""
    return [
        (t.dtype, *map(str, t.shape), *(map(str, t.stride()) if strides else ()))
        for t in tensors_of(node.meta.get("val"))
    ]


def _differ(one: fx.Node, other: fx.Node, *, strides: bool) -> bool:
    """Whether two nodes are recorded otherwise; a graph for inductor records less."""
    if "val" not in other.meta or other.meta["val"] is one.meta.get("val"):
        return False
    return _kinds(one, strides=strides) != _kinds(other, strides=strides)


def _shown(node: fx.Node) -> str:
    return ", ".join(n.name for n in operands(node)) or "nothing"


def _is_read(node: fx.Node, part: Collection[fx.Node]) -> bool:
    return any(user not in part for user in node.users)
