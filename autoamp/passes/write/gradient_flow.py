"""Finds where gradients flow in a captured graph, for scaling at its edge.

First the flow itself; then the tensors outside the edge, which have the gradient of the
caller; then the values inside whose gradients are left true.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

import torch
from torch import fx

from autoamp import compat
from autoamp.compat import OpOverload
from autoamp.dtypes import HIGH_DTYPE
from autoamp.errors import CaptureError
from autoamp.passes.graph_record import Rewritten
from autoamp.passes.ops import HIDDEN_WRITES, aliasing_arguments, base_name, is_inplace
from autoamp.passes.see.nodes import argument, operands_in, written_values
from autoamp.passes.write.emitted import CAST_KIND

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
        writes: each storage that is written to, with the names of the writing nodes and
            their positions in `order`.
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
        self.recording: dict[fx.Node, bool] = {}
        self.names: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        recording = torch.is_grad_enabled()
        for node in self.graph.nodes:
            self.recording[node] = recording
            if node.target is compat.SET_GRAD:
                recording = bool(node.args[0])
            # An in-place op gives its operand a new name.
            self.names[self.tensor(node)].append(node)
        positions = {n.name: i for n, i in self.order.items()}
        self.writes: dict[int, dict[str, int]] = defaultdict(dict)
        for node in self.before.nodes:
            for value in written_values(node):
                storage = self.storage(value)
                if storage in self.facts.mutated:
                    self.writes[storage][node.name] = positions[node.name]
        self._extended: set[str] = set()
        self._flowing: set[str] = set()
        self._grown: set[int] = set()
        self._find_flow()

    def results(self) -> list[fx.Node]:
        """The tensors that a gradient flows into and that are returned, or hooked.

        A hook is the user's, and is given true gradients, as those of the caller are.
        """
        before = next(n for n in self.before.nodes if n.op == "output")
        pairs = zip(_values(before), _values(self.output), strict=True)
        returned = [new for old, new in pairs if self.differentiable(old, new)]
        hooks = [n for n in self.graph.nodes if n.target is compat.REGISTER_HOOK]
        return returned + [node for node in hooks if self.carries(node)]

    def differentiable(self, before: fx.Node, node: fx.Node) -> bool:
        """Whether a gradient flows into `node`, which is `before` in the old graph."""
        flows = before.name in self._flowing or self.storage(before) in self._grown
        return flows and _is_float(node)

    def carries(self, node: fx.Node) -> bool:
        """Whether a gradient flows through `node`.

        It does through each node that we added, unless that stands where grad mode is
        off: a cast there has no gradient, and an alias that it shared with readers
        outside would have none either.
        """
        if node.name in self._flowing:
            return True
        return node.name not in self.facts.nodes and self.recording.get(node, True)

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
        if maker.target is compat.REGISTER_HOOK:
            return maker.all_input_nodes[:1]
        if not isinstance(maker.target, OpOverload) or maker.target is _CUT:
            return []
        sources = operands_in(maker, aliasing_arguments(maker.target))

        # Casts that we made are not in the facts, which would tell their memory.
        def may_share(source: fx.Node) -> bool:
            if not _is_float(source):
                return False
            read, shown = source.meta["val"].dtype, view.meta["val"].dtype
            # A cast has memory of its own; `view_as_real` changes the dtype and shares
            # it.
            if read != shown and not (read.is_complex or shown.is_complex):
                return False
            return self.storage(source) in (-1, self.storage(view))

        return [n for n in sources if may_share(n)]

    def is_of_an_op(self, node: fx.Node) -> bool:
        """Whether `node` is a torch op's result, all views of which are known."""
        maker = node
        if node.target is operator.getitem:
            (maker,) = node.all_input_nodes
        return isinstance(maker.target, OpOverload)

    def _find_flow(self) -> None:
        """Finds the nodes that a gradient may flow into, and the storages it grows to.

        They are more than in the facts: a tensor that is written to, directly or
        through a view, needs a gradient from then on.
        """
        recording = torch.is_grad_enabled()
        for node in self.before.nodes:
            if node.target is compat.SET_GRAD:
                recording = bool(node.args[0])
            if recording:
                sources = node.all_input_nodes
            else:
                # Under `no_grad` a call records nothing, but a tensor written to keeps
                # the history it had before.
                sources = [self.tensor(node)]
            fact = self.facts.nodes.get(node.name)
            if not (fact is not None and fact.requires_grad) and not any(
                n.name in self._flowing or self.storage(n) in self._grown
                for n in sources
            ):
                continue
            self._flowing.add(node.name)
            # `batch_norm` writes to its running statistics, through which no gradient
            # flows.
            is_hidden = (
                isinstance(node.target, OpOverload)
                and base_name(node.target) in HIDDEN_WRITES
            )
            if recording and not is_hidden:
                written = written_values(node)
                self._grown |= set(map(self.storage, written)) & self.facts.mutated
                # A write through a view rebases the history of the base as well.
                self._extended |= self._shown_by(written)

    def _shown_by(self, values: list[fx.Node]) -> set[str]:
        """The names of `values` and of the tensors they view in the captured graph."""
        found: set[str] = set()
        pending = list(values)
        while pending:
            node = pending.pop()
            if node.name in found:
                continue
            found.add(node.name)
            # `detach` shares memory with its operand and cuts the history: a write
            # through it gives the operand no new one.
            if node.target is not _CUT:
                storage = self.storage(node)
                sources = node.all_input_nodes
                pending += [n for n in sources if self.storage(n) == storage]
        return found


def _values(output: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(output.args, found.append)
    return found


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and (
        value.is_floating_point() or value.is_complex()
    )


# -- tensors outside the edge ----------------------------------------------------------
#
# Outside tensors have the caller's gradient, unscaled.  A result may be a view.  The
# caller may write to the view, and through it to the tensor that the result is a view
# of; autograd then makes the view's history anew, out of that tensor's history.  So
# gradients enter at the tensor that is no view, and all tensors from there to the
# result are outside.

Outside = dict[fx.Node, list[fx.Node]]
"""Each tensor outside, with the tensors outside that it is a view of."""


def find_outside(flow: GraphFlow, written: Sequence[fx.Node]) -> Outside:
    """The tensors beyond the edge of a graph; gradients enter at each that is no view.

    Args:
        written: the inputs that the graph writes results to.
    """
    found: Outside = {node: [] for node in written}
    _reach(flow, found, flow.results())
    _reach(flow, found, _older_views(flow, found))
    return found


def is_written(flow: GraphFlow, node: fx.Node) -> bool:
    """Whether the graph writes to the memory of a value."""
    return flow.storage(node) in flow.facts.mutated


def check_memory(flow: GraphFlow, written: Sequence[fx.Node]) -> None:
    """Checks that no input that is written to shares memory with another one.

    Raises:
        CaptureError: two such inputs share memory, and gradients flow into both.
    """
    storages = {flow.storage(node) for node in written}
    flowing = [node for node in flow.given if flow.differentiable(node, node)]
    every = dict.fromkeys([*written, *flowing])
    sharing = [node for node in every if flow.storage(node) in storages]
    if len(storages) < len(sharing):
        raise CaptureError(
            "the graph writes in place to an input that shares memory with another "
            "one, and both carry gradients; clone one of them before the call"
        )


def _older_views(flow: GraphFlow, outside: Outside) -> list[fx.Node]:
    """Views made before the last write to their tensor and read after it.

    The write makes the history of such views anew as well.
    """
    written = {flow.storage(node) for node in outside if is_written(flow, node)}
    return [
        node
        for node, names in flow.names.items()
        if flow.storage(node) in written
        and any(
            flow.at(user) > flow.last_write(node) > flow.at(node)
            for name in names
            for user in name.users
            if user.op != "output" and flow.carries(user)
        )
    ]


def _reach(flow: GraphFlow, outside: Outside, pending: list[fx.Node]) -> None:
    """Adds the `pending` tensors to `outside`, and all tensors they are views of."""
    while pending:
        node = flow.tensor(pending.pop())
        # The gradient of an input that is handed back does not enter the graph.
        if node in outside or node in flow.given:
            continue
        maker = node
        if node.target is operator.getitem:
            (maker,) = node.all_input_nodes
        sources = flow.viewed(maker, node)
        outside[node] = sources
        if sources and maker is not node:  # the maker's other views are outside too
            outside[node] = [maker]
            outside[maker] = [*outside.get(maker, []), *sources]
            pending += maker.users
        pending += sources


# -- true gradients inside -------------------------------------------------------------
#
# Gradients are scaled for the sake of low-precision ops.  An fp32 op between such an op
# and the edge of the graph needs no loss scale, so that the tensor at which the scale
# is put on or taken off is a choice: an embedding's table is far larger than the rows
# looked up, and a loss far smaller than the logits that are returned beside it.


def true_values(
    graph: fx.Graph,
    edges: Collection[fx.Node],
    flows: Callable[[fx.Node], bool],
    plain: Callable[[fx.Node], bool],
) -> set[fx.Node]:
    """The nodes of `graph` whose gradients are left true, without scaling.

    An fp32 op is such a node where each operand is such a node, or an fp32 edge, and
    where all operands together are at least as large as the op's result: the scale
    comes off no larger tensor.  (The sizes do not count where the op's backward gives a
    sparse gradient, which only a leaf can take.)

    Args:
        edges: inputs, where gradients leave the graph, and results, where they enter.
        flows: whether a gradient flows through a node.
        plain: whether a node is a torch op on memory that nothing writes to.
    """
    true: set[fx.Node] = set()
    for node in graph.nodes:
        if not (plain(node) and flows(node) and _is_fp32(node)):
            continue
        # An operand that is no tensor is several, any of which may carry gradients.
        read = [
            n
            for n in node.all_input_nodes
            if flows(n)
            and (not isinstance(n.meta.get("val"), torch.Tensor) or _is_float(n))
        ]
        is_sparse = argument(node, "sparse", False) is True
        if (
            read
            and all(_is_fp32(n) and (n in true or n in edges) for n in read)
            # The scale is a pass over the tensor it is put on, so the smaller one takes
            # it.
            and (_numel(node) <= sum(map(_numel, read)) or is_sparse)
        ):
            true.add(node)
    return true


def _is_fp32(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == HIGH_DTYPE


def _numel(node: fx.Node) -> int:
    return math.prod(compat.hint(size) for size in node.meta["val"].shape)
