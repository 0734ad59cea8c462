"""Finds the value of the graph before for which each node of two graphs stands.

A graph and the graph that a pass made of it go in.  Nodes are told by their names.  A
node of the graph before that is there after, with the same target, *stays*.  A node
that the pass added and that stands for one of its operands (a cast, a use of a copy, a
gradient that is scaled) *passes on*.  The nodes that are left are gone or added.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.nodes import tensors_of, written_values
from autoamp.check.allowed_changes import (
    CASTS,
    OWN_MEMORY,
    RESHAPES,
    SCALED_CASTS,
    USES,
    May,
)
from autoamp.check.call_facts import (
    calls_bodies,
    gives_its_operand,
    is_view,
    literals,
    operands,
)
from autoamp.check.standin import named, where
from autoamp.errors import VerificationError
from autoamp.graph_functions import (
    low_uses,
    low_weight,
    low_weight_unscaled,
    with_dtypes,
)


class Twins:
    """One graph beside the graph that was made of it.

    Attributes:
        gms: the graph before, and the graph after.
        may: the changes that the pass may make.
        old, new: the nodes of each graph by their names.
        staying: the names of the nodes that are in both, with one target.
        gone, added: the nodes that are in one graph alone and stand for no other.
        old_stands, new_stands: for a node that stands for another value, that value.
    """

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
        if gives_its_operand(node):
            stands[node.name] = self.named(node.all_input_nodes[0], stands)
        elif is_view(node.target):
            known = self.views.setdefault(self._key(node, stands), node.name)
            if known != node.name:
                stands[node.name] = known

    def _key(self, node: fx.Node, stands: Mapping[str, str]) -> tuple[Any, ...]:
        """The call and the operands that decide which elements a view shows."""
        read = [self.named(n, stands) for n in operands(node)]
        return (node.target, *read, *literals(node))

    def _retold(self) -> None:
        """Counts calls with the same target but other arguments as replaced."""
        for name in sorted(self.staying):
            old, new = self.old[name], self.new[name]
            if new.op != "call_function" or calls_bodies(new):
                continue
            counts = [len(list(operands(node))) for node in (old, new)]
            if counts[0] != counts[1] or literals(old) != literals(new):
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
            if node.name in self.new_stands and node.target in OWN_MEMORY:
                for tensor in tensors_of(node.all_input_nodes[0].meta.get("val")):
                    made[node] = compat.storage_id(tensor), at
            for value in written_values(node):
                for tensor in tensors_of(value.meta.get("val")):
                    written[compat.storage_id(tensor)] = at

    def _is_gone_cast(self, node: fx.Node) -> bool:
        """Whether a node that is gone was a cast that may be made outside the graph.

        A copy that was declared, or a constant of the graph, then holds its result.
        """
        apart = self.may.copies or self.may.fold
        if not apart or node.target not in CASTS | USES:
            return False
        source = node.all_input_nodes[0]
        self.old_stands[node.name] = self.named(source, self.old_stands)
        return True

    def _passed(self, node: fx.Node) -> str | None:
        """The value that an added node stands for; None where it is of a region."""
        target = node.target
        if node.op == "get_attr":
            return self._folded(node) if self.may.fold else None
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
        stood = self.named(first, self.new_stands)
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
        if not self.may.add or not is_view(node.target):
            return None
        return self.views.get(self._key(node, self.new_stands))

    def _uncast(self, node: fx.Node) -> str:
        """The value that a node stands for, or is a cast of."""
        while node.target in CASTS or node.target in SCALED_CASTS:
            node = node.all_input_nodes[0]
        return self.named(node, self.new_stands)

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

    def named(self, node: fx.Node, stands: Mapping[str, str]) -> str:
        return stands.get(node.name, node.name)


def _kind_is_true(node: fx.Node, operand: fx.Node) -> None:
    """Checks the dtype and shape that an added call is recorded with."""
    like = operand
    if node.target in (low_weight, low_uses, low_weight_unscaled):
        assert isinstance(node.args[1], fx.Node)
        like = node.args[1]
    known = tensors_of(like.meta.get("val"))
    said = tensors_of(node.meta.get("val"))
    if not known or node.target in RESHAPES:
        return
    if node.target is with_dtypes:
        dtypes = [dtype for dtype in node.args[1] if dtype is not None]  # type: ignore[union-attr]
    else:
        dtypes, known = [_dtype_made(node, known[0])] * len(said), known[:1] * len(said)
    expected = [(d, [*map(str, t.shape)]) for d, t in zip(dtypes, known, strict=True)]
    if expected != [(t.dtype, [*map(str, t.shape)]) for t in said]:
        raise VerificationError(
            f"{where(node)} is recorded as {_kinds(said)}, of {_kinds(known)}",
            nodes=named(node),
        )


def _dtype_made(node: fx.Node, like: torch.Tensor) -> Any:
    """The dtype that an added call gives of an operand like `like`."""
    if node.target in CASTS:
        told = node.kwargs.get("dtype", node.args[1] if len(node.args) > 1 else None)
        return told or like.dtype
    return torch.float32 if node.target in SCALED_CASTS else like.dtype


def _kinds(values: list[torch.Tensor]) -> str:
    return ", ".join(f"{t.dtype} {[*t.shape]}" for t in values)
