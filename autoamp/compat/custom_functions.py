"""The op that runs a captured custom `torch.autograd.Function`, with all derivatives.

Dynamo captures a Function as one call of torch's op `autograd_function_apply`, with the
graph of its `forward`, the graph of its `backward` and the operands.  Torch's op keeps
the tensors that `backward` reads in a closure, where autograd does not see them: with
`create_graph=True` they count as constants, and the second derivative is wrong (torch
2.13).  The op here saves them on the context, as the Function itself does.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.autograd_function
from torch import fx
from torch._ops import HigherOrderOperator
from torch.autograd.function import once_differentiable
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from autoamp.compat.tracing import SET_GRAD

# Torch's own op, for compilers.
TORCHS_CUSTOM_FUNCTION: Any = torch._functorch.autograd_function.autograd_function_apply

ONCE = "once_differentiable"
"""The keyword that tells whether `backward` is under `once_differentiable`."""


@dataclass
class _Call:
    """One call of the op.

    Attributes:
        fwd: the graph of `forward`: it gives the results, and the values that
            `backward` reads.
        bwd: the graph of `backward`, called with the gradients and these values.
        marks: the marks that `forward` set, by torch's names.
        read: the values that `backward` reads, from `forward` on until they are saved.
    """

    fwd: fx.GraphModule
    bwd: fx.GraphModule
    marks: dict[str, Any]
    read: Sequence[Any] = ()


class CapturedFunction(torch.autograd.Function):
    """Runs the graphs of a custom Function as its `forward` and `backward`."""

    @staticmethod
    def forward(call: _Call, *operands: Any) -> Any:
        results, call.read = call.fwd(*operands)
        return results

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        call, *operands = inputs
        results = output if isinstance(output, tuple) else (output,)
        # What `forward` was given and what it returned have a history outside, and
        # derivatives flow to them; what it computed besides is a constant.
        read = [
            (operands, results)[place][at] if place < 2 else value
            for value, (place, at) in zip(call.read, _places(call.fwd), strict=True)
        ]
        call.read = ()
        ctx.call, ctx.read = call, read
        ctx.saved = call.marks["saved_for_backward_idx"]
        ctx.save_for_backward(*[read[at] for at in ctx.saved])
        for at in ctx.saved:  # a result must not hold the node that holds the result
            read[at] = None
        marked = [results[at] for at in call.marks.get("dirty_idx", ())]
        if marked:
            ctx.mark_dirty(*marked)
        marked = [results[at] for at in call.marks["non_differentiable_idx"]]
        if marked:
            ctx.mark_non_differentiable(*marked)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.call.marks.get(ONCE, False):
            return _once(ctx, *grads)
        return _differentiable(ctx, *grads)


def _differentiable(ctx: Any, *grads: Any) -> Any:
    read = list(ctx.read)
    for at, tensor in zip(ctx.saved, ctx.saved_tensors, strict=True):
        read[at] = tensor
    return (None, *ctx.call.bwd(*grads, *read))


_once = once_differentiable(_differentiable)


_PLACES = "autoamp_places"


def _places(fwd: fx.GraphModule) -> list[tuple[int, int]]:
    """Where each value that `backward` reads is found, found once for each graph.

    A value is (0, i) for operand i, (1, i) for result i, and (2, 0) for neither.
    """
    if _PLACES not in fwd.meta:
        ends: Any = fwd.graph.output_node().args[0]
        results, read = ends
        given = fwd.graph.find_nodes(op="placeholder")
        known = {node: (0, at) for at, node in enumerate(given)}
        known |= {n: (1, at) for at, n in enumerate(results) if isinstance(n, fx.Node)}
        fwd.meta[_PLACES] = [known.get(node, (2, 0)) for node in read]
    return fwd.meta[_PLACES]  # type: ignore[no-any-return]


class _CustomFunction(HigherOrderOperator):
    def __init__(self) -> None:
        super().__init__("autoamp_custom_function")  # type: ignore[no-untyped-call]

    def __call__(self, fwd: Any, bwd: Any, *operands: Any, **marks: Any) -> Any:
        if get_proxy_mode() is not None:  # AOT autograd traces the backward as well
            marks.pop(ONCE, None)
            return TORCHS_CUSTOM_FUNCTION(fwd, bwd, *operands, **marks)
        apply: Any = CapturedFunction.apply
        return apply(_Call(fwd, bwd, marks), *operands)


# The op that calls a captured custom autograd Function: a forward and a backward.
CUSTOM_FUNCTION: Any = _CustomFunction()


# -- which Functions are captured ------------------------------------------------------


def with_all_derivatives(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The call of our op that stands for a call of torch's op, in any graph."""
    fwd, bwd, *operands = args
    copied = fx.GraphModule(bwd, copy.deepcopy(bwd.graph))
    # `once_differentiable` leaves nothing but its frame in the stack traces.
    file = f'File "{_once.__code__.co_filename}"'
    traces = [n.stack_trace or "" for n in bwd.graph.nodes]
    once = any(file in trace and "in wrapper" in trace for trace in traces)
    keep_grad_mode(copied)
    return CUSTOM_FUNCTION, (fwd, copied, *operands), {**kwargs, ONCE: once}


def keep_grad_mode(bwd: fx.GraphModule) -> None:
    """Has the graph of a `backward` run in the grad mode that it is called in.

    Dynamo traces a `backward` with grad mode off, and writes that into the graph.
    """
    for node in bwd.graph.find_nodes(op="call_function", target=SET_GRAD):
        bwd.graph.erase_node(node)
    bwd.recompile()


def is_once_differentiable(function: type[torch.autograd.Function]) -> bool:
    """Whether the `backward` of a custom Function is under `once_differentiable`."""
    return any(
        getattr(each, "__code__", None) is _once.__code__
        for each in unwrapped(function.backward)
    )


def unwrapped(function: Any) -> list[Any]:
    """A function and those that its decorators wrap, from the outside in."""
    found = []
    while function is not None:
        function = getattr(function, "__func__", function)
        found.append(function)
        function = getattr(function, "__wrapped__", None)
    return found


_MODES = frozenset(
    ["is_grad_enabled", "enable_grad", "no_grad", "set_grad_enabled", "inference_mode"]
)


def asks_for_grad_mode(function: type[torch.autograd.Function]) -> bool:
    """Whether a Function's `backward` asks for grad mode, or switches it.

    Grad mode is off where Dynamo traces the `backward`, and on in a backward with
    `create_graph=True`: the graph would be that of another branch.  The names in the
    code tell, and those in the code of the functions that it calls by their names.
    """
    seen: set[types.CodeType] = set()
    left = unwrapped(function.backward)[-1:]
    while left:
        each = left.pop()
        code = getattr(each, "__code__", None)
        is_torchs = str(getattr(each, "__module__", "")).startswith("torch.")
        if code is None or code in seen or is_torchs:
            continue
        seen.add(code)
        inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
        names = {name for c in (code, *inner) for name in c.co_names}
        if not _MODES.isdisjoint(names):
            return True
        left += [each.__globals__.get(name) for name in names]
    return False
