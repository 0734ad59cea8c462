"""Scales gradients as they enter a graph at its edge, unscales them as they leave it.

Before, with `weight` a parameter and `x` an input that needs no gradient:

    weight_use = low_weight(weight, weight_copy)
    y = linear(x, weight_use);  return y

after, with three more inputs:

    weight_use = low_weight_unscaled(weight, weight_copy, inv_loss_scale, found_inf)
    y = linear(x, weight_use);  y_scaled = scale_grad(y, loss_scale);  return y_scaled
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE, LOW_DTYPES
from autoamp.passes.functions import (
    low_weight,
    low_weight_unscaled,
    scale_grad,
    scaled_result,
    unscale_grad,
    unscale_grad_,
    unscale_half,
)
from autoamp.passes.graph_record import Edge, Rewritten
from autoamp.passes.ops import base_name
from autoamp.passes.rules import family
from autoamp.passes.write.copied import copied
from autoamp.passes.write.emitted import CAST_KIND, dtype_of
from autoamp.passes.write.gradient_flow import (
    GraphFlow,
    check_memory,
    find_outside,
    is_written,
    true_values,
)

SHARED = "autoamp_shared"
"""In the `meta` of a `scale_grad` node: whether several results share its memory."""


@dataclass
class _Inputs:
    """The extra inputs for one device."""

    loss_scale: fx.Node
    inv_loss_scale: fx.Node
    found_inf: fx.Node


def scale_edge(gm: fx.GraphModule, rewritten: Rewritten) -> tuple[fx.GraphModule, Edge]:
    """A copy of `gm`, the graph made of `rewritten`, whose gradients are scaled.

    Where no gradient enters or leaves the graph the copy is like the graph.  The copy
    suits every call: an input that is a leaf of autograd's graph in one call may be a
    computed tensor in the next.

    Raises:
        CaptureError: the graph writes to two inputs that share memory.
    """
    gm, _ = copied(gm)
    flow = GraphFlow(gm, rewritten)
    scaling = _Scaling(flow)
    written = scaling.run()
    if scaling.inputs:
        gm.graph.lint()
    positions = tuple(flow.given.index(node) for node in written)
    given = enumerate(flow.given)
    exits = tuple(i for i, node in given if flow.differentiable(node, node))
    return gm, Edge(tuple(scaling.inputs), positions, exits)


def scale_inputs(device: torch.device) -> list[torch.Tensor]:
    """Values like those of the extra inputs for one device, in their order."""
    one = torch.ones((), dtype=torch.float32, device=device)
    return [one, one.clone(), compat.clear_flag(device)]


def arguments_of(work: Rewritten, inputs: Sequence[Any]) -> list[Any]:
    """The arguments the graph is called with: `inputs`, weight copies, and scales.

    Copies and scales are fake tensors: a compiler that makes fakes of them by itself
    gives their sizes symbols, where any size of the inputs may change.
    """
    formats = work.layouts or (torch.preserve_format,) * len(work.weights)
    low = work.low
    copies = [
        torch.empty_like(inputs[i].detach(), dtype=low, memory_format=layout)
        for i, layout in zip(work.weights, formats, strict=True)
    ]
    extra = [t for device in work.edge.devices for t in scale_inputs(device)]
    mode = compat.current_fake_mode(inputs)
    added = [*copies, *extra]
    return [*inputs, *(added if mode is None else compat.fake_inputs(added, mode))]


class _Scaling:
    """Edits one graph; `outside` holds the tensors beyond its edge (`find_outside`)."""

    def __init__(self, flow: GraphFlow) -> None:
        self.flow = flow
        self.graph = flow.graph
        self.order = flow.order
        self.given = flow.given
        self.names = flow.names
        self.output = flow.output
        self.first = next(n for n in self.graph.nodes if n.op != "placeholder")
        self.inputs: dict[torch.device, _Inputs] = {}
        self.outside: dict[fx.Node, list[fx.Node]] = {}
        self.now: dict[fx.Node, fx.Node] = {}
        self.true: set[fx.Node] = set()

    def run(self) -> list[fx.Node]:
        """Edits the graph; returns the inputs that the graph writes results to."""
        written = [n for n in self.given if self.flow.written_with_grad(n)]
        check_memory(self.flow, written)
        self.outside = find_outside(self.flow, written)
        # In graph order, so that two runs of the pass emit the same text.
        beyond = sorted(self.outside, key=self.order.__getitem__)
        roots = [node for node in beyond if not self.outside[node]]
        # A tensor that is written to has a true gradient only after its last write.
        edges = {
            node
            for node in (*self.outside, *self.given)
            if not is_written(self.flow, node)
        }
        self.true = true_values(
            self.graph, edges, self.flow.carries, self.flow.is_plain
        )
        for node in self.given:
            if self.flow.differentiable(node, node):
                self._unscale_out(node, node in written)
        for value in sorted(self.true - self.outside.keys(), key=self.flow.at):
            self._redirect(value, [u for u in value.users if self._flows_to(u)])
        for root in roots:
            if root not in self.true:
                self._scale_in(root)
        self._connect()
        return written

    def _unscale_out(self, node: fx.Node, written: bool) -> None:
        """Unscales the gradient that leaves through input `node`."""
        users = dict.fromkeys(u for n in self.names[node] for u in n.users)
        readers = [u for u in users if self._inside(u, node)]
        if written:
            # A write bypasses an alias, so the history of `node` itself is extended.
            extra = self._inputs_for(node)
            args = (node, extra.inv_loss_scale, extra.found_inf)
            with self.graph.inserting_before(self.first):
                new = self.graph.call_function(unscale_grad_, args)
            new.meta = dict(node.meta)
            return
        # A parameter that arrives in half: divided by S in half, its gradient would
        # underflow, which is what S is to prevent.
        if node.meta["val"].dtype in LOW_DTYPES.values():
            for use in readers:  # one alias per use: a leaf's gradients sum up in fp32
                self._redirect(node, [use], by=unscale_half)
            return
        for use in readers:
            if use.target is low_weight and use.args[0] is node:
                extra = self._inputs_for(node)
                use.target = low_weight_unscaled
                use.args = (*use.args, extra.inv_loss_scale, extra.found_inf)
        others = [u for u in readers if u.target is not low_weight_unscaled]
        writes = self.flow.writes.get(self.flow.storage(node), {}).values()
        for epoch in range(len(writes) + 1):
            # A write removes the hook of any alias made before the write, so readers
            # after each write get an alias of their own.
            now = [
                u for u in others if epoch == sum(w < self.flow.at(u) for w in writes)
            ]
            self._redirect(node, now, self.names[node])

    def _scale_in(self, root: fx.Node) -> None:
        """Scales the gradient that enters at `root`, after the last write to `root`."""
        # A second derivative flows into a result that an fp32 op saves from its own op
        # as well, and would be scaled there a second time: the gradient of the result
        # is left true.
        if (
            self.flow.is_plain(root)
            and dtype_of(root) == HIGH_DTYPE
            and base_name(root.target) in family("saves_its_result")
        ):
            self._scale_operands(root)
            return
        is_cast = root.meta.get(CAST_KIND) == "up" and self.flow.last_write(root) < 0
        with self.graph.inserting_before(self._settled(root)):
            if is_cast and not self._is_shared(root):
                # The cast to fp32 and the scaling are one kernel in the backward; the
                # gradient of the logits is the largest tensor of many steps.
                (low,) = root.all_input_nodes
                args = (low, self._inputs_for(root).loss_scale)
                new = self.graph.call_function(scaled_result, args)
                new.meta = dict(root.meta)
                self.now[root] = new
                return
            result = root
            if not (root.op == "placeholder" or self.flow.is_of_an_op(root)):
                # A region may itself use a tensor that it returns, or return views.
                result = self.graph.call_function(torch.ops.aten.clone.default, (root,))
                result.meta = dict(root.meta)
            new = self.graph.create_node(
                "call_function",
                scale_grad,
                (result, self._inputs_for(root).loss_scale),
                {},
                f"{root.name}_scaled",
            )
        new.meta = {**root.meta, SHARED: self._is_shared(root)}
        self.now[root] = new

    def _scale_operands(self, root: fx.Node) -> None:
        """Scales the gradients that the op of `root` gives to its operands."""
        self.now[root] = root
        for operand in root.all_input_nodes:
            if dtype_of(operand) != HIGH_DTYPE or not self.flow.carries(operand):
                continue
            scale = self._inputs_for(operand).loss_scale
            with self.graph.inserting_before(root):
                alone = operand
                # Other gradients than that of `root` may flow into an operand.
                if CAST_KIND not in operand.meta or len(operand.users) > 1:
                    clone = torch.ops.aten.clone.default
                    alone = self.graph.call_function(clone, (operand,))
                scaling = self.graph.call_function(scale_grad, (alone, scale))
            for node in (alone, scaling):
                node.meta = dict(operand.meta)
                self.order.setdefault(node, self.order[root])
                self.flow.recording.setdefault(node, self.flow.recording[root])
            root.replace_input_with(operand, scaling)

    def _is_shared(self, root: fx.Node) -> bool:
        """Whether several results share the memory of `root`."""
        count = 0
        for node in dict.fromkeys(map(self.flow.tensor, self.flow.results())):
            value = node
            while self.outside.get(value):
                value = self.flow.tensor(self.outside[value][0])
            count += value is root
        return count > 1

    def _connect(self) -> None:
        """Makes readers of an outside tensor read it as it is after its last write."""
        for value in sorted(self.outside, key=self.order.__getitem__):
            if value not in self.now:
                self.now[value] = self._following(value)
            now, names = self.now[value], self.names[value]
            if now.target is scaled_result:
                value.replace_all_uses_with(now)
                self.graph.erase_node(value)
                names = [now]
            for name in names:
                self.output.replace_input_with(name, now)
            if not isinstance(value.meta.get("val"), torch.Tensor):
                continue
            last = self.flow.last_write(value)
            readers = {u: None for n in names for u in n.users}
            # Readers before the last write read the earlier value, not the result.
            late = [u for u in readers if self.order.get(u, -1) > last]
            # The gradient of a result is the caller's, a true one, whichever reader
            # adds to it: a reader inside the graph reads an unscaled alias.
            inner = [u for u in late if self._inside(u, value)]
            self._redirect(now, inner, [now, *names])

    def _following(self, view: fx.Node) -> fx.Node:
        """`view`, or a copy, that shows its sources after their last write."""
        now = {n: self.now.get(self.flow.tensor(n), n) for n in self.outside[view]}
        if all(n is source for source, n in now.items()):
            return view
        if self.order[view] > self.flow.last_write(view):
            for source, n in now.items():
                view.replace_input_with(source, n)
            return view
        with self.graph.inserting_before(self._settled(view)):
            return self.graph.node_copy(view, lambda n: now.get(n, n))

    def _settled(self, value: fx.Node) -> fx.Node:
        """The first node after all writes to `value` where grad mode is on."""
        last = max(self.flow.last_write(value), self.order[value])
        for node, at in self.order.items():
            if at > last and node.op != "placeholder" and self.flow.recording[node]:
                return node
        return self.output

    def _redirect(
        self,
        value: fx.Node,
        readers: Sequence[fx.Node],
        names: Sequence[fx.Node] | None = None,
        by: Callable[..., Any] = unscale_grad,
    ) -> None:
        """Makes `readers` of `value`, by any of its `names`, read an unscaled alias."""
        if not readers:
            return
        extra = self._inputs_for(value)
        with self.graph.inserting_before(min(readers, key=self.flow.at)):
            alias = self.graph.create_node(
                "call_function",
                by,
                (value, extra.inv_loss_scale, extra.found_inf),
                {},
                f"{value.name}_unscaled",
            )
        alias.meta = dict(value.meta)
        for reader in readers:
            for name in names or (value,):
                reader.replace_input_with(name, alias)

    def _inputs_for(self, value: fx.Node) -> _Inputs:
        """The extra inputs for the device `value` is on, made when first needed."""
        val = value.meta["val"]
        if val.device not in self.inputs:
            last = [n for n in self.graph.nodes if n.op == "placeholder"][-1]
            made = []
            # The scale is an input, so that a new one recompiles nothing.
            for name in ("loss_scale", "inv_loss_scale", "found_inf"):
                with self.graph.inserting_after(last):
                    last = self.graph.placeholder(name)
                with val.fake_mode:
                    shape = (1,) if name == "found_inf" else ()
                    last.meta["val"] = torch.empty(
                        shape, dtype=torch.float32, device=val.device
                    )
                made.append(last)
            self.inputs[val.device] = _Inputs(*made)
        return self.inputs[val.device]

    def _inside(self, user: fx.Node, value: fx.Node) -> bool:
        """Whether `user` reads `value` inside the graph, and a gradient flows back."""
        sources = map(self.flow.tensor, self.outside.get(user, ()))
        return value not in sources and self._flows_to(user)

    def _flows_to(self, user: fx.Node) -> bool:
        """Whether `user` takes a scaled gradient; casts and uses we made always do."""
        if user.op == "output" or user.target in (scale_grad, scaled_result):
            return False
        if user in self.true:
            return False  # its gradient is a true one
        return self.flow.carries(user)
