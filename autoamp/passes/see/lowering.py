"""Runs a graph for the tracer: each call is looked up, traced, or kept whole."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.errors import CaptureError
from autoamp.passes.functions import LEAF_FUNCTIONS, checkpointed
from autoamp.passes.ops import has_effect, mutates
from autoamp.passes.see.dtensors_as_whole import Meshes
from autoamp.passes.see.nodes import written_input
from autoamp.passes.see.op_cache import OpCache
from autoamp.passes.see.regions import (
    BODY_LEFT,
    BODY_RECORDS,
    CALLED_IN,
    CONTROL_FLOW,
    LOWERED_BODY,
    Positions,
    Regions,
    body_inputs,
)


class Lowering(fx.Interpreter):
    """Runs a graph for the tracer; keeps calls whole that must not be traced into."""

    def __init__(
        self,
        gm: fx.GraphModule,
        mode: compat.FakeTensorMode,
        op_cache: OpCache | None,
        lower: Callable[[fx.GraphModule, Sequence[Any], Regions], fx.GraphModule],
        regions: Regions,
        *,
        meshed: bool = False,
    ) -> None:
        """Takes the graph and runs none of it yet.

        Args:
            gm: the graph.
            mode: the mode of the fake tensors that the graph will be run with.
            op_cache: the ops of calls met before; None to trace every call.
            lower: gives the ATen graph of a sub-graph, from the sub-graph, its inputs
                and the autocast regions it is called in.
            regions: the autocast regions that `gm` begins in.
            meshed: whether `gm` computes on DTensors, each of which it is given whole.
        """
        super().__init__(gm, garbage_collect_values=False)
        self._lower = lower
        self._regions = regions
        self._meshes = Meshes(gm) if meshed else None
        self.mode = mode
        self.op_cache = op_cache
        self.bodies: dict[str, fx.GraphModule] = {}
        self.untraced: dict[str, str] = {}
        self.current_node: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self.current_node = n
        if n.op == "placeholder":
            return self.placeholder(n.target, n.args, n.kwargs)
        self._regions.follow(n)
        # In an autocast region the op alone does not determine Dynamo's result.
        known = self.op_cache if self._regions.is_on() is None else None
        if n.op == "call_function" and n.target in compat.ENCODER_LAYERS:
            known = None  # one call becomes several
        call = known.call(n, self.env) if known is not None else None
        if known is not None and call is not None:
            known.learn(call, n, functools.partial(self._called, n))
            repeated = known.repeated(call, n)
            if repeated is not None:
                return repeated
        with fx.traceback.set_current_meta(n):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            leaves = pytree.tree_leaves((args, kwargs))
            tensors = [v for v in leaves if isinstance(v, torch.Tensor)]
            before = [(t, compat.recorded_proxy(t)) for t in tensors]
            # A call that fails half way has recorded some of its ops; the one node that
            # stands for the whole call takes their place.
            mark = compat.recorded_so_far()
            try:
                with self._regions.entered():
                    result = None
                    if self._meshes is not None:
                        result = self._meshes.run(n, args)
                    if result is None:
                        result = getattr(self, n.op)(n.target, args, kwargs)
            except Exception as error:
                if compat.mesh_call(n) or not _may_stay_whole(n):
                    raise
                compat.forget_since(mark)
                result = self._untraced(n, args, kwargs, error)
            result = _keep_identities_apart(result, before)
            if known is not None and call is not None:
                made = compat.recorded_since(mark)
                result = known.dynamos_result(call, n, made, result)
            if self._meshes is not None:
                self._meshes.note_shares(n, compat.recorded_since(mark))
            return result

    def _called(self, n: fx.Node) -> Any:
        """Makes the call of a node that calls one of torch's functions or methods."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        # `super()`: the op of the call is asked for, and a call that is kept whole here
        # would show none.
        if isinstance(n.target, str):
            return super().call_method(n.target, args, kwargs)
        return super().call_function(n.target, args, kwargs)

    def _untraced(self, n: fx.Node, args: Any, kwargs: Any, error: Exception) -> Any:
        """Records an untraceable call as one node that runs it as the user wrote it."""
        target: Any = n.target
        if n.op == "call_method":
            target = getattr(torch.Tensor, str(n.target))
        self.untraced[n.name] = f"{type(error).__name__}: {error}"
        with compat.outside_trace(), self.mode:
            result = pytree.tree_map_only(
                torch.Tensor,
                lambda v: compat.like(v, symbolic=True),
                _known_result(n),
            )
        return compat.record_call(target, args, kwargs, result, n.name)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is compat.CHECKPOINT:
            return self._checkpoint(args, kwargs)
        if target is compat.TORCHS_CUSTOM_FUNCTION:  # the graph is not our capture's
            target, args, kwargs = compat.with_all_derivatives(args, kwargs)
        if isinstance(target, compat.HigherOrderOperator):
            return self._opaque(target, args, kwargs)
        if compat.is_encoder_layer(target, args) and not kwargs:
            return compat.encoder_layer(*args)
        if target in compat.PACKED and compat.is_packed(args):
            # A recurrent layer on a packed sequence, with lengths in a tensor.
            with compat.outside_trace():
                result = compat.packed_result(*args)
            op = compat.PACKED[target]
            return compat.record_call(op, args, {}, result, target.__name__)
        if target is getattr and args[1] == "data" and torch.is_tensor(args[0]):
            target, args = compat.GET_DATA, args[:1]
        # The tracer does not see `.data`: the result of `.data` would become a constant
        # of the graph, and writes to that result would be lost.
        if target in LEAF_FUNCTIONS or target is compat.GET_DATA:
            return self._opaque(target, args, kwargs)
        return super().call_function(target, args, kwargs)

    def _checkpoint(self, args: Any, kwargs: Any) -> Any:
        """Records a checkpointed region; its body becomes an ATen graph of its own."""
        body, *operands = args
        with compat.outside_trace():
            # The ops of the region belong to the graph of its body; here they are run
            # for the region's results alone.
            result = _InPlace(body, meshed=self._meshes is not None).run(*operands)
            lowered = self._lowered(body, operands, "checkpointed")
        proxy_body = self._register(lowered)
        # If the recomputation draws other dropout masks than the forward, the results
        # are exact and the gradients wrong by 29 to 36 %, with no warning.
        options = {k: v for k, v in kwargs.items() if k == "preserve_rng_state"}
        if self._meshes is not None and self.current_node is not None:
            operands = self._meshes.given(self.current_node.args[1:], operands)
        return compat.record_call(
            checkpointed, (proxy_body, *operands), options, result, "checkpointed"
        )

    def _opaque(self, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Records one untraced node: a custom Function, control flow, our own calls.

        A custom autograd Function that is traced through silently loses its backward.
        """
        name = getattr(target, "__name__", str(target))
        lowered = args
        if target in CONTROL_FLOW:
            lowered = self._lower_bodies(CONTROL_FLOW[target], args, name)
        with compat.outside_trace():
            result = self._fake_result(target, args, kwargs)
        args, kwargs = pytree.tree_map_only(
            fx.GraphModule, self._register, (lowered, kwargs)
        )
        return compat.record_call(target, args, kwargs, result, name)

    def _lower_bodies(
        self, positions: Positions, args: Sequence[Any], name: str
    ) -> tuple[Any, ...]:
        """`args` of a branch or loop, with each body lowered to an ATen graph.

        A body that cannot be lowered, or that writes to its inputs, stays as it is.
        """
        # Values that go round a loop may take a gradient from the second round on.
        flows = torch.is_grad_enabled() and any(
            isinstance(value, torch.Tensor) and value.requires_grad
            for value in pytree.tree_leaves(args)
        )
        found = list(args)
        for at in positions.bodies:
            body, shared = args[at], args[positions.shared]
            try:
                with compat.outside_trace():
                    inputs = body_inputs(body, shared, self.mode, flows)
                    lowered = self._lowered(body, inputs, name)
                # A cast of such an input would take the write, and the input would not.
                written = written_input(lowered)
                if written is not None:
                    raise CaptureError(f"it writes to its input {written}")
            except CaptureError as error:
                lowered = copy.copy(body)
                lowered.meta = {**body.meta, BODY_LEFT: str(error)}
            found[at] = lowered
        return tuple(found)

    def _lowered(
        self, body: fx.GraphModule, inputs: Sequence[Any], name: str
    ) -> fx.GraphModule:
        """The ATen graph of a sub-graph that op `name` calls, to be rewritten too."""
        lowered = self._lower(body, inputs, self._regions)
        lowered.meta[CALLED_IN] = self._regions.inside
        lowered.meta[LOWERED_BODY] = name
        lowered.meta[BODY_RECORDS] = torch.is_grad_enabled()
        return lowered

    def _fake_result(self, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            if target is checkpointed:
                return args[0](*args[1:])
            if target is compat.CUSTOM_FUNCTION:
                # A mode of the tracer's would keep the regions of autocast in the
                # Function's body from beginning.
                return compat.without_torch_function(target)(*args, **kwargs)
            return target(*args, **kwargs)
        except Exception:
            # Some higher-order ops cannot run outside their own tracing; Dynamo left
            # its result on the node.
            node = self.current_node
            known = _known_result(node) if node is not None else None
            if known is None:
                raise
            return known

    def _register(self, body: fx.GraphModule) -> Any:
        name = f"body_{len(self.bodies)}"
        self.bodies[name] = body
        # The tracer also drops dead nodes of sub-graphs, and takes `x.mul_(2)` for
        # dead: the tracer gets a copy of `body` to drop them from.
        graph = fx.Graph()
        compat.quick_copy(body.graph, graph, {})
        return compat.module_proxy(name, fx.GraphModule(body, graph))


def _may_stay_whole(node: fx.Node) -> bool:
    """Whether a call writes to nothing and its result is known without tracing it.

    The result may be a view of an operand: `verify` sees writes through such a view.
    """
    calls = node.op in ("call_function", "call_method")
    if not calls or isinstance(node.target, compat.HigherOrderOperator):
        return False
    return _known_result(node) is not None and not has_effect(node)


def _known_result(node: fx.Node) -> Any:
    """The result that Dynamo, or make_fx on real tensors, left on a node; or None."""
    return node.meta.get("example_value", node.meta.get("val"))


class _InPlace(fx.Interpreter):
    """Runs checkpointed regions as if they were not checkpointed.

    Torch's own op runs checkpointed regions under a mode that knows no other
    higher-order op, such as the branches of `torch.cond`.
    """

    def __init__(self, gm: fx.GraphModule, *, meshed: bool) -> None:
        super().__init__(gm)
        self._regions = Regions(gm)
        self._meshes = Meshes(gm) if meshed else None

    def run_node(self, n: fx.Node) -> Any:
        if n.target in (compat.ENTER_AUTOCAST, compat.EXIT_AUTOCAST):
            return self._regions.follow(n)  # the tracer would record the call
        with self._regions.entered():
            if self._meshes is not None:
                args, _ = self.fetch_args_kwargs_from_env(n)
                crossed = self._meshes.run(n, args)
                if crossed is not None:
                    return crossed
            return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is compat.CHECKPOINT:
            body, *operands = args
            return _InPlace(body, meshed=self._meshes is not None).run(*operands)
        return super().call_function(target, args, kwargs)


def _keep_identities_apart(
    result: Any, before: Sequence[tuple[torch.Tensor, Any]]
) -> Any:
    """A result of its own for an op that wrote nothing and returned its argument."""
    if not isinstance(result, torch.Tensor):
        return result
    for tensor, proxy in before:
        if result is tensor and proxy is not None:
            now = compat.recorded_proxy(result)
            if now is proxy or now is None:
                return result
            target = compat.proxy_node(now).target
            if isinstance(target, compat.OpOverload) and mutates(target):
                return result
            return compat.split_identity(result, proxy)
    return result
