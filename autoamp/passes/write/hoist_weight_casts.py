"""Takes weight casts out of a rewritten graph: the copies come in as extra inputs."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import fx

from autoamp.passes.functions import (
    checkpointed,
    low_weight,
    low_weight_unscaled,
    product,
)
from autoamp.passes.graph_record import Rewritten
from autoamp.passes.see.regions import CONTROL_FLOW
from autoamp.passes.write.copied import copied
from autoamp.passes.write.emitted import CAST_KIND, WEIGHT_PATH

FOLDED = "autoamp_folded"
"""In the `meta` of a graph: each constant that is a cast, to the constant that it is a
cast of."""


@dataclass
class Hoisted:
    """A graph with extra inputs at its end, each the copy of one of its other inputs.

    Attributes:
        gm: the graph.
        weights: for each extra input in order, the position of the input it copies.
    """

    gm: fx.GraphModule
    weights: list[int] = field(default_factory=list)


def hoist_weight_casts(rewritten: Rewritten, left: Collection[str] = ()) -> Hoisted:
    """A copy of `rewritten.gm` with its weight casts turned into extra inputs.

    Uses through which a gradient flows become `low_weight` nodes, one per use, so that
    weight gradients are summed in fp32.  Checkpointed regions, branches and loops get
    the copies handed in too, and cast nothing again when they recompute or iterate.

    Args:
        left: names of casts, and of calls of sub-graphs, that stay inside the graph.
    """
    return _Hoist(rewritten, left).run()


def folded_in(gm: fx.GraphModule) -> list[fx.Node]:
    """The constants of a graph that are casts of other constants."""
    known = gm.meta.get(FOLDED, {})
    return [n for n in gm.graph.find_nodes(op="get_attr") if str(n.target) in known]


def read_wide(gm: fx.GraphModule, count: int) -> tuple[int, ...]:
    """The positions, among the first `count` inputs, of those that an op reads itself.

    The rest are weights of which the ops read copies alone, and unused inputs.
    """
    inputs = gm.graph.find_nodes(op="placeholder")[:count]
    read = [any(_reads(gm, user, node) for user in node.users) for node in inputs]
    return tuple(i for i, wide in enumerate(read) if wide)


def _reads(gm: fx.GraphModule, user: fx.Node, value: fx.Node) -> bool:
    """Whether a user of `value` reads it, or in a checkpointed region some op does."""
    if user.target in (low_weight, low_weight_unscaled):
        return False
    if user.target is product:
        # A `product` that is handed a copy too gives `value` a gradient, no more.
        factors: Sequence[Any] = user.args[1:]
        with_copies = [pair for pair in (factors[:2], factors[2:]) if len(pair) > 1]
        return all(weight is not value for weight, _ in with_copies)
    if user.target is not checkpointed:
        return True
    body = getattr(gm, str(cast(fx.Node, user.args[0]).target))
    within = body.graph.find_nodes(op="placeholder")
    pairs = zip(within, user.args[1:], strict=True)
    inner = [node for node, given in pairs if given is value]
    return any(_reads(body, reader, node) for node in inner for reader in node.users)


class _Hoist:
    def __init__(self, rewritten: Rewritten, left: Collection[str]) -> None:
        self.whole = rewritten
        self.left = left
        self.gm, _ = copied(rewritten.gm)
        self.graph = self.gm.graph
        self.placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        self.copies: dict[fx.Node, fx.Node] = {}

    def run(self) -> Hoisted:
        for node in [n for n in self.graph.nodes if n.name not in self.left]:
            if node.meta.get(CAST_KIND) == "weight":
                self._hoist(node)
            elif node.target is checkpointed:
                self._hoist_from_region(node)
            elif node.target in CONTROL_FLOW:
                self._hoist_from_bodies(node)
        position = {n: i for i, n in enumerate(self.placeholders)}
        return Hoisted(self.gm, [position[weight] for weight in self.copies])

    def _hoist(self, cast: fx.Node) -> None:
        weight = cast.all_input_nodes[0]
        if weight.op == "get_attr":
            # A constant is no input, so nobody could hand in a copy of it.
            self._fold_constant(cast, weight)
            return
        copy = self._copy_of(weight, cast)
        trained = self.whole.facts.nodes[weight.name].requires_grad
        for user in list(cast.users):
            reader = self.whole.facts.nodes.get(user.name)
            # Without a gradient the copy is read directly: a Function costs 1.6 times a
            # small cast.
            flows = trained and (reader is None or reader.requires_grad)
            if user.target is low_weight or not flows:
                user.replace_input_with(cast, copy)
                continue
            with self.graph.inserting_before(user):
                use = self.graph.create_node(
                    "call_function", low_weight, (weight, copy), {}, f"{copy.name}_use"
                )
            use.meta = {k: v for k, v in cast.meta.items() if k != CAST_KIND}
            user.replace_input_with(cast, use)
        self.graph.erase_node(cast)

    def _copy_of(self, weight: fx.Node, like: fx.Node) -> fx.Node:
        """The extra input that is the copy of placeholder `weight`."""
        # Tied weights are one placeholder, and get one copy.
        if weight not in self.copies:
            # Copies come after all other inputs and in the order of `weights`, as the
            # caller hands them in.
            last = [*self.placeholders, *self.copies.values()][-1]
            with self.graph.inserting_after(last):
                copy = self.graph.placeholder(f"{weight.name}_copy")
            path = weight.meta.get("autoamp_path", "")
            copy.meta = {**like.meta, WEIGHT_PATH: path}
            self.copies[weight] = copy
        return self.copies[weight]

    def _fold_constant(self, cast: fx.Node, source: fx.Node) -> None:
        """Casts a tensor constant of a captured graph once, now.

        Dynamo passes every tensor that a model owns as an input; an attribute of the
        graph is a literal of the program, and only the graph itself could write to it.
        """
        # Folded, the constant would miss the graph's own writes to it.
        if self.whole.facts.nodes[source.name].storage in self.whole.facts.mutated:
            return
        value = operator.attrgetter(str(source.target))(self.gm)
        self.gm.register_buffer(cast.name, value.detach().to(self.whole.low))
        known = self.gm.meta.get(FOLDED, {})
        self.gm.meta[FOLDED] = {**known, cast.name: str(source.target)}
        with self.graph.inserting_before(cast):
            folded = self.graph.get_attr(cast.name)
        folded.meta = dict(cast.meta)
        cast.replace_all_uses_with(folded)
        self.graph.erase_node(cast)

    def _hoist_from_region(self, call: fx.Node) -> None:
        """Hands a checkpointed region the copies of the weights among its operands."""
        body_node = call.args[0]
        assert isinstance(body_node, fx.Node)
        hoisted = self._hoisted_body(body_node)
        if hoisted is None:
            return
        operands = call.args[1:]
        extra: list[fx.Node] = []
        casts = [n for n in hoisted.gm.graph.nodes if n.op == "placeholder"]
        for at, copy in zip(hoisted.weights, casts[len(operands) :], strict=True):
            weight = operands[at]
            if not isinstance(weight, fx.Node) or weight.op != "placeholder":
                return  # handed a computed tensor: the region casts it itself
            extra.append(self._copy_of(weight, copy))
        setattr(self.gm, str(body_node.target), hoisted.gm)
        call.args = (*call.args, *extra)

    def _hoisted_body(self, body_node: fx.Node) -> Hoisted | None:
        body = getattr(self.gm, str(body_node.target))
        inner = next((r for r in self.whole.bodies if r.gm is body), None)
        return None if inner is None else hoist_weight_casts(inner, self.left)

    def _hoist_from_bodies(self, call: fx.Node) -> None:
        """Hands the bodies of a branch or loop the copies of the weights they read.

        All sub-graphs of one call are called with the same values, so that each of them
        gets every copy, even the condition of a loop.
        """
        positions = CONTROL_FLOW[call.target]
        shared: Sequence[Any] = tuple(cast(Any, call.args[positions.shared]))
        copies: dict[int, fx.Node] = {}
        own: dict[int, tuple[fx.GraphModule, dict[int, fx.Node]]] = {}
        for body_at in positions.bodies:
            found = self._copies_in(call.args[body_at], shared)
            if found is None:
                continue
            own[body_at] = found
            for at, copy in found[1].items():
                copies[at] = self._copy_of(shared[at], copy)
        if not copies:
            return
        for body_at in (*positions.bodies, *positions.others):
            body_node = call.args[body_at]
            assert isinstance(body_node, fx.Node)
            name = str(body_node.target)
            body, known = own.get(body_at) or (copied(getattr(self.gm, name))[0], {})
            _take_copies(body, known, copies)
            setattr(self.gm, name, body)
        call.update_arg(positions.shared, (*shared, *copies.values()))

    def _copies_in(
        self, body_node: Any, shared: Sequence[Any]
    ) -> tuple[fx.GraphModule, dict[int, fx.Node]] | None:
        """A body whose weight casts are inputs, each input by its position in `shared`.

        The result is None where the body has no weight cast, or casts a value that this
        graph computes.
        """
        hoisted = self._hoisted_body(body_node)
        if hoisted is None or not hoisted.weights:
            return None
        inputs = [n for n in hoisted.gm.graph.nodes if n.op == "placeholder"]
        count = len(inputs) - len(hoisted.weights)
        first = count - len(shared)
        found: dict[int, fx.Node] = {}
        for at, copy in zip(hoisted.weights, inputs[count:], strict=True):
            weight = shared[at - first] if at >= first else None
            if not isinstance(weight, fx.Node) or weight.op != "placeholder":
                return None
            found[at - first] = copy
        return hoisted.gm, found


def _take_copies(
    body: fx.GraphModule, known: dict[int, fx.Node], copies: dict[int, fx.Node]
) -> None:
    """Gives `body` one input for each of `copies`, in that order, after its others."""
    given = [n for n in body.graph.nodes if n.op == "placeholder"]
    last = [n for n in given if n not in known.values()][-1]
    for at, like in copies.items():
        if at in known:
            copy = known[at]
            last.append(copy)
        else:
            with body.graph.inserting_after(last):
                copy = body.graph.placeholder(like.name)
            copy.meta = dict(like.meta)
        last = copy
    body.recompile()
