"""Rewrites a graph that a user gives: any inputs and results, and any sizes.

The passes take a flat graph: its inputs are tensors and numbers, and its result is a
tuple of them.  `rewrite_given` makes that graph of the given one, with sizes and
numbers free wherever the trace allows it; the rewritten graph gets the inputs and the
results of the given graph back, and checks for all that the trace had to fix.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx import immutable_collections
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.errors import CaptureError
from autoamp.passes.functions.inputs import (
    LEAF,
    Path,
    check_condition,
    check_number,
    check_structure,
    check_tensor,
    check_value,
    parts,
    sized,
    structure,
    torchs_tuple,
)
from autoamp.passes.options import PassOptions
from autoamp.passes.run import rewrite_graph
from autoamp.passes.see.normalise import UNTRACED

_OURS = __name__.partition(".")[0]


@dataclass(frozen=True)
class _Leaf:
    """One flat input: how it is reached from an input of the given graph.

    Attributes:
        name: the name in the user's terms: `x`, `batch['mask']`.
        is_read: whether the given graph has a reader of it.
    """

    value: Any
    name: str
    paths: tuple[Path, ...] = ()
    is_read: bool = True


class _Results:
    """Takes the results of a graph apart, and knows how they lay."""

    def __init__(self) -> None:
        self.whole: Any = None

    def apart(self, whole: Any) -> tuple[Any, ...]:
        """The values of a graph's result, each by itself."""
        self.whole = whole
        return tuple(self._values(whole))

    def _values(self, value: Any) -> Iterator[Any]:
        found = parts(value)
        if found is not None:
            for _, part in found:
                yield from self._values(part)
        elif isinstance(value, _COMPUTED):
            yield value

    def node_of(self, graph: fx.Graph, values: Iterator[Any]) -> Any:
        """The same result made of other values, as an argument of a node."""
        return self._made(graph, self.whole, values)

    def _made(self, graph: fx.Graph, value: Any, values: Iterator[Any]) -> Any:
        found = parts(value)
        if found is None:
            return next(values) if isinstance(value, _COMPUTED) else value
        inner = [self._made(graph, part, values) for _, part in found]
        kind = type(value)
        if isinstance(value, dict):
            keyed = dict(zip(value, inner, strict=True))
            if kind in (dict, immutable_collections.immutable_dict):
                return keyed
            if dataclasses.is_dataclass(value):
                return graph.call_function(kind, (), keyed)
            return graph.call_function(kind, ([*keyed.items()],))
        if isinstance(value, list):
            return inner
        if kind is tuple:
            return tuple(inner)
        if hasattr(value, "_fields"):
            return kind(*inner)
        if isinstance(value, tuple):
            return graph.call_function(torchs_tuple, (kind.__name__, tuple(inner)))
        names = [path[1] for path, _ in found]
        return graph.call_function(kind, (), dict(zip(names, inner, strict=True)))


_COMPUTED = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class _Flat:
    """A given graph as the passes take one.

    Attributes:
        gm: the flat graph.
        inputs: for each input of the given graph, its flat inputs and its structure.
        results: takes the result of the flat graph apart.
    """

    gm: fx.GraphModule
    inputs: list[tuple[str, list[_Leaf]]]
    results: _Results

    @property
    def values(self) -> list[Any]:
        """The value of each flat input."""
        return [leaf.value for _, leaves in self.inputs for leaf in leaves]


def rewrite_given(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    options: PassOptions,
    low: torch.dtype,
) -> fx.GraphModule:
    """The rewritten graph of `gm`, called like `gm`, with the results of `gm`.

    Raises:
        AutoampError: a pass failed, or the inputs are not those of the graph.
    """
    if compat.in_capture():  # Dynamo checks the inputs of a graph, and its results
        return rewrite_graph(gm, inputs, options, low).gm
    inputs = _one_for_each(gm, inputs)
    flat = _flattened(gm, inputs)
    rewritten, fakes, sizes = _with_most_free(flat, options, low)
    graph = rewritten.graph
    _check_inputs(graph, _restore_inputs(graph, gm, flat), fakes, sizes)
    (output,) = graph.find_nodes(op="output")
    with graph.inserting_before(output):
        made = flat.results.node_of(graph, iter(pytree.tree_leaves(output.args[0])))
    output.args = (made,)
    if _takes_trees(gm):
        compat.take_trees_like(rewritten, gm)
    _make_traceable(graph)
    for node in graph.nodes:
        node.meta.setdefault("val", None)  # checks give nothing
    rewritten.recompile()
    compat.make_code(rewritten)  # Dynamo does not follow code that is made later
    _keep_mode(rewritten, gm)
    return rewritten


_BY_MODE = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.RReLU,
)
"""Layers of torch's that compute something else in training mode."""


def _keep_mode(rewritten: fx.GraphModule, gm: fx.GraphModule) -> None:
    """Has `rewritten` refuse another mode, in which `gm` would compute otherwise."""
    calls = gm.graph.find_nodes(op="call_module")
    called = (gm.get_submodule(str(node.target)) for node in calls)
    inside = (each for module in called for each in module.modules())
    mode = gm.training
    rewritten.training = mode
    if not any(isinstance(each, _BY_MODE) for each in inside):
        return

    def train(self: fx.GraphModule, wanted: bool = True) -> fx.GraphModule:
        if wanted is not mode:
            raise CaptureError(
                f"the graph was rewritten in {'training' if mode else 'eval'} mode, "
                "in which it computes; call train() or eval() on the given graph, "
                "and autoamp.rewrite again"
            )
        return self

    # The class of a GraphModule is its own.
    type(rewritten).train = train  # type: ignore[method-assign, assignment]


def _make_traceable(graph: fx.Graph) -> None:
    """Has the code of a graph wrap what no trace of that code may look into.

    Torch traces the code of a graph when a saved graph is loaded.
    """
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        operands = (*node.args, *node.kwargs.values())
        is_op = isinstance(node.target, compat.OpOverload) and node.all_input_nodes
        if is_op and not any(isinstance(each, fx.Node) for each in operands):
            node.args, node.target = (node.target, *node.args), sized
        made_here = getattr(node.target, "__module__", "").partition(".")[0] == _OURS
        if made_here or isinstance(node.target, type):
            node.meta["is_wrapped"] = True


def _with_most_free(
    flat: _Flat, options: PassOptions, low: torch.dtype
) -> tuple[fx.GraphModule, Sequence[Any], Any]:
    """The rewritten graph with as many sizes and numbers free as the trace allows.

    Returns:
        The graph, the inputs it was traced with, and the `FreeSizes`, or None.
    """
    values = flat.values
    if compat.current_fake_mode(values) is None and all(map(_may_be_free, values)):
        # A size of 1 stays 1 where an op stretches it to the size of another tensor.
        for is_free in (lambda _: True, lambda n: type(n) is int and n > 1):
            fakes, sizes = compat.free_inputs(values, is_free)
            made = None
            # The last attempt, in which nothing is free, reports what it is.
            with contextlib.suppress(Exception), compat.oblivious(), compat.quietly():
                made = rewrite_graph(flat.gm, fakes, options, low)
            # A call that stays whole gives the sizes of the example.
            if made is not None and not made.before.meta.get(UNTRACED):
                return made.gm, fakes, sizes
    return rewrite_graph(flat.gm, values, options, low).gm, values, None


def _may_be_free(value: Any) -> bool:
    plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    if isinstance(value, torch.Tensor):
        return plain and value.layout == torch.strided and not value.is_quantized
    return True


# -- inputs ----------------------------------------------------------------------------


def _one_for_each(gm: fx.GraphModule, inputs: Sequence[Any]) -> Sequence[Any]:
    """`inputs`, of which there is one for each input of the graph."""
    wanted = len(gm.graph.find_nodes(op="placeholder"))
    is_tensor = isinstance(inputs, torch.Tensor)
    if _takes_trees(gm) and not is_tensor:
        inputs = pytree.tree_leaves(inputs)
    if is_tensor or len(inputs) != wanted:
        given = "one tensor" if is_tensor else len(inputs)
        message = (
            f"the graph has {wanted} inputs, but {given} given as example inputs; give "
            "a sequence of one value per input"
        )
        raise CaptureError(message)
    return inputs


def _flattened(gm: fx.GraphModule, inputs: Sequence[Any]) -> _Flat:
    """The flat graph of `gm`; see `_Flat`."""
    graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
    found, results = list[tuple[str, list[_Leaf]]](), _Results()
    remaining = iter(inputs)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            value, name = next(remaining), str(node.target).strip("*")
            leaves = [*_leaves(value, name, (), bool(node.users))]
            found.append((structure(value), leaves))
            if parts(value) is None:
                values[node] = compat.copied_placeholder(graph, node)
                continue
            made = [graph.placeholder(f"{node.name}_part") for _ in leaves]
            values[node] = graph.call_function(_rebuilding(value), tuple(made))
        elif node.op == "output":
            whole = fx.map_arg(node.args[0], values.__getitem__)
            graph.output(graph.call_function(results.apart, (whole,)))
        else:
            values[node] = graph.node_copy(node, values.__getitem__)
    return _Flat(compat.graph_module(gm, graph), found, results)


def _takes_trees(gm: fx.GraphModule) -> bool:
    """Whether the code of a graph flattens its arguments itself."""
    return getattr(gm, "_in_spec", None) is not None


def _leaves(
    value: Any, name: str, paths: tuple[Path, ...], is_read: bool
) -> Iterator[_Leaf]:
    found = parts(value)
    if found is None:
        yield _Leaf(value, name, paths, is_read)
        return
    for path, part in found:
        kind, key = path
        inner = f"{name}[{key!r}]" if kind == "item" else f"{name}.{key}"
        yield from _leaves(part, inner, (*paths, path), is_read)


def _rebuilding(value: Any) -> Callable[..., Any]:
    """A function from the leaves of a container to a container like it."""

    def build(like: Any, leaves: Iterator[Any]) -> Any:
        found = parts(like)
        if found is None:
            return next(leaves)
        made = [build(part, leaves) for _, part in found]
        if isinstance(like, tuple):
            plain = hasattr(like, "_fields")
            return type(like)(*made) if plain else type(like)(made)
        if isinstance(like, list):
            return type(like)(made)
        new = copy.copy(like)
        for ((kind, key), _), part in zip(found, made, strict=True):
            if kind == "item":
                new[key] = part
            else:
                object.__setattr__(new, key, part)
        return new

    def rebuilt(*leaves: Any) -> Any:
        return build(value, iter(leaves))

    return rebuilt


_Input = tuple[fx.Node, str, list[_Leaf], list[fx.Node]]
"""An input of the given graph in the rewritten one: its placeholder, its structure, and
its leaves with their nodes."""


def _restore_inputs(graph: fx.Graph, gm: fx.GraphModule, flat: _Flat) -> list[_Input]:
    """Gives the rewritten graph the placeholders of `gm`, with names and defaults."""
    flat_inputs = graph.find_nodes(op="placeholder")
    first = next(node for node in graph.nodes if node.op != "placeholder")
    remaining, found = iter(flat_inputs), list[_Input]()
    given = gm.graph.find_nodes(op="placeholder")
    for old, (kind, leaves) in zip(given, flat.inputs, strict=True):
        nodes = [next(remaining) for _ in leaves]
        if kind == LEAF:
            (whole,) = nodes
            whole.target, whole.args = old.target, old.args
            first.prepend(whole)
        else:
            with graph.inserting_before(first):
                name = compat.free_name(graph, old.name)
                whole = graph.create_node("placeholder", old.target, old.args, {}, name)
        found.append((whole, kind, leaves, nodes))
    return found


def _check_inputs(
    graph: fx.Graph, inputs: Sequence[_Input], fakes: Sequence[Any], sizes: Any
) -> None:
    """Takes containers apart, and has the graph check what the trace has fixed.

    Args:
        fakes: the values that the flat graph was traced with.
        sizes: the `FreeSizes` of the trace, or None.
    """
    first = next(node for node in graph.nodes if node.op != "placeholder")
    remaining = iter(fakes)
    checks = _Checks(graph, {} if sizes is None else sizes.fixed())
    with graph.inserting_before(first):
        for whole, kind, leaves, nodes in inputs:
            if kind != LEAF:
                name = str(whole.target).strip("*")
                graph.call_function(check_structure, (whole, name, kind))
            for node, leaf in zip(nodes, leaves, strict=True):
                reached = whole
                for way, key in leaf.paths:
                    take = operator.getitem if way == "item" else getattr
                    reached = graph.call_function(take, (reached, key))
                if reached is not node:
                    reached.meta = dict(node.meta)
                    node.replace_all_uses_with(reached)
                    graph.erase_node(node)
                fake = next(remaining)
                if leaf.is_read:
                    checks.leaf(reached, leaf, fake)
        for condition in () if sizes is None else sizes.conditions():
            checks.condition(condition)


class _Checks:
    """Writes the checks of the inputs into a graph, where its next node goes."""

    def __init__(self, graph: fx.Graph, fixed: dict[Any, Any]) -> None:
        self._graph, self._fixed = graph, fixed
        self._places: dict[Any, tuple[fx.Node, int | None, str]] = {}

    def leaf(self, node: fx.Node, leaf: _Leaf, fake: Any) -> None:
        """The check of one tensor, number or other value."""
        if isinstance(fake, torch.Tensor):
            shape = [
                self._known(size, (node, at, f"{leaf.name}.shape[{at}]"))
                for at, size in enumerate(fake.shape)
            ]
            args: Any = (node, leaf.name, fake.dtype, tuple(shape))
            self._graph.call_function(check_tensor, args)
            return
        known = self._known(fake, (node, None, leaf.name))
        if known is None and fake is not None:
            kind = type(leaf.value).__name__
            self._graph.call_function(check_number, (node, leaf.name, kind))
        elif isinstance(leaf.value, _WRITTEN):
            self._graph.call_function(check_value, (node, leaf.name, leaf.value))
        else:
            raise CaptureError(
                f"input {leaf.name} is of type {type(leaf.value).__name__}, of which "
                "no graph can check that it stays the same"
            )

    def _known(self, value: Any, place: tuple[fx.Node, int | None, str]) -> Any:
        """The value of a size or number that is fixed; None where it is free."""
        symbol = compat.symbol_of(value)
        if symbol is None or symbol in self._fixed:
            kind = float if isinstance(value, torch.SymFloat) else int
            symbolic = isinstance(value, torch.SymInt | torch.SymFloat)
            if symbol is None:
                return None if symbolic else value
            return kind(self._fixed[symbol])
        self._places[symbol] = place
        return None

    def condition(self, condition: Any) -> None:
        """The check of a condition between sizes; of others a run finds out."""
        read = condition.free_symbols
        if not read or not read <= self._places.keys():
            return
        values, names = {}, {}
        for symbol in read:
            node, at, names[symbol] = self._places[symbol]
            size = torch.ops.aten.sym_size.int
            values[symbol] = (
                node if at is None else self._graph.call_function(size, (node, at))
            )
        holds, wanted = compat.recorded_condition(condition, values)
        text = compat.condition_text(condition, names)
        self._graph.call_function(check_condition, (holds, wanted, text))


_WRITTEN = (
    *(bool, int, float, complex, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Types of the values that the code of a graph can hold."""
