"""Runs a graph node by node, bodies included, and calls observers at each node."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.dtypes import needs_loss_scale
from autoamp.passes.functions import checkpointed
from autoamp.passes.write.dtensor_calls import crossed, stands_in


class Observer:
    """Observes one run of one graph, or of one body; each method here does nothing.

    Attributes:
        unrolls: whether the bodies of branches and loops are to run node by node too.
    """

    unrolls = False

    def before(self, run: fx.Interpreter, n: fx.Node) -> None:
        """Called before a node runs."""

    def after(self, run: fx.Interpreter, n: fx.Node, value: Any) -> Any:  # noqa: ARG002
        """Called after a node has run; the result replaces the node's value."""
        return value

    def of_body(self, run: fx.Interpreter, gm: fx.GraphModule) -> Observer:  # noqa: ARG002
        """The observer of one run of the body `gm` in `run`."""
        return self

    def cut(self, part: Any, whole: Any) -> None:
        """Called when a loop has cut `part` out of `whole`."""

    def joined(self, whole: Any, parts: Sequence[Any]) -> None:
        """Called when a loop has stacked `parts` to `whole`."""

    def ended(self, results: Any) -> None:
        """Called at the end of a run; `results` is None where the run raised."""


class Runner(fx.Interpreter):
    """One run of one graph, or of one body."""

    def __init__(
        self,
        gm: fx.GraphModule,
        observers: Sequence[Observer],
        *,
        keep_values: bool = False,
        is_body: bool = False,
    ) -> None:
        """Prepares a run.

        Args:
            observers: each observer gets the value that the observer before returned.
            keep_values: whether every value is kept to the end of the run.
            is_body: whether `gm` is a body, whose end is not the end of the run.
        """
        super().__init__(gm, garbage_collect_values=not keep_values)
        self.extra_traceback = False  # an error of the user's reads as without autoamp
        self.observers, self.is_body = observers, is_body
        self._unrolls = any(each.unrolls for each in observers)

    def run(self, *args: Any) -> Any:  # type: ignore[override]
        """Runs the graph on `args`."""
        results = None
        try:
            results = super().run(*args)
            return results
        finally:
            self.env.clear()  # an error may hold this object, which holds inputs
            if not self.is_body:
                for each in self.observers:
                    each.ended(results)

    def run_node(self, n: fx.Node) -> Any:
        """Runs one node."""
        for each in self.observers:
            each.before(self, n)
        if stands_in(n):
            args, _ = self.fetch_args_kwargs_from_env(n)
            # An input that only such calls read has no reader, and so is still there.
            inputs = [self.env.get(i) for i in n.graph.find_nodes(op="placeholder")]
            value = crossed(n, args[0], inputs)
        else:
            value = super().run_node(n)
        for each in self.observers:
            value = each.after(self, n, value)
        return value

    def call_function(self, target: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs one call; the body of a checkpointed region runs node by node too.

        Bodies of branches and loops run node by node if an observer `unrolls` them.
        """
        if target is checkpointed:
            args = (self._body(args[0]), *args[1:])
        elif target in UNROLLED and self._unrolls and not compat.inside_backward():
            return UNROLLED[target](self, *args)
        return super().call_function(target, args, kwargs)

    def _body(self, gm: fx.GraphModule) -> Callable[..., Any]:
        """The function that runs the body of a region, branch or loop."""

        def run(*args: Any) -> Any:
            observers = [each.of_body(self, gm) for each in self.observers]
            keeps = not self.garbage_collect_values
            return Runner(gm, observers, keep_values=keeps, is_body=True).run(*args)

        return run

    def _cond(self, which: Any, yes: Any, no: Any, operands: Sequence[Any]) -> Any:
        return tuple(self._body(yes if bool(which) else no)(*operands))

    def _while_loop(
        self,
        goes_on: Any,
        body: Any,
        carried: Sequence[Any],
        shared: Sequence[Any] = (),
    ) -> Any:
        def is_true(value: Any) -> bool:
            return bool(value[0] if isinstance(value, list | tuple) else value)

        while is_true(goes_on(*carried, *shared)):
            carried = self._body(body)(*carried, *shared)
        return tuple(carried)

    def _scan(
        self,
        body: Any,
        carried: Sequence[Any],
        over: Sequence[Any],
        shared: Sequence[Any] = (),
    ) -> Any:
        count, found = len(carried), []
        for at in range(len(over[0])):
            result = self._body(body)(*carried, *self._slices(over, at), *shared)
            carried = result[:count]
            found.append(result[count:])
        return (*carried, *self._stacked(found))

    def _map(self, body: Any, over: Sequence[Any], shared: Sequence[Any] = ()) -> Any:
        every = range(len(over[0]))
        found = [self._body(body)(*self._slices(over, at), *shared) for at in every]
        return tuple(self._stacked(found))

    def _slices(self, over: Sequence[Any], at: int) -> list[Any]:
        parts = [value[at] for value in over]
        for part, value in zip(parts, over, strict=True):
            for each in self.observers:
                each.cut(part, value)
        return parts

    def _stacked(self, results: Sequence[Sequence[Any]]) -> list[Any]:
        columns = [*zip(*results, strict=True)]
        wholes = [torch.stack(column) for column in columns]
        for whole, column in zip(wholes, columns, strict=True):
            for each in self.observers:
                each.joined(whole, column)
        return wholes


UNROLLED: Mapping[Any, Callable[..., Any]] = {
    compat.COND: Runner._cond,
    compat.WHILE_LOOP: Runner._while_loop,
    compat.SCAN: Runner._scan,
    compat.MAP: Runner._map,
}
"""Each op with bodies, and the method that runs it as Python would."""


def runs_every_op(gm: fx.GraphModule) -> bool:
    """Whether every op of `gm` runs as a node: ops of branches and loops do not."""
    bodies = [n for n in gm.graph.nodes if n.op == "get_attr" and _graph_at(gm, n)]
    return all(
        user.target is checkpointed and runs_every_op(_graph_at(gm, node))
        for node in bodies
        for user in node.users
    )


def _graph_at(gm: fx.GraphModule, node: fx.Node) -> Any:
    """The graph that a node names, or None."""
    found: Any = gm
    for name in str(node.target).split("."):
        found = getattr(found, name)
    return found if isinstance(found, fx.GraphModule) else None


class GradientSizes(Observer):
    """Keeps the largest number of each fp16 gradient in a graph, for the loss scale.

    The gradients that leave a graph are not enough: a gradient inside may overflow at a
    scale at which they do not.

    Attributes:
        magnitudes: one 0-dim fp32 tensor for each gradient, in the order of the
            backward, at the scale the graph ran with; infinite where the size is
            unknown (inside `vmap`).
    """

    def __init__(self, magnitudes: list[torch.Tensor]) -> None:
        self.magnitudes = magnitudes

    def after(self, _: fx.Interpreter, n: fx.Node, value: Any) -> Any:
        """Returns the value; hooks its gradient where the value is fp16."""
        if (
            n.op == "call_function"
            and isinstance(value, torch.Tensor)
            and needs_loss_scale(value.dtype)
            and value.requires_grad
        ):
            compat.hook_gradient(value, functools.partial(_note_size, self.magnitudes))
        return value


@compat.never_captured
def _note_size(magnitudes: list[torch.Tensor], grad: torch.Tensor | None) -> None:
    if grad is None:  # no gradient flows back here: a later op cuts it off
        return
    grad = compat.own_memory(grad)  # ranks agree on the largest
    if compat.is_batch(grad):
        unknown = torch.tensor(torch.inf, dtype=torch.float32, device="cpu")
        magnitudes.append(unknown)
    elif grad.numel():
        magnitudes.append(grad.detach().abs().amax().float())
