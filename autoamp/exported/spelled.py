"""Exports a rewritten graph, so that nothing is in it but torch's own ops.

A rewritten graph calls functions of autoamp's where torch has no kernel, such as an
attention that reads its mask as "causal".  `torch.export` traces through them, so that
the ops that such a function calls stand in its place.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.errors import ExportError
from autoamp.exported.captured import Call, Captured
from autoamp.graph_functions import (
    attention,
    layer_norm,
    op_with_its_state,
    rms_norm,
)
from autoamp.messages import advice
from autoamp.printable import printable_line

OP = "autoamp_op"
"""The note at a node of the exported graph: the name in the report of its op."""


_ATEN = torch.ops.aten

_WITHOUT_GRADIENTS: dict[Any, Any] = {
    attention: _ATEN.scaled_dot_product_attention.default,
}
"""Functions of autoamp's, each to the op that it calls where no gradient is recorded.

What such a function asks about sizes would bound the sizes that a program takes."""

_NORMS = frozenset(
    {
        _ATEN.batch_norm.default,
        _ATEN.group_norm.default,
        _ATEN.instance_norm.default,
        _ATEN.layer_norm.default,
        _ATEN.native_layer_norm.default,
        _ATEN.rms_norm.default,
        layer_norm,
        rms_norm,
    }
)
"""Calls whose data may be low while their weights are fp32."""


class _AsTheModel(nn.Module):
    """A rewritten graph, called as the model that it was made of is called."""

    def __init__(self, graph: Captured, gm: fx.GraphModule, *, one_dtype: bool) -> None:
        super().__init__()
        self._graph, self._one_dtype = graph, one_dtype
        # The weights are this module's own, so that their paths are the model's.
        for name, child in gm.named_children():
            self.add_module(name, child)
        for name, weight in gm.named_parameters(recurse=False):
            self.register_parameter(name, weight)
        for name, buffer in gm.named_buffers(recurse=False):
            kept = name in gm.state_dict()
            self.register_buffer(name, buffer, persistent=kept)
        self._order = gm.graph

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        spec = self._graph.program.call_spec
        flat = pytree.tree_leaves((args, kwargs))
        run = _Noting(self, graph=self._order, garbage_collect_values=False)
        run.one_dtype = self._one_dtype
        with fx.traceback.preserve_node_meta():
            results = run.run(*flat)
        return pytree.tree_unflatten(list(results), spec.out_spec)


class _Noting(fx.Interpreter):
    """Runs a graph; what is traced meanwhile keeps the metadata of the graph's nodes.

    Attributes:
        one_dtype: whether calls that read floats of several dtypes, as norms and
            recurrent ops do in torch alone, are made in fp32, between casts.
    """

    one_dtype = False

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        meta, n.meta = n.meta, compat.with_note(n, {OP: n.name})
        if "stack_trace" not in meta:  # a cast has no line of its own, its reader has
            lines = [user.meta.get("stack_trace") for user in n.users]
            n.meta["stack_trace"] = next(filter(None, lines), "")
        try:
            return super().run_node(n)
        finally:
            n.meta = meta

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        target = _WITHOUT_GRADIENTS.get(target, target)
        floats = [x for x in pytree.tree_leaves((args, kwargs)) if _is_float(x)]
        if not self.one_dtype:
            return super().call_function(target, args, kwargs)
        op = op_with_its_state(target)
        if op is target and (target not in _NORMS or _of_one_dtype(floats)):
            return super().call_function(target, args, kwargs)
        up = pytree.tree_map_only(torch.Tensor, _widened, (args, kwargs))
        low = floats[0].dtype  # the data come first
        result = super().call_function(op, *up)
        if op is not target:  # a state that is fp32, with results that are
            return result
        # Only the first result of a native norm is data; statistics stay fp32.
        if isinstance(result, tuple):
            return (result[0].to(low), *result[1:])
        return result.to(low)


def spelled(
    graph: Captured,
    gm: fx.GraphModule,
    call: Call,
    *,
    one_dtype: bool = False,
) -> torch.export.ExportedProgram:
    """The exported program of `gm`, with the signature of the model.

    Args:
        graph: the graph that `gm` was made of.
        one_dtype: whether norms whose data are low and whose weights are fp32 are
            written as an fp32 norm between casts.

    Raises:
        ExportError: `torch.export` refuses the rewritten graph.
    """
    model = _AsTheModel(graph, gm, one_dtype=one_dtype)
    model.forward = _signed(model.forward, graph.signature)  # type: ignore[method-assign]
    model.eval()
    try:
        return call.export(model)
    except Exception as error:
        raise ExportError(
            "torch.export takes the model, and refuses the rewritten graph: "
            f"{type(error).__name__}: {printable_line(str(error), 1500)}. Please "
            f"report this; {advice('keep', ['PATH'], by_variables=False)} for parts of "
            f"the model, or {advice('fuse', False, by_variables=False)}, may help "
            "meanwhile"
        ) from error


def _signed(forward: Any, signature: inspect.Signature) -> Any:
    """`forward` with the signature of the model's, by which torch names the inputs."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _of_one_dtype(values: list[torch.Tensor]) -> bool:
    return len({value.dtype for value in values}) < 2


def _widened(value: torch.Tensor) -> torch.Tensor:
    return value.float() if _is_float(value) else value
