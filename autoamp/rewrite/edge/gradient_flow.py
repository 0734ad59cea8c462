"""Finds where gradients flow in a captured graph, for scaling at its edge."""

from __future__ import annotations

import operator
from collections import defaultdict

import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.nodes import operands_in, written_values
from autoamp.compat import OpOverload
from autoamp.op_names import base_name
from autoamp.ops import HIDDEN_WRITES, aliasing_arguments, is_inplace
from autoamp.rewrite.emitted import CAST_KIND
from autoamp.rewrite.rewritten import Rewritten

_CUT = torch.ops.aten.detach.default
"""The op whose result shares memory with the operand, but passes no gradient back."""


_COPY = torch.ops.aten.clone.default


class GraphFlow:
    """Where gradients flow in a graph that is run, and which nodes write to memory.

    Attributes:
        graph: the graph, which is about to be edited.
        order: the position of each node in the graph before the edit.
        given: the graph's inputs, without the weight copies.
        names: each tensor's node, with all nodes that stand for the same tensor.
        recording: for each node whether grad mode is on where it stands.
        output: the graph's output node.
    """

    def __init__(self, gm: fx.GraphModule, rewritten: Rewritten) -> None:
        """Args: `gm` is the graph made of `rewritten`."""
        self.before = rewritten.before.graph
        self.facts = rewritten.facts
        self.graph = gm.graph
        self.order: dict[fx.Node, int] = {n: i for i, n in enumerate(self.graph.nodes)}
        given = [n for n in self.before.nodes if n.op == "placeholder"]
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        self.given = placeholders[: len(given)]
        self.output: fx.Node = next(n for n in self.graph.nodes if n.op == "output")
        self.recording = self._recording()
        self.writes = self._writes()
        self._extended: set[str] = set()
        self._flowing, self._grown = self._flow()
        self.names = self._names_of_tensors()

    def results(self) -> list[fx.Node]:
        """The returned tensors that a gradient flows into."""
        before = next(n for n in self.before.nodes if n.op == "output")
        pairs = zip(_values(before), _values(self.output), strict=True)
        return [new for old, new in pairs if self.differentiable(old, new)]

    def differentiable(self, known: fx.Node, node: fx.Node) -> bool:
        flows = known.name in self._flowing or self.storage(known) in self._grown
        return flows and _is_float(node)

    def carries(self, node: fx.Node) -> bool:
        """Whether a gradient flows through `node`; always so for a node we added."""
        return node.name in self._flowing or node.name not in self.facts.nodes

    def is_plain(self, node: fx.Node) -> bool:
        return (
            isinstance(node.target, OpOverload)
            and CAST_KIND not in node.meta
            and self.storage(node) not in self.facts.mutated
        )

    def written_with_grad(self, node: fx.Node) -> bool:
        """Whether a write, direct or through a view, gives input `node` a new history.

        Such an input is no leaf, because torch forbids such a write to a leaf; for the
        same reason a region that might write to a parameter does not do so.  (A write
        through `detach` leaves the history of the input as it is.)
        """
        is_parameter = node.meta.get("autoamp_is_parameter", False)
        return _is_float(node) and not is_parameter and node.name in self._extended

    def storage(self, node: fx.Node) -> int:
        if node.name not in self.facts.nodes and node.target is _COPY:
            (node,) = node.all_input_nodes  # a copy we added, of a result written to
        fact = self.facts.nodes.get(node.name)
        return fact.storage if fact is not None else -1

    def tensor(self, node: fx.Node) -> fx.Node:
        """The node that made the tensor that `node` stands for."""
        while isinstance(node.target, OpOverload) and is_inplace(node.target):
            argument = node.args[0]
            assert isinstance(argument, fx.Node)
            node = argument
        return node

    def at(self, node: fx.Node) -> int:
        """The place of a node in the graph before the edit; -1 for a node of ours."""
        return self.order.get(node, -1)

    def last_write(self, value: fx.Node) -> int:
        """The place of the last write to the memory of `value`; -1 without a write."""
        if not isinstance(value.meta.get("val"), torch.Tensor):  # a tuple of views
            value = next(iter(value.users))
        return max(self.writes.get(self.storage(value), {}).values(), default=-1)

    def viewed(self, maker: fx.Node, view: fx.Node) -> list[fx.Node]:
        """The nodes that `view`, which op `maker` made, may be a view of."""
        if not isinstance(maker.target, OpOverload) or maker.target is _CUT:
            return []
        sources = operands_in(maker, aliasing_arguments(maker.target))
        return [n for n in sources if self._shares(n, view)]

    def is_of_an_op(self, node: fx.Node) -> bool:
        """Whether `node` is a torch op's result, all views of which are known."""
        maker = node
        if node.target is operator.getitem:
            (maker,) = node.all_input_nodes
        return isinstance(maker.target, OpOverload)

    def _shares(self, source: fx.Node, view: fx.Node) -> bool:
        """Whether two nodes may share memory; casts we made are not in the facts."""
        if not _is_float(source):
            return False
        left, right = source.meta["val"].dtype, view.meta["val"].dtype
        if left != right and not (left.is_complex or right.is_complex):
            return False
        return self.storage(source) in (-1, self.storage(view))

    def _flow(self) -> tuple[set[str], set[int]]:
        """The nodes that a gradient may flow into, and the storages it flows through.

        The result holds more than the facts do: a tensor that is written to, directly
        or through a view, needs a gradient from then on; a tensor that is written to
        under `no_grad` needs one if it did before.
        """
        names: set[str] = set()
        storages: set[int] = set()
        recording = torch.is_grad_enabled()
        for node in self.before.nodes:
            if node.target is compat.SET_GRAD:
                recording = bool(node.args[0])
            if recording:
                sources = node.all_input_nodes
            else:
                sources = [self.tensor(node)]
            fact = self.facts.nodes.get(node.name)
            if (fact is not None and fact.requires_grad) or any(
                n.name in names or self.storage(n) in storages for n in sources
            ):
                names.add(node.name)
                if recording:
                    written = _written(node)
                    storages |= set(map(self.storage, written)) & self.facts.mutated
                    self._extended |= self._shown_by(written)
        return names, storages

    def _shown_by(self, values: list[fx.Node]) -> set[str]:
        """The names of `values` and of the tensors they view in the captured graph."""
        found: set[str] = set()
        pending = list(values)
        while pending:
            node = pending.pop()
            if node.name in found:
                continue
            found.add(node.name)
            if node.target is not _CUT:
                storage = self.storage(node)
                sources = node.all_input_nodes
                pending += [n for n in sources if self.storage(n) == storage]
        return found

    def _recording(self) -> dict[fx.Node, bool]:
        """For each node whether grad mode is on where it stands."""
        found: dict[fx.Node, bool] = {}
        on = torch.is_grad_enabled()
        for node in self.graph.nodes:
            found[node] = on
            if node.target is compat.SET_GRAD:
                on = bool(node.args[0])
        return found

    def _writes(self) -> dict[int, dict[str, int]]:
        """For each storage its writing nodes, with their positions in `order`."""
        positions = {n.name: i for n, i in self.order.items()}
        writes: dict[int, dict[str, int]] = defaultdict(dict)
        for node in self.before.nodes:
            for value in written_values(node):
                storage = self.storage(value)
                if storage in self.facts.mutated:
                    writes[storage][node.name] = positions[node.name]
        return writes

    def _names_of_tensors(self) -> dict[fx.Node, list[fx.Node]]:
        """Each tensor with all its names: an in-place op gives its operand a new name.

        A name is a node that stands for the tensor.
        """
        names: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in self.graph.nodes:
            names[self.tensor(node)].append(node)
        return names


def _written(node: fx.Node) -> list[fx.Node]:
    """The operands that a call may give a new history; running statistics have none."""
    target = node.target
    if isinstance(target, OpOverload) and base_name(target) in HIDDEN_WRITES:
        return []
    return written_values(node)


def _values(output: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(output.args, found.append)
    return found


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and (
        value.is_floating_point() or value.is_complex()
    )
