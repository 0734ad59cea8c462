"""Puts loss scaling round the edge of a graph.

Before, with `weight` a parameter and `x` an input that needs no gradient:

    weight_use = low_weight(weight, weight_copy)
    y = linear(x, weight_use);  return y

after, with three more inputs:

    weight_use = low_weight_unscaled(weight, weight_copy, inv_loss_scale, found_inf)
    y = linear(x, weight_use);  y_scaled = scale_grad(y, loss_scale);  return y_scaled
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoamp.analyse.facts import written_values
from autoamp.compat import OpOverload
from autoamp.dtypes import LOW_DTYPES
from autoamp.errors import CaptureError
from autoamp.graph_functions import (
    low_weight,
    low_weight_unscaled,
    scale_grad,
    unscale_grad,
    unscale_grad_,
    unscale_half_leaf,
)
from autoamp.ops import is_inplace
from autoamp.pipeline import Rewritten


@dataclass(frozen=True)
class Boundary:
    """What a graph with a boundary is to be called with, after its other inputs.

    Attributes:
        devices: for each of them `loss_scale`, `inv_loss_scale` and `found_inf`.
    """

    devices: tuple[torch.device, ...] = ()


@dataclass
class _Inputs:
    """The extra inputs for one device."""

    loss_scale: fx.Node
    inv_loss_scale: fx.Node
    found_inf: fx.Node


def add_boundary(
    gm: fx.GraphModule, rewritten: Rewritten, leaves: Sequence[int]
) -> Boundary:
    """Scales the gradients of `gm`, the graph made of `rewritten`, which it edits.

    Where no gradient enters or leaves the graph nothing is changed.

    Args:
        leaves: positions of the inputs that are leaves of autograd's graph.

    Raises:
        CaptureError: the graph writes to two inputs that share memory.
    """
    edge = _Edge(gm, rewritten, leaves)
    edge.run()
    if edge.inputs:
        gm.graph.lint()
        gm.recompile()
    return Boundary(tuple(edge.inputs))


class _Edge:
    def __init__(
        self, gm: fx.GraphModule, rewritten: Rewritten, leaves: Sequence[int]
    ) -> None:
        self.rewritten = rewritten
        self.facts = rewritten.facts
        self.graph = gm.graph
        self.order = {n: i for i, n in enumerate(self.graph.nodes)}
        given = [n for n in rewritten.before.graph.nodes if n.op == "placeholder"]
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        self.given = placeholders[: len(given)]  # the others are weight copies
        self.leaves = {self.given[i] for i in leaves}
        self.inputs: dict[torch.device, _Inputs] = {}
        self.writes = self._writes()
        self.first = next(n for n in self.graph.nodes if n.op != "placeholder")
        self.output = next(n for n in self.graph.nodes if n.op == "output")
        self.names = self._names_of_tensors()

    def run(self) -> None:
        written = [n for n in self.given if self._written_with_grad(n)]
        storages = {self._storage(n) for n in written}
        if len(storages) < len(written):
            raise CaptureError(
                "the graph writes in place to two inputs that share memory, and both "
                "carry gradients; clone one of them before the call"
            )
        for node in self.given:
            if self._differentiable(node, node):
                self._leave(node, node in written)
        for value in [*written, *self._results()]:
            self._enter(value)

    # -- where gradients leave -----------------------------------------------------

    def _leave(self, node: fx.Node, written: bool) -> None:
        """Unscales what flows out through input `node`."""
        readers = [u for u in node.users if self._flows_to(u)]
        if written:
            # What is written bypasses an alias, so its own history is extended.
            args = (node, self._edge(node).inv_loss_scale, self._edge(node).found_inf)
            with self.graph.inserting_before(self.first):
                new = self.graph.call_function(unscale_grad_, args)
            new.meta = dict(node.meta)
            return
        if node in self.leaves and node.meta["val"].dtype in LOW_DTYPES.values():
            for use in readers:  # an alias each: gradients are summed in fp32
                self._redirect(node, [use], by=unscale_half_leaf)
            return
        for use in readers:
            if use.target is low_weight and use.args[0] is node:
                edge = self._edge(node)
                use.target = low_weight_unscaled
                use.args = (*use.args, edge.inv_loss_scale, edge.found_inf)
        self._redirect(
            node, [u for u in readers if u.target is not low_weight_unscaled]
        )

    # -- where gradients enter -----------------------------------------------------

    def _enter(self, value: fx.Node) -> None:
        """Scales what flows in through result `value`.

        What reads it inside the graph reads an alias that takes the scale off again:
        the gradient of a result is the caller's, at its true value, whoever adds to it.
        Readers before its last write read what was there then, not the result.
        """
        written = max(self.writes.get(self._storage(value), {}).values(), default=-1)
        same = self.names[self._tensor(value)]
        readers = {u: None for n in same for u in n.users if self._flows_to(u)}
        self._redirect(value, [u for u in readers if self.order[u] > written], same)
        with self.graph.inserting_before(self.output):
            new = self.graph.create_node(
                "call_function",
                scale_grad,
                (value, self._edge(value).loss_scale),
                {},
                f"{value.name}_scaled",
            )
        new.meta = dict(value.meta)
        for name in same:
            self.output.replace_input_with(name, new)

    def _results(self) -> list[fx.Node]:
        """The returned tensors a gradient flows into, each once."""
        before = next(n for n in self.rewritten.before.graph.nodes if n.op == "output")
        pairs = zip(_values(before), _values(self.output), strict=True)
        found = {
            self._tensor(new): new
            for old, new in pairs
            # An input handed back: what flows in there is nothing of ours.
            if self._tensor(new) not in self.given and self._differentiable(old, new)
        }
        return list(found.values())

    # -- helpers -------------------------------------------------------------------

    def _redirect(
        self,
        value: fx.Node,
        readers: Sequence[fx.Node],
        names: Sequence[fx.Node] | None = None,
        by: Callable[..., Any] = unscale_grad,
    ) -> None:
        """Lets `readers` of `value`, by any of its names, read an unscaled alias."""
        if not readers:
            return
        edge = self._edge(value)
        with self.graph.inserting_before(min(readers, key=lambda n: self.order[n])):
            alias = self.graph.create_node(
                "call_function",
                by,
                (value, edge.inv_loss_scale, edge.found_inf),
                {},
                f"{value.name}_unscaled",
            )
        alias.meta = dict(value.meta)
        for reader in readers:
            for name in names or (value,):
                reader.replace_input_with(name, alias)

    def _edge(self, value: fx.Node) -> _Inputs:
        """The extra inputs for the device `value` is on, made when first needed."""
        val = value.meta["val"]
        if val.device not in self.inputs:
            last = [n for n in self.graph.nodes if n.op == "placeholder"][-1]
            made = []
            for name in ("loss_scale", "inv_loss_scale", "found_inf"):
                with self.graph.inserting_after(last):
                    last = self.graph.placeholder(name)
                with val.fake_mode:
                    shape = (1,) if name == "found_inf" else ()
                    last.meta["val"] = torch.empty(shape, device=val.device)
                made.append(last)
            self.inputs[val.device] = _Inputs(*made)
        return self.inputs[val.device]

    def _writes(self) -> dict[int, dict[str, int]]:
        """For each storage the nodes that write to it, and their place in the graph."""
        places = {n.name: i for n, i in self.order.items()}
        writes: dict[int, dict[str, int]] = defaultdict(dict)
        for node in self.rewritten.before.graph.nodes:
            for value in written_values(node):
                storage = self._storage(value)
                if storage in self.facts.mutated:
                    writes[storage][node.name] = places[node.name]
        return writes

    def _written_with_grad(self, node: fx.Node) -> bool:
        """Whether input `node` takes part in a gradient through what is written to it.

        A leaf can only be written to where no gradient is recorded.
        """
        if node in self.leaves or not _is_float(node):
            return False
        writers = self.writes.get(self._storage(node), {})
        return any(self.facts.nodes[name].requires_grad for name in writers)

    def _names_of_tensors(self) -> dict[fx.Node, list[fx.Node]]:
        """Each tensor with all its names: an in-place op gives its argument another."""
        names: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in self.graph.nodes:
            names[self._tensor(node)].append(node)
        return names

    def _tensor(self, node: fx.Node) -> fx.Node:
        """The node that made the tensor `node` stands for."""
        while isinstance(node.target, OpOverload) and is_inplace(node.target):
            argument = node.args[0]
            assert isinstance(argument, fx.Node)
            node = argument
        return node

    def _storage(self, node: fx.Node) -> int:
        fact = self.facts.nodes.get(node.name)
        return fact.storage if fact is not None else -1

    def _differentiable(self, known: fx.Node, node: fx.Node) -> bool:
        fact = self.facts.nodes.get(known.name)
        return fact is not None and fact.requires_grad and _is_float(node)

    def _flows_to(self, user: fx.Node) -> bool:
        """Whether a gradient flows into `user`; casts and uses we made always do."""
        if user.op == "output" or user.target is scale_grad:
            return False
        fact = self.facts.nodes.get(user.name)
        return fact is None or fact.requires_grad


def _values(output: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(output.args, found.append)
    return found


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and (
        value.is_floating_point() or value.is_complex()
    )
