"""Compares a graph with the graph that a pass made of it.

Nodes are told by their names.  A node of the graph before that is there after *stays*;
the pass may write it otherwise (`May.rewrite`).  A node that the pass added may *stand
for* a value of the graph before: a cast, a use of a copy, a gradient that is scaled.
All other nodes form regions: calls that are gone, and the calls that came in their
place.  Every node that stays must read the values that it read, in the same dtypes and
shapes, and nothing may move past a write.

The numbers of a region are not judged: the tests run both sides of it.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Protocol

import networkx as nx
import torch
from torch import fx

from autoamp import compat
from autoamp.errors import VerificationError
from autoamp.passes.check.allowed_changes import (
    CASTS,
    GROUPS,
    OF_A_COPY,
    OWN_MEMORY,
    RESHAPES,
    SCALED_CASTS,
    USES,
    May,
)
from autoamp.passes.check.standin import named, storages_of, where
from autoamp.passes.functions import checkpointed, with_dtypes
from autoamp.passes.see.dtensors_as_whole import MESH_CALL
from autoamp.passes.see.nodes import tensors_of, written_values
from autoamp.passes.see.regions import CONTROL_FLOW

_MODE = -2
"""Stands for a storage that each change of grad mode writes to."""

_OPS = 4096
"""The ops whose facts are kept at most; a process calls fewer, as a rule."""


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
    pair = _Pair(before, after, may)
    regions = _regions(pair)
    for name, body in before.named_children():
        other = getattr(after, name, None)
        if not isinstance(body, fx.GraphModule) or other is body:
            continue
        takes = after.graph.find_nodes(op="get_attr", target=name)
        if not takes:
            continue
        if not isinstance(other, fx.GraphModule):
            raise VerificationError(f"the sub-graph {name} got lost")
        copies = _copies_in(pair, takes[0], other)
        regions += differences(body, other, replace(may, copies=copies))
    return regions


class _Pair:
    """One graph beside the graph that was made of it.

    Attributes:
        gms: the graph before, and the graph after.
        may: the changes that the pass may make.
        old, new: the nodes of each graph by their names.
        staying: the names of the nodes that are in both, with one target.
        gone, added: the nodes that are in one graph alone and stand for no other.
        stands: for each graph, the values for which nodes stand that stand for others.
    """

    def __init__(self, before: fx.GraphModule, after: fx.GraphModule, may: May) -> None:
        self.gms = before, after
        self.may = may
        self.old = {n.name: n for n in before.graph.nodes}
        self.new = {n.name: n for n in after.graph.nodes}
        self.staying = {
            name
            for name, node in self.new.items()
            if name in self.old and self._is_same_call(self.old[name], node)
        }
        self.gone = [n for n in before.graph.nodes if n.name not in self.staying]
        self.added: list[fx.Node] = []
        self.stands: tuple[dict[str, str], dict[str, str]] = {}, {}
        self._views: dict[Any, str] = {}
        olds, news = (
            [n.name for n in gm.graph.nodes if n.op == "placeholder"] for gm in self.gms
        )
        # The inputs of before come in their order, then those declared.
        if olds != [name for name in news if name not in may.copies]:
            raise VerificationError(f"the inputs changed from {olds} to {news}")
        for name, weight in may.copies.items():
            if weight is not None and name in self.new:
                self.stands[1][name] = weight
        self._follow_old()
        self._follow_new()
        if not may.retype:  # stand-ins then tell what shares memory
            self._no_stale_copy()
        # A call with other literals is another call, that may replace the one before.
        for name in sorted(self.staying if may.replace else ()):
            old, new = self.old[name], self.new[name]
            if new.op != "call_function" or calls_bodies(new):
                continue
            if literals(old) != literals(new):
                self.staying.discard(name)
                self.gone.append(old)
                self.added.append(new)

    def _is_same_call(self, old: fx.Node, new: fx.Node) -> bool:
        if old.op != new.op or old.target is new.target:
            return bool(old.op == new.op)
        if old.op != "call_function":
            return bool(old.target == new.target)
        was, now = self.may.calls(old, new)
        return was.target is now.target

    def stood(self, node: fx.Node, side: int) -> str:
        """The value for which a node of one side stands."""
        return self.stands[side].get(node.name, node.name)

    # -- what stands for what ------------------------------------------------------

    def _follow_old(self) -> None:
        """Finds the values that the nodes of the graph before stand for.

        An op in place gives its operand; two equal views of one value are one value.
        """
        gone, known = set(self.gone), list[fx.Node]()
        apart = self.may.copies or self.may.fold
        for node in self.gms[0].graph.nodes:
            self._follow(node, 0)
            if self.may.once and self._made_again(node, known):
                gone.discard(node)
            # A cast may be made outside the graph: a copy that was declared, or a
            # constant of the graph, then holds its result.
            elif node in gone and apart and node.target in CASTS | USES:
                self.stands[0][node.name] = self.stood(node.all_input_nodes[0], 0)
                gone.discard(node)
        self.gone = [n for n in self.gone if n in gone]

    def _follow_new(self) -> None:
        for node in self.gms[1].graph.nodes:
            if node.name in self.staying:
                self._follow(node, 1)
            elif node.op != "placeholder" and not self._is_group(node):
                source = self._passed(node)
                if source is None:
                    self.added.append(node)
                else:
                    self.stands[1][node.name] = source

    def _follow(self, node: fx.Node, side: int) -> None:
        """Notes the value that a node of the program stands for."""
        if gives_its_operand(node):
            self.stands[side][node.name] = self.stood(node.all_input_nodes[0], side)
        elif is_view(node.target) or node.target is operator.getitem:
            # Equal views of one value are one value: the pass repeats the view of a
            # weight for each use, so that the gradients of the uses are summed in fp32.
            known = self._views.setdefault(self._key(node, side), node.name)
            if known != node.name:
                self.stands[side][node.name] = known

    def _key(self, node: fx.Node, side: int) -> tuple[Any, ...]:
        """The call and the operands that decide which elements a view shows."""
        read = [self.stood(n, side) for n in operands(node)]
        return (node.target, *read, *literals(node))

    def _made_again(self, node: fx.Node, known: list[fx.Node]) -> bool:
        """Whether a call that is gone was made before, with the same value.

        Args:
            known: the calls on the mesh that stay, since the last call with an effect.
        """
        call = node.meta.get(MESH_CALL)
        # Past a write an equal call gives another value, past a change of grad mode
        # another gradient.
        if has_effect(node.target) or calls_bodies(node) or _changes_mode(node):
            known.clear()
        if call is None:
            return False
        if node.name in self.staying:
            known.append(node)
            return False
        key = self._key(node, 0)
        for first in known:
            if first.meta[MESH_CALL] == call and self._key(first, 0) == key:
                self.stands[0][node.name] = first.name
                return True
        return False

    def _is_group(self, node: fx.Node) -> bool:
        return self.may.groups and node.target in GROUPS

    def _passed(self, node: fx.Node) -> str | None:
        """The value that an added node stands for; None where it is of a region."""
        target = node.target
        if node.op == "get_attr":
            return self._folded(node) if self.may.fold else None
        if target is operator.getitem and node.all_input_nodes[0].target in USES:
            return self.stands[1].get(node.all_input_nodes[0].name)
        if target not in self.may.add:
            shows = is_view(target) or target is operator.getitem
            # A view that was made once more, for a use of its own.
            again = bool(self.may.add) and shows
            return self._views.get(self._key(node, 1)) if again else None
        first = node.args[0]
        if not isinstance(first, fx.Node):
            return None
        # Later passes and checks read the metadata of added nodes, which the pass under
        # check wrote.
        _is_recorded_truly(node, first)
        # The gradient goes to the first operand, whatever numbers the second holds:
        # only here does it show that the two are one value.
        if target in OF_A_COPY:
            copy = node.args[1]
            if not isinstance(copy, fx.Node) or (
                self._uncast(copy) != self._uncast(first)
            ):
                raise VerificationError(
                    f"{where(node)} takes the gradient of {first.name} for a copy of "
                    "something else",
                    nodes=named(node),
                )
        return self.stood(first, 1)

    def _uncast(self, node: fx.Node) -> str:
        """The value that a node stands for, or is a cast of."""
        while node.target in CASTS or node.target in SCALED_CASTS:
            node = node.all_input_nodes[0]
        return self.stood(node, 1)

    def _folded(self, node: fx.Node) -> str | None:
        """The constant of the graph before that a new constant is a cast of."""
        cast, name = self.old.get(str(node.target)), str(node.target)
        source = cast.all_input_nodes[0] if cast and cast.all_input_nodes else None
        try:
            value = operator.attrgetter(name)(self.gms[1])
        except AttributeError:
            return None
        if source is None or source.op != "get_attr" or not torch.is_tensor(value):
            return None
        known = operator.attrgetter(str(source.target))(self.gms[0])
        # By its numbers: no call in the graph tells where a constant comes from.
        same = torch.equal(known.detach().to(value.dtype), value)
        return str(source.name) if same else None

    # -- what may not move ---------------------------------------------------------

    def _no_stale_copy(self) -> None:
        """Checks that no added copy is read after a write to the value copied.

        A group of uses may not be read in another grad mode either.
        """
        written: dict[int, int] = {}
        made: dict[fx.Node, tuple[set[int], int]] = {}
        for at, node in enumerate(self.gms[1].graph.nodes):
            if _changes_mode(node):
                written[_MODE] = at
            for operand in node.all_input_nodes:
                storages, when = made.get(operand, (set(), at))
                last = max((written.get(s, -1) for s in storages), default=-1)
                if node.op != "output" and last > when:
                    raise VerificationError(
                        f"{where(node)} reads {operand.name}, a copy of a value that "
                        "was written to since",
                        nodes=(*named(node), operand.name),
                    )
            if node.name in self.stands[1] and node.target in OWN_MEMORY:
                made[node] = storages_of(node.all_input_nodes[:1]), at
            elif self._is_group(node):
                made[node] = {_MODE, *storages_of(node.all_input_nodes)}, at
            written |= dict.fromkeys(storages_of(written_values(node)), at)

    @cached_property
    def places(self) -> dict[fx.Node, int]:
        """For each node of both graphs how many nodes that stay come before it."""
        found: dict[fx.Node, int] = {}
        for gm in self.gms:
            count = 0
            for node in gm.graph.nodes:
                found[node] = count
                count += node.name in self.staying
        return found

    @cached_property
    def barriers(self) -> list[tuple[int, fx.Node, set[int]]]:
        """The nodes that write, each with its place and the storages written to.

        A change of grad mode is among them, and writes to none.
        """
        order = [n for n in self.gms[0].graph.nodes if n.name in self.staying]
        found = []
        for at, node in enumerate(order):
            written = storages_of(written_values(node))
            if written or _changes_mode(node):
                found.append((at, node, written))
        return found


def _copies_in(
    pair: _Pair, taken: fx.Node, body: fx.GraphModule
) -> dict[str, str | None]:
    """The inputs that a body gained, each with the input that it is a copy of.

    Args:
        taken: the operand by which the graph after calls the body.
    """
    given = [n.name for n in body.graph.nodes if n.op == "placeholder"]
    call = next(iter(taken.users), None)
    handed: Sequence[Any] = ()
    if call is not None and call.target is checkpointed:
        handed = call.args[1:]
    elif call is not None and call.target in CONTROL_FLOW:
        handed = call.args[CONTROL_FLOW[call.target].shared]  # type: ignore[assignment]
    offset = len(given) - len(handed)
    known: dict[str, str] = {}
    found: dict[str, str | None] = {}
    for at, operand in enumerate(handed if offset >= 0 else ()):
        if isinstance(operand, fx.Node):
            stood, inner = pair.stood(operand, 1), given[offset + at]
            if operand.name in pair.may.copies and stood in known:
                found[inner] = known[stood]
            known.setdefault(stood, inner)
    return found


# -- the nodes that stay ---------------------------------------------------------------


def _regions(pair: _Pair) -> list[Region]:
    """The regions of a pair; checks every node that stays.

    Raises:
        VerificationError: something outside every region differs.
    """
    one, other = (
        [n.name for n in gm.graph.nodes if n.name in pair.staying] for gm in pair.gms
    )
    # In one order, no write and no random draw can have moved past another.
    if one != other:
        moved = [a for a, b in zip(one, other, strict=True) if a != b]
        raise VerificationError(
            "the rewrite changed the order of the program", nodes=moved[:1]
        )
    gone, added = set(pair.gone), set(pair.added)
    graph = nx.Graph()
    graph.add_nodes_from([*pair.gone, *pair.added])
    for node in (*pair.gone, *pair.added):
        for operand in node.all_input_nodes:
            if operand in gone or operand in added:
                graph.add_edge(operand, node)
    for name in one:
        for old, new in _read_otherwise(pair, pair.old[name], pair.new[name]):
            if old in gone and new in added:
                graph.add_edge(old, new)
            elif new in added:
                _refuse_added(new)
            elif old in gone:
                _refuse_lost([old])
            else:
                _refuse_operands(pair.old[name], pair.new[name])
        was, now = pair.old[name], pair.new[name]
        retyped = pair.may.retype or name in pair.may.redtyped
        if not retyped and _differ(was, now, strides=True):
            raise VerificationError(
                f"{where(now)} is recorded as {_kinds(now, strides=True)}, where it "
                f"was {_kinds(was, strides=True)}",
                nodes=named(was),
            )
    for node in pair.added:
        if pair.old.get(node.name) in gone:
            # A call that replaces the call of its own name is of that call's region,
            # whatever the two read.
            graph.add_edge(node, pair.old[node.name])
    found = [_region(pair, part, gone) for part in nx.connected_components(graph)]
    return [each for each in found if each is not None]


def _read_otherwise(
    pair: _Pair, old: fx.Node, new: fx.Node
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The operands of a node that stays which do not stand for one value.

    Raises:
        VerificationError: the node reads more or fewer operands, or other literals, or
            an operand in another dtype or shape.
    """
    was, now = pair.may.calls(old, new)
    reads, rereads = operands(was), operands(now)
    more = rereads[len(reads) :]
    is_body = calls_bodies(new) or calls_bodies(old)
    renamed = old.target is not new.target
    # Operands may only be added at the end: copies for a body, the edge's inputs for a
    # function of the edge.
    if more:
        known = {pair.stood(n, 0) for n in reads}
        copies = is_body and all(pair.stood(n, 1) in known for n in more)
        declared = renamed and all(n.name in pair.may.copies for n in more)
        if not copies and not declared:
            _refuse_operands(old, new)
    for one, other in zip(reads, rereads, strict=False):
        same = one.name == other.name and one.name in pair.staying
        if not same and pair.stood(one, 0) != pair.stood(other, 1):
            yield one, other
        if not pair.may.retype and _differ(one, other, strides=False):
            raise VerificationError(
                f"{where(new)} reads {other.name} as {_kinds(other, strides=False)}, "
                f"where it read {_kinds(one, strides=False)}",
                nodes=(*named(old), *named(new)),
            )
    if len(rereads) < len(reads):
        _refuse_operands(old, new)
    told = [literals(was, places=not more), literals(now, places=not more)]
    # Torch's op for a checkpoint is told more than the function that it replaces.
    if told[0] != told[1] and not pair.may.retype and not (renamed and is_body):
        _refuse_operands(old, new)


def _refuse_operands(old: fx.Node, new: fx.Node) -> None:
    def shown(node: fx.Node) -> str:
        return ", ".join(n.name for n in operands(node)) or "nothing"

    raise VerificationError(
        f"{where(new)} reads {shown(new)}, where it read {shown(old)}",
        nodes=(*named(old), *named(new)),
    )


def _refuse_added(node: fx.Node) -> None:
    told = f"{where(node)} was added, and is neither a cast nor a use of one"
    raise VerificationError(told, nodes=named(node))


def _refuse_lost(nodes: Sequence[fx.Node]) -> None:
    told = f"{nodes[0].name} ({nodes[0].target}) got lost in the rewrite"
    raise VerificationError(told, nodes=[n.name for n in nodes])


# -- regions ---------------------------------------------------------------------------


def _region(
    pair: _Pair, part: Collection[fx.Node], gone: Collection[fx.Node]
) -> Region | None:
    old = [n for n in pair.gms[0].graph.nodes if n in part and n in gone]
    new = [n for n in pair.gms[1].graph.nodes if n in part and n not in gone]
    if not new and not any(has_effect(n.target) for n in old):
        return None  # what reads them still reads the same values
    if not old:
        _refuse_added(new[0])
    if not new or not pair.may.replace:
        _refuse_lost(old)
    _nothing_moved(pair, old, new)
    reads: tuple[dict[str, fx.Node], dict[str, fx.Node]] = {}, {}
    again: dict[fx.Node, fx.Node] = {}
    for side, nodes in enumerate((old, new)):
        for operand in (n for node in nodes for n in node.all_input_nodes):
            if operand not in part:
                name = pair.stood(operand, side)
                again[operand] = reads[side].setdefault(name, operand)
    old = _with_closed(pair, old, reads, again)
    inputs = []
    for name in reads[0] | reads[1]:
        one = reads[0].get(name) or pair.old.get(name)
        other = reads[1].get(name) or pair.new.get(name)
        if one is None or other is None:
            raise VerificationError(
                f"{where(new[0])} reads {name}, which the graph did not have",
                nodes=[n.name for n in old],
            )
        inputs.append((one, other))
    results = _results(pair, old, part)
    return Region(tuple(old), tuple(new), tuple(inputs), results, again)


def _with_closed(
    pair: _Pair,
    old: list[fx.Node],
    reads: tuple[dict[str, fx.Node], dict[str, fx.Node]],
    again: Mapping[fx.Node, fx.Node],
) -> list[fx.Node]:
    """The old side, with the calls that make values of no input which it alone reads.

    A mask that the graph computes of sizes is known; the new side may rely on it.
    """
    closed: set[fx.Node] = set()
    for name, node in list(reads[0].items()):
        if name in reads[1] or not _made_of_nothing(node):  # a size itself stays read
            continue
        del reads[0][name]
        for each in (n for n, first in again.items() if first is node):
            closed.update(_made_of_nothing(each) or ())
    every = closed.union(old)
    found = [n for n in pair.gms[0].graph.nodes if n in every]
    for operand in (
        n for node in found if node in closed for n in node.all_input_nodes
    ):
        if operand not in closed:  # a size
            reads[0].setdefault(operand.name, operand)
    return found


def _results(
    pair: _Pair, old: list[fx.Node], part: Collection[fx.Node]
) -> tuple[tuple[fx.Node, fx.Node], ...]:
    """The values of a region that others read, as the node of each graph."""
    found: dict[tuple[fx.Node, fx.Node], None] = {}
    for node in old:
        if node.name in pair.staying:
            continue
        for user in node.users:
            if user in part or user.name not in pair.staying:
                continue
            now = pair.new[user.name]
            pairs = zip(operands(user), operands(now), strict=False)
            found |= {(a, b): None for a, b in pairs if a is node}
    for one, other in found:
        if other not in part:
            _refuse_operands(one, other)
    return tuple(found)


def _nothing_moved(pair: _Pair, old: list[fx.Node], new: list[fx.Node]) -> None:
    """Checks that no value of a region is read, or recorded, on another side.

    No write to a value lies between the reads of it before and after, and no change
    of grad mode between calls that are differentiated.
    """
    inside = {*old, *new}
    reads: dict[int, list[int]] = {}
    recorded: list[int] = []
    for node in (*old, *new):
        place = pair.places[node]
        if any(t.requires_grad for t in tensors_of(node.meta.get("val"))):
            recorded.append(place)
        for storage in storages_of(n for n in node.all_input_nodes if n not in inside):
            reads.setdefault(storage, []).append(place)
    for at, node, written in pair.barriers:
        crossed = [reads[storage] for storage in written if storage in reads]
        if _changes_mode(node) and recorded:
            crossed.append(recorded)
        if any(min(places) <= at < max(places) for places in crossed):
            raise VerificationError(
                f"{where(new[0])} was moved past {where(node)}",
                nodes=[n.name for n in new],
            )


def _made_of_nothing(node: fx.Node) -> list[fx.Node] | None:
    """The calls that make a value of literals and sizes; None where tensors come in."""
    calls: dict[fx.Node, None] = {}
    pending = [node]
    while pending:
        call = pending.pop()
        # A size is an input of the graph, or a call asks for it.
        is_size = call.target is torch.ops.aten.sym_size.int or (
            call.op == "placeholder" and not tensors_of(call.meta.get("val"))
        )
        if call in calls or is_size:
            continue
        if call.op != "call_function" or calls_bodies(call) or has_effect(call.target):
            return None
        calls[call] = None
        pending += call.all_input_nodes
    return list(calls)


# -- metadata of nodes -----------------------------------------------------------------


def _changes_mode(node: fx.Node) -> bool:
    return node.target in compat.MODE_CHANGES


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


def _is_recorded_truly(node: fx.Node, operand: fx.Node) -> None:
    """Checks the dtype and shape that an added call is recorded with."""
    like = node.args[1] if node.target in OF_A_COPY else operand
    assert isinstance(like, fx.Node)
    known, said = (tensors_of(n.meta.get("val")) for n in (like, node))
    if not known or node.target in RESHAPES:
        return
    if node.target is with_dtypes:
        dtypes = [dtype for dtype in node.args[1] if dtype is not None]  # type: ignore[union-attr]
    else:
        dtype: Any = known[0].dtype
        if node.target in CASTS:
            second = node.args[1] if len(node.args) > 1 else None
            dtype = node.kwargs.get("dtype", second) or dtype
        elif node.target in SCALED_CASTS:
            dtype = torch.float32
        dtypes, known = [dtype] * len(said), known[:1] * len(said)
    expected = [(d, [*map(str, t.shape)]) for d, t in zip(dtypes, known, strict=True)]
    if expected != [(t.dtype, [*map(str, t.shape)]) for t in said]:
        told = [", ".join(f"{t.dtype} {[*t.shape]}" for t in v) for v in (said, known)]
        raise VerificationError(
            f"{where(node)} is recorded as {told[0]}, of {told[1]}", nodes=named(node)
        )


# -- facts of one call, from its arguments and its op's schema -------------------------


class HasArguments(Protocol):
    """A node, or a call as another graph would write it."""

    @property
    def args(self) -> Any: ...

    @property
    def kwargs(self) -> Any: ...


def operands(call: HasArguments) -> list[fx.Node]:
    """The nodes among the arguments, as often as they occur."""
    found: list[fx.Node] = []
    fx.map_arg((call.args, call.kwargs), found.append)
    return found


def literals(call: HasArguments, *, places: bool = True) -> list[str]:
    """The arguments that are no nodes, as text, in their order.

    Args:
        places: whether "%" stands in the place of each node.
    """
    found: list[str] = []
    pending: list[Any] = [call.kwargs, call.args]
    while pending:
        value = pending.pop()
        if isinstance(value, (list, tuple)):
            pending += reversed(value)
        elif isinstance(value, dict):
            pending += reversed([*value, *value.values()])
        elif isinstance(value, slice):
            pending += (value.step, value.stop, value.start)
        elif not isinstance(value, fx.Node):
            found.append(repr(value))
        elif places:
            found.append("%")
    return found


def calls_bodies(node: fx.Node) -> bool:
    """Whether a call runs sub-graphs: a checkpoint, a branch, a loop."""
    return node.target is checkpointed or node.target in CONTROL_FLOW


@lru_cache(maxsize=_OPS)
def is_view(target: Any) -> bool:
    """Whether a result of `target` is a view of an operand, by the schema."""
    return isinstance(target, compat.OpOverload) and any(
        r.alias_info is not None and not r.alias_info.is_write
        for r in compat.schema(target).returns
    )


def gives_its_operand(node: fx.Node) -> bool:
    """Whether a call writes to its first operand and returns that operand."""
    is_op = isinstance(node.target, compat.OpOverload)
    return is_op and bool(node.all_input_nodes) and _gives_its_first(node.target)


@lru_cache(maxsize=_OPS)
def _gives_its_first(target: Any) -> bool:
    schema = compat.schema(target)
    first = schema.arguments[0].alias_info if schema.arguments else None
    if first is None or not first.is_write or len(schema.returns) != 1:
        return False
    returned = schema.returns[0].alias_info
    return returned is not None and returned.is_write


@lru_cache(maxsize=_OPS)
def has_effect(target: Any) -> bool:
    """Whether a call writes or draws random numbers, and so matters even if unread."""
    return isinstance(target, compat.OpOverload) and (
        compat.schema(target).is_mutable
        or torch.Tag.nondeterministic_seeded in target.tags
    )
