"""Custom Functions under `torch.amp.custom_fwd`, captured as autocast runs them.

`custom_fwd(cast_inputs=...)` casts the operands of a Function, and runs its `forward`
with autocast off, only where autocast is on.  A graph that Dynamo captures without
autocast tells nothing of that.  So Dynamo traces each call of such a Function in a
region of autocast of its own, and the decorators act there as under autocast.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.exc
from torch import fx

from autoamp.compat.dynamo.places import paths_in, rooted
from autoamp.compat.names import CUSTOM_FUNCTION, ENTER_AUTOCAST, EXIT_AUTOCAST
from autoamp.dtypes import LOW_DTYPES

DtypeOf = Callable[[list[str]], torch.dtype | None]
"""Gives the dtype of autocast for a call in the modules named, outermost first; None
where the call stays as it is without autocast."""

_DECORATED = torch.amp.custom_fwd(lambda _: None, device_type="cpu").__code__


def has_custom_fwd(function: type[torch.autograd.Function]) -> bool:
    """Whether the `forward` of a custom Function is under `torch.amp.custom_fwd`."""
    forward: Any = function.forward
    while forward is not None:
        forward = getattr(forward, "__func__", forward)
        if getattr(forward, "__code__", None) is _DECORATED:
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


def _as_under_autocast(
    function: Any, device: str, dtype: torch.dtype, *args: Any, **kwargs: Any
) -> Any:
    """The results of `function.apply`, called under autocast, in fp32 where half.

    Dynamo traces this code.  The graph around the call has fp32 operands, so that half
    results would fail there.
    """
    with torch.autocast(device, dtype=dtype, cache_enabled=False):
        results = function.apply(*args, **kwargs)
    if isinstance(results, tuple):
        return tuple([_widened_after_autocast(each) for each in results])
    return _widened_after_autocast(results)


def _widened_after_autocast(result: Any) -> Any:
    if isinstance(result, torch.Tensor) and result.dtype in LOW_DTYPES.values():
        return result.to(torch.float32)
    return result


def traced_in_widening(node: fx.Node) -> bool:
    """Whether a node is the cast to fp32 of a result that autocast leaves half.

    The name of our function in the stack trace tells; without a trace the answer is no.
    """
    return f"in {_widened_after_autocast.__name__}" in (node.stack_trace or "")


@contextlib.contextmanager
def authors_followed(dtype_of: DtypeOf) -> Iterator[None]:
    """A region where Dynamo traces Functions under `custom_fwd` as autocast runs them.

    A Function that cannot be traced so is traced as it is: Dynamo begins the frame
    again.  The region changes Dynamo for all threads, so it is for compilations, around
    each of which Dynamo holds its lock.
    """
    from torch._dynamo.exc import RestartAnalysis
    from torch._dynamo.variables.misc import AutogradFunctionVariable

    original: Any = AutogradFunctionVariable.call_apply
    failed: set[Any] = set()

    def call_apply(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        function = self.fn_cls
        dtype, device = None, _device_of_fp32([*args, *kwargs.values()])
        followed = device and function not in failed and has_custom_fwd(function)
        if followed and not _in_region(tx):
            dtype = dtype_of([*paths_in(rooted(tx.nn_module_stack))])
        if dtype is None:
            return original(self, tx, args, kwargs)
        try:
            result = _traced(tx, [self, device, dtype, *args], kwargs)
            if not _mixes_dtypes(tx):
                return result
            cause = None
        except Exception as error:
            if _is_control(error):
                raise
            cause = error
        failed.add(function)
        tx.speculation_log.clear()  # the frame goes another way the next time
        raise RestartAnalysis(
            restart_reason=f"autoamp: {function.__name__} fails under autocast"
        ) from cause

    setattr(AutogradFunctionVariable, "call_apply", call_apply)  # noqa: B010
    try:
        yield
    finally:
        setattr(AutogradFunctionVariable, "call_apply", original)  # noqa: B010


def _device_of_fp32(args: list[Any]) -> str | None:
    """The type of device of the first fp32 tensor; None where there is none.

    A call without an fp32 operand has half results in any case, and the model takes
    such results as they are.
    """
    for each in args:
        value = each.realize()
        if getattr(value, "dtype", None) is torch.float32:
            return str(value.device.type)
    return None


def _traced(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The result of `_as_under_autocast`, traced."""
    from torch._dynamo.variables.base import VariableTracker

    def known(value: Any) -> Any:
        is_known = isinstance(value, VariableTracker)
        return value if is_known else VariableTracker.build(tx, value)

    return known(_as_under_autocast).call_function(tx, [*map(known, args)], kwargs)


_PRODUCTS = frozenset(
    ["matmul", "mm", "bmm", "mv", "dot", "linear", "addmm", "baddbmm", "einsum"]
    + [f"conv{n}d" for n in (1, 2, 3)]
    + [f"conv_transpose{n}d" for n in (1, 2, 3)]
)
"""Functions whose operands have one dtype, as fake tensors do not check."""


def _mixes_dtypes(tx: Any) -> bool:
    """Whether a product that was traced last would fail for its operands' dtypes."""
    graph = tx.output.current_tracer.graph
    calls = [node for node in graph.nodes if node.target is CUSTOM_FUNCTION]
    for call in calls[-1:]:
        bodies = [tx.output.nn_modules[each.target].graph for each in call.args[:2]]
        if _mixes(bodies[0], True) or _mixes(bodies[1], False):
            return True
    return _mixes(graph, None)


def _mixes(graph: fx.Graph, casts: bool | None) -> bool:
    """Whether a product in `graph`, where autocast is off, has operands of two dtypes.

    Args:
        casts: whether autocast is on where the graph begins; None: outside all regions,
            where the code is not the Function's.
    """
    regions: list[tuple[Any, bool | None]] = [(None, casts)]
    for node in graph.nodes:
        if node.target is ENTER_AUTOCAST:
            regions.append((node, bool(node.args[2])))
        elif node.target is EXIT_AUTOCAST:
            regions = [each for each in regions if each[0] is not node.args[0]]
        name = getattr(node.target, "__name__", node.target)
        if regions[-1][1] is False and name in _PRODUCTS:
            values = [n.meta.get("example_value") for n in node.all_input_nodes]
            floats = [v for v in values if torch.is_tensor(v) and v.is_floating_point()]
            if len({v.dtype for v in floats}) > 1:
                return True
    return False


def _is_control(error: Exception) -> bool:
    """Whether Dynamo means an exception of its own to end this trace of the frame."""
    exc = torch._dynamo.exc
    return isinstance(error, exc.RestartAnalysis | exc.SkipFrame)


def _in_region(tx: Any) -> bool:
    """Whether the code that Dynamo traces now is in a region of autocast, off or on."""
    tracer = tx.output.current_tracer
    while tracer is not None:
        nodes = list(tracer.graph.nodes)
        left = sum(node.target is EXIT_AUTOCAST for node in nodes)
        if sum(node.target is ENTER_AUTOCAST for node in nodes) > left:
            return True
        tracer = tracer.parent
    return bool(torch._C._is_any_autocast_enabled())
