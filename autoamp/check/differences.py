"""Finds how two graphs differ, and proves that all the rest is the same program.

A graph and the graph that a pass made of it go in.  Nodes are told by their names.  A
node of the graph before that is there after, with the same target, *stays*.  A node
that the pass added and that stands for one of its operands (a cast, a use of a copy, a
gradient that is scaled) *passes on*.  All other nodes form regions: calls that are
gone, and the calls that came in their place.  Every node that stays must read the
values that it read, in the same dtypes and shapes, and nothing may move past a write.

A region is not judged here: `alike.py` runs both sides of it.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import networkx as nx
import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.nodes import tensors_of, written_values
from autoamp.check.standin import named, where
from autoamp.errors import VerificationError
from autoamp.graph_functions import (
    FOR_COMPILERS,
    checkpointed,
    laid_out,
    low_uses,
    low_weight,
    low_weight_unscaled,
    saturating_cast,
    scale_grad,
    scaled_result,
    traced_scale_grad_,
    traced_scale_grad_apart,
    unscale_grad,
    unscale_grad_,
    unscale_half,
)
from autoamp.trace.control_flow import CONTROL_FLOW

_ATEN = torch.ops.aten

CASTS = frozenset({_ATEN._to_copy.default, saturating_cast})
USES = frozenset({low_weight, low_uses})
EDGE = frozenset(
    {
        low_weight_unscaled,
        scale_grad,
        scaled_result,
        unscale_grad,
        unscale_grad_,
        unscale_half,
        traced_scale_grad_,
        traced_scale_grad_apart,
        *FOR_COMPILERS.values(),
    }
)
_SCALED_CASTS = frozenset({scaled_result, FOR_COMPILERS[scaled_result]})
RESHAPES = frozenset({_ATEN.unsqueeze.default, _ATEN.squeeze.dim})
LAYOUTS = frozenset({laid_out})
COPIES = frozenset({_ATEN.clone.default})

_OWN_MEMORY = CASTS | LAYOUTS | COPIES
"""Added calls whose result does not follow later writes to the operand."""


@dataclass(frozen=True)
class May:
    """The changes that a pass may make.

    Attributes:
        add: targets of calls that stand for their first operand.
        copies: for each input that is added, the input that it is a copy of; None for
            an input that the added calls alone read.
        replace: whether calls may be replaced by calls that give the same numbers.
        lay_out: whether values inside the graph may have other strides.
        rename: the functions that may be called in the place of a function, on the
            same operands; what they compute is checked elsewhere.
    """

    add: frozenset[Any] = frozenset()
    copies: Mapping[str, str | None] = field(default_factory=dict)
    replace: bool = False
    lay_out: bool = False
    rename: Mapping[Any, Collection[Any]] = field(default_factory=dict)


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
    found = _Comparison(before, after, may)
    regions = found.regions()
    for name, body in _bodies(before).items():
        other = getattr(after, name, None)
        if other is body or not found.is_called(name):
            continue
        if not isinstance(other, fx.GraphModule):
            raise VerificationError(f"the sub-graph {name} got lost")
        inner = replace(may, copies=found.copies_in(name, other))
        regions += differences(body, other, inner)
    return regions


def _bodies(gm: fx.GraphModule) -> dict[str, fx.GraphModule]:
    children = gm.named_children()
    return {n: child for n, child in children if isinstance(child, fx.GraphModule)}


class _Comparison:
    """One graph beside the graph that was made of it."""

    def __init__(self, before: fx.GraphModule, after: fx.GraphModule, may: May) -> None:
        self.gms = before, after
        self.may = may
        self.old = {n.name: n for n in before.graph.nodes}
        self.new = {n.name: n for n in after.graph.nodes}
        self.staying = {
            name
            for name, node in self.new.items()
            if (twin := self.old.get(name)) is not None
            and twin.op == node.op
            and (
                twin.target is node.target
                or (node.op != "call_function" and twin.target == node.target)
                or node.target in may.rename.get(twin.target, ())
            )
        }
        self.gone = [n for n in before.graph.nodes if n.name not in self.staying]
        self.added = [n for n in after.graph.nodes if n.name not in self.staying]
        self.old_stands: dict[str, str] = {}
        self.new_stands: dict[str, str] = {}
        self.views: dict[Any, str] = {}
        self._same_inputs()
        self._pass_on()
        self._no_stale_copy()
        if may.replace:
            self._retold()

    # -- what stands for what ------------------------------------------------------

    def _same_inputs(self) -> None:
        """Checks the inputs: those of before in their order, then those declared."""
        olds, news = (
            [n.name for n in gm.graph.nodes if n.op == "placeholder"] for gm in self.gms
        )
        extra = [name for name in news if name not in self.may.copies]
        if extra != olds:
            raise VerificationError(f"the inputs changed from {olds} to {news}")
        for name, weight in self.may.copies.items():
            if weight is not None and name in self.new:
                self.new_stands[name] = weight

    def _pass_on(self) -> None:
        """Finds the nodes that stand for another value, on both sides.

        An op in place gives its operand; two equal views of one value are one value.
        """
        for node in self.gms[0].graph.nodes:
            self._follow(node, self.old_stands)
        self.gone = [n for n in self.gone if not self._is_gone_cast(n)]
        rest = []
        for node in self.gms[1].graph.nodes:
            if node.name in self.staying:
                self._follow(node, self.new_stands)
            elif node.op != "placeholder":
                source = self._passed(node)
                if source is None:
                    rest.append(node)
                else:
                    self.new_stands[node.name] = source
        self.added = rest

    def _follow(self, node: fx.Node, stands: dict[str, str]) -> None:
        """Notes what a node of the program stands for."""
        if _gives_its_operand(node):
            stands[node.name] = self._named(node.all_input_nodes[0], stands)
        elif _is_view(node.target):
            known = self.views.setdefault(self._key(node, stands), node.name)
            if known != node.name:
                stands[node.name] = known

    def _key(self, node: fx.Node, stands: Mapping[str, str]) -> tuple[Any, ...]:
        """The call and the operands that decide which elements a view shows."""
        read = [self._named(n, stands) for n in _operands(node)]
        return (node.target, *read, *_literals(node))

    def _retold(self) -> None:
        """Counts calls with the same target but other arguments as replaced."""
        for name in sorted(self.staying):
            old, new = self.old[name], self.new[name]
            if new.op != "call_function" or _calls_bodies(new):
                continue
            counts = [len(list(_operands(node))) for node in (old, new)]
            if counts[0] != counts[1] or _literals(old) != _literals(new):
                self.staying.discard(name)
                self.gone.append(old)
                self.added.append(new)

    def _no_stale_copy(self) -> None:
        """Checks that no added copy is read after a write to the value copied."""
        written: dict[int, int] = {}
        made: dict[fx.Node, tuple[int, int]] = {}
        for at, node in enumerate(self.gms[1].graph.nodes):
            for operand in node.all_input_nodes:
                storage, when = made.get(operand, (-1, at))
                if node.op != "output" and written.get(storage, -1) > when:
                    raise VerificationError(
                        f"{where(node)} reads {operand.name}, a copy of a value that "
                        "was written to since",
                        nodes=(*named(node), operand.name),
                    )
            if node.name in self.new_stands and node.target in _OWN_MEMORY:
                for tensor in tensors_of(node.all_input_nodes[0].meta.get("val")):
                    made[node] = compat.storage_id(tensor), at
            for value in written_values(node):
                for tensor in tensors_of(value.meta.get("val")):
                    written[compat.storage_id(tensor)] = at

    def _is_gone_cast(self, node: fx.Node) -> bool:
        """Whether a node that is gone was a cast, for which copies were declared."""
        if not self.may.copies or node.target not in CASTS | USES:
            return False
        source = node.all_input_nodes[0]
        self.old_stands[node.name] = self._named(source, self.old_stands)
        return True

    def _passed(self, node: fx.Node) -> str | None:
        """The value that an added node stands for; None where it is of a region."""
        target = node.target
        if node.op == "get_attr":
            return self._folded(node)
        if target is operator.getitem:
            (source,) = node.all_input_nodes
            from_uses = source.target in USES
            return self.new_stands.get(source.name) if from_uses else None
        if target not in self.may.add:
            return self._repeated(node)
        first = node.args[0]
        if not isinstance(first, fx.Node):
            return None
        _kind_is_true(node, first)
        stood = self._named(first, self.new_stands)
        if target in (low_weight, low_uses, low_weight_unscaled):
            copy = node.args[1]
            if not isinstance(copy, fx.Node) or (
                self._uncast(copy) != self._uncast(first)
            ):
                raise VerificationError(
                    f"{where(node)} takes the gradient of {first.name} for a copy of "
                    "something else",
                    nodes=named(node),
                )
        return stood

    def _repeated(self, node: fx.Node) -> str | None:
        """The view that an added node shows again, by another name of its operand."""
        if not self.may.add or not _is_view(node.target):
            return None
        return self.views.get(self._key(node, self.new_stands))

    def _uncast(self, node: fx.Node) -> str:
        """The value that a node stands for, or is a cast of."""
        while node.target in CASTS or node.target in _SCALED_CASTS:
            node = node.all_input_nodes[0]
        return self._named(node, self.new_stands)

    def _folded(self, node: fx.Node) -> str | None:
        """The constant of the graph before that a new constant is a cast of."""
        try:
            value = operator.attrgetter(str(node.target))(self.gms[1])
        except AttributeError:
            return None
        casts = [n for n in self.gms[0].graph.nodes if n.name == node.target]
        for cast in casts:
            (source,) = cast.all_input_nodes
            if source.op != "get_attr" or not isinstance(value, torch.Tensor):
                continue
            known = operator.attrgetter(str(source.target))(self.gms[0])
            if torch.equal(known.detach().to(value.dtype), value):
                return str(source.name)
        return None

    def _named(self, node: fx.Node, stands: Mapping[str, str]) -> str:
        return stands.get(node.name, node.name)

    # -- regions -------------------------------------------------------------------

    def regions(self) -> list[Region]:
        """The regions; checks every node that stays.

        Raises:
            VerificationError: something outside every region differs.
        """
        self._same_order()
        graph = nx.Graph()
        gone, added = set(self.gone), set(self.added)
        graph.add_nodes_from([*gone, *added])
        for node in (*gone, *added):
            for operand in node.all_input_nodes:
                if operand in gone or operand in added:
                    graph.add_edge(operand, node)
        for name in self.staying:
            old, new = self.old[name], self.new[name]
            self._same_node(old, new, gone, added, graph)
        for node in self.added:
            if node.name in self.old and self.old[node.name] in gone:
                graph.add_edge(node, self.old[node.name])
        parts = nx.connected_components(graph)
        places = {n: i for gm in self.gms for i, n in enumerate(gm.graph.nodes)}
        found = [self._region(part, gone, places) for part in parts]
        return [each for each in found if each is not None]

    def _same_order(self) -> None:
        one, other = (
            [n.name for n in gm.graph.nodes if n.name in self.staying]
            for gm in self.gms
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
        reads, rereads = list(_operands(old)), list(_operands(new))
        more = rereads[len(reads) :]
        renamed = old.target is not new.target and new.op == "call_function"
        if more and not (
            (_calls_bodies(new) and self._are_copies(more, reads))
            or (renamed and all(n.name in self.may.copies for n in more))
        ):
            self._differs(old, new)
        if len(rereads) < len(reads):
            self._differs(old, new)
        for one, other in zip(reads, rereads, strict=False):
            if one in gone and other in added:
                graph.add_edge(one, other)
            elif one.name == other.name and one.name in self.staying:
                pass  # which is checked by itself
            elif self._named(one, self.old_stands) != self._named(
                other, self.new_stands
            ):
                self._differs(old, new)
            if _differ(one, other, strides=False):
                raise VerificationError(
                    f"{where(new)} reads {other.name} as "
                    f"{_kinds(other, strides=False)}, where it read "
                    f"{_kinds(one, strides=False)}",
                    nodes=(*named(old), *named(new)),
                )
        if not more and not renamed and _literals(old) != _literals(new):
            self._differs(old, new)
        if _differ(old, new, strides=not self.may.lay_out):
            raise VerificationError(
                f"{where(new)} is recorded as {_kinds(new, strides=True)}, where it "
                f"was {_kinds(old, strides=True)}",
                nodes=named(old),
            )

    def _are_copies(self, more: list[fx.Node], reads: list[fx.Node]) -> bool:
        known = {self._named(n, self.old_stands) for n in reads}
        return all(self._named(n, self.new_stands) in known for n in more)

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
        if not new and not any(_is_read(n, part) or _has_effect(n) for n in old):
            return None  # nothing reads what is gone
        names = [n.name for n in old or new]
        if not self.may.replace or not old or not new:
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
            (sides[0], old, self.old_stands),
            (sides[1], new, self.new_stands),
        ):
            for node in nodes:
                for operand in node.all_input_nodes:
                    if operand not in part:
                        name = self._named(operand, stands)
                        first = side.setdefault(name, operand)
                        again[operand] = first
        old = self._with_closed(old, sides[0], sides[1], again)
        for name in sides[0] | sides[1]:
            one = sides[0].get(name) or self.old.get(name)
            other = sides[1].get(name) or self.new.get(name)
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
            made = None if node.op == "placeholder" else _made_of_nothing(node)
            if name in reread or made is None:
                continue
            del read[name]
            for each in (n for n, first in again.items() if first is node):
                closed |= dict.fromkeys(_made_of_nothing(each) or ())
        for node in closed:
            for operand in node.all_input_nodes:
                if operand.op == "placeholder":  # a size
                    read.setdefault(operand.name, operand)
        every = {*closed, *old}
        return [n for n in self.gms[0].graph.nodes if n in every]

    def _results(
        self,
        old: list[fx.Node],
        part: Collection[fx.Node],
    ) -> tuple[tuple[fx.Node, fx.Node], ...]:
        """The values of a region that others read, as the node of each graph."""
        found: dict[tuple[fx.Node, fx.Node], None] = {}
        for node in old:
            if node.name in self.staying:
                continue
            for user in node.users:
                if user in part or user.name not in self.staying:
                    continue
                pairs = zip(
                    _operands(user), _operands(self.new[user.name]), strict=False
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
        order = [n for n in self.gms[0].graph.nodes if n.name in self.staying]
        place = {**self._places(0), **self._places(1)}
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
        for at, node in enumerate(order):
            modes = node.target in compat.MODE_CHANGES
            if modes and recorded and min(recorded) <= at < max(recorded):
                self._moved(new, node)
            for value in written_values(node):
                for tensor in tensors_of(value.meta.get("val")):
                    first, last = spans.get(compat.storage_id(tensor), (0, 0))
                    if first <= at < last:
                        self._moved(new, node)

    def _moved(self, new: list[fx.Node], past: fx.Node) -> None:
        raise VerificationError(
            f"{where(new[0])} was moved past {where(past)}",
            nodes=[n.name for n in new],
        )

    def _places(self, side: int) -> dict[fx.Node, int]:
        """For each node how many nodes that stay come before it."""
        found: dict[fx.Node, int] = {}
        count = 0
        for node in self.gms[side].graph.nodes:
            found[node] = count
            count += node.name in self.staying
        return found

    # -- bodies --------------------------------------------------------------------

    def is_called(self, name: str) -> bool:
        """Whether the graph after still takes sub-graph `name` as an operand."""
        nodes = self.gms[1].graph.nodes
        return any(n.op == "get_attr" and n.target == name for n in nodes)

    def copies_in(self, name: str, body: fx.GraphModule) -> dict[str, str | None]:
        """The inputs that a body gained, each with the input that it is a copy of."""
        given = [n.name for n in body.graph.nodes if n.op == "placeholder"]
        for call in self.gms[1].graph.nodes:
            takes = [n for n in call.all_input_nodes if n.op == "get_attr"]
            if all(n.target != name for n in takes):
                continue
            operands = _given_to_body(call)
            if operands is None or len(operands) > len(given):
                return {}
            offset = len(given) - len(operands)
            known: dict[str, str] = {}
            found: dict[str, str | None] = {}
            for at, operand in enumerate(operands):
                if not isinstance(operand, fx.Node):
                    continue
                stood = self._named(operand, self.new_stands)
                inner = given[offset + at]
                if operand.name in self.may.copies and stood in known:
                    found[inner] = known[stood]
                known.setdefault(stood, inner)
            return found
        return {}


def _kind_is_true(node: fx.Node, operand: fx.Node) -> None:
    """Checks the dtype and shape that an added call is recorded with."""
    like = operand
    if node.target in (low_weight, low_uses, low_weight_unscaled):
        assert isinstance(node.args[1], fx.Node)
        like = node.args[1]
    dtype = None
    if node.target in CASTS:
        dtype = node.kwargs.get("dtype", node.args[1] if len(node.args) > 1 else None)
    elif node.target in (scaled_result, FOR_COMPILERS[scaled_result]):
        dtype = torch.float32
    known = tensors_of(like.meta.get("val"))
    said = tensors_of(node.meta.get("val"))
    if not known or node.target in RESHAPES:
        return
    for value in said:
        sizes = [str(size) for size in known[0].shape]
        if value.dtype != (dtype or known[0].dtype) or sizes != [
            *map(str, value.shape)
        ]:
            raise VerificationError(
                f"{where(node)} is recorded as {value.dtype} {[*value.shape]}, of "
                f"{known[0].dtype} {[*known[0].shape]}",
                nodes=named(node),
            )


def _given_to_body(call: fx.Node) -> list[Any] | None:
    """The values that a call gives to its body, the last inputs of the body."""
    if call.target is checkpointed:
        return list(call.args[1:])
    if call.target in CONTROL_FLOW:
        return list(call.args[CONTROL_FLOW[call.target].shared])  # type: ignore[arg-type]
    return None


def _is_view(target: Any) -> bool:
    """Whether a result of `target` is a view of an operand, by the schema."""
    return isinstance(target, compat.OpOverload) and any(
        r.alias_info is not None and not r.alias_info.is_write
        for r in compat.schema(target).returns
    )


def _gives_its_operand(node: fx.Node) -> bool:
    """Whether a call writes to its first operand and returns that operand."""
    if not isinstance(node.target, compat.OpOverload) or not node.all_input_nodes:
        return False
    schema = compat.schema(node.target)
    first = schema.arguments[0].alias_info if schema.arguments else None
    if first is None or not first.is_write or len(schema.returns) != 1:
        return False
    returned = schema.returns[0].alias_info
    return returned is not None and returned.is_write


def _made_of_nothing(node: fx.Node) -> list[fx.Node] | None:
    """The calls that make a value of literals and sizes; None where tensors come in."""
    found: dict[fx.Node, None] = {}
    pending = [node]
    while pending:
        each = pending.pop()
        if each in found:
            continue
        if each.op == "placeholder":
            if tensors_of(each.meta.get("val")):
                return None
            continue
        if each.op != "call_function" or _calls_bodies(each) or _has_effect(each):
            return None
        found[each] = None
        pending += each.all_input_nodes
    return list(found)


def _calls_bodies(node: fx.Node) -> bool:
    return node.target is checkpointed or node.target in CONTROL_FLOW


def _operands(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes among the arguments, as often as they occur; bodies aside."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return iter(found)


def _literals(node: fx.Node) -> list[str]:
    found = torch.utils._pytree.tree_leaves((node.args, node.kwargs))
    return [repr(value) for value in found if not isinstance(value, fx.Node)]


def _kinds(node: fx.Node, *, strides: bool) -> list[Any]:
    """The dtype and shape of each tensor of a node's value, and the strides."""
    return [
        (t.dtype, *map(str, t.shape), *(map(str, t.stride()) if strides else ()))
        for t in tensors_of(node.meta.get("val"))
    ]


def _differ(one: fx.Node, other: fx.Node, *, strides: bool) -> bool:
    """Whether two nodes are recorded otherwise; a graph for inductor records less."""
    if "val" not in other.meta:
        return False
    return _kinds(one, strides=strides) != _kinds(other, strides=strides)


def _shown(node: fx.Node) -> str:
    return ", ".join(n.name for n in _operands(node)) or "nothing"


def _is_read(node: fx.Node, part: Collection[fx.Node]) -> bool:
    return any(user not in part for user in node.users)


def _has_effect(node: fx.Node) -> bool:
    return isinstance(node.target, compat.OpOverload) and (
        compat.schema(node.target).is_mutable
        or torch.Tag.nondeterministic_seeded in node.target.tags
    )
