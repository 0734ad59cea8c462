"""The changes to Dynamo, in force only while it captures a frame of a model.

Each change stands for all threads, so that the caller holds Dynamo's lock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch._dynamo
from torch import Tensor, fx
from torch._dynamo.exc import RestartAnalysis, SkipFrame, Unsupported
from torch._dynamo.variables import GradModeVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.misc import AutogradFunctionVariable
from torch._subclasses.fake_tensor import FakeTensor

from autoamp.compat.custom_functions import (
    CUSTOM_FUNCTION,
    ONCE,
    TORCHS_CUSTOM_FUNCTION,
    asks_for_grad_mode,
    is_once_differentiable,
    keep_grad_mode,
    unwrapped,
)
from autoamp.compat.frames import methods_modules, quietly
from autoamp.compat.layers import recurrent_results
from autoamp.compat.module_paths import paths_in, rooted
from autoamp.compat.tensors import modules_of, parameters_here
from autoamp.compat.tracing import ENTER_AUTOCAST, EXIT_AUTOCAST
from autoamp.dtypes import LOW_DTYPES

DtypeOf = Callable[[list[str]], torch.dtype | None]
"""Gives the dtype of autocast for a call in the modules named, outermost first; None
where the call stays as it is without autocast."""


@contextlib.contextmanager
def dynamo_patched(
    frame: Any, dtype_of: DtypeOf, note: Callable[[str], None], *, runs_as_is: bool
) -> Iterator[None]:
    """A region in which Dynamo captures `frame` for us.

    Args:
        dtype_of: gives the dtype of autocast for a Function under `custom_fwd`.
        note: is told why a custom Function is left to Python.
        runs_as_is: no compiler takes the graph, and recurrent layers stay whole.
    """
    dynamo, apply = torch._dynamo.utils, _followed(dtype_of, _differentiable(note))
    with (
        mock.patch.multiple(GradModeVariable, **_REGIONS),
        mock.patch.object(AutogradFunctionVariable, "call_apply", apply),
        mock.patch.object(dynamo, "run_node", _fake_on_meta(dynamo.run_node)),
        recurrent_results() if runs_as_is else contextlib.nullcontext(),
        _wide_gradients_hidden(frame),
        quietly(),
    ):
        yield


# Regions without gradients that a model makes before a graph break and enters later.
#
# `region = torch.no_grad()` switches nothing off until `with region:`.  After a break
# Dynamo makes the object again, by `torch.set_grad_enabled(False)`, which switches
# gradients off at once (torch 2.13): a value computed before `with region:` has
# no gradients then, and where `region` is a decorator they stay off in the process.


def region(enabled: bool) -> Any:
    """A region with gradients, or without, which begins where it is entered."""
    return torch.enable_grad() if enabled else torch.no_grad()


# Where Dynamo finds the function that makes a region again.
_REGIONS: dict[str, Any] = {
    "module_name": lambda _: __name__,
    "fn_name": lambda _: region.__name__,
}


# Tensors made of Python's numbers on the meta device.
#
# `torch.tensor([], device="meta")` gives a real tensor under a fake mode, where it
# gives a fake one on any other device (torch 2.13).  The next op then refuses the
# operands, and Dynamo leaves the function to Python.  The key-value cache of
# transformers begins so, at every layer of a model on the meta device.


def _moved_to_meta(make: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
    return make(*args[:2], **{**kwargs, "device": "cpu"}).to("meta")


def tensor_on_meta(*args: Any, **kwargs: Any) -> Tensor:
    """`torch.tensor` on the meta device, made on the CPU and moved from there."""
    return _moved_to_meta(torch.tensor, args, kwargs)


def as_tensor_on_meta(*args: Any, **kwargs: Any) -> Tensor:
    """`torch.as_tensor` of numbers on the meta device, made on the CPU and moved."""
    return _moved_to_meta(torch.as_tensor, args, kwargs)


def new_tensor_on_meta(*args: Any, **kwargs: Any) -> Tensor:
    """`like.new_tensor` on the meta device, made on the CPU and moved from there."""
    return _moved_to_meta(Tensor.new_tensor, args, kwargs)


_ON_META: dict[Any, Callable[..., Tensor]] = {
    torch.tensor: tensor_on_meta,
    torch.as_tensor: as_tensor_on_meta,
    "new_tensor": new_tensor_on_meta,
}


def _fake_on_meta(run_node: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo's `run_node`, in which these calls give fake tensors."""

    def run(tracer: Any, node: fx.Node, args: Any, kwargs: Any, *more: Any) -> Any:
        result = run_node(tracer, node, args, kwargs, *more)
        instead = _ON_META.get(node.target)
        is_real = isinstance(result, Tensor) and not isinstance(result, FakeTensor)
        if instead is None or not (is_real and result.is_meta):
            return result
        node.op, node.target = "call_function", instead
        return run_node(tracer, node, args, kwargs, *more)

    return run


@contextlib.contextmanager
def _wide_gradients_hidden(frame: Any) -> Iterator[None]:
    """A region in which gradients wider than their parameters are not on them.

    The gradient of a half-precision parameter that has an fp32 master is fp32.  Dynamo
    refuses to trace a tensor whose gradient has another dtype ("dtype mismatch between
    tensor and its gradient", torch 2.13): a model would be left to Python at a capture
    between a backward and `zero_grad()`, of a second micro batch of another size or of
    a validation.  A graph reads no gradient of its parameters.  At the end of the
    region they are back, with any that other threads have added since.
    """
    hidden: dict[int, tuple[Tensor, Tensor]] = {  # a tied parameter counts once
        id(parameter): (parameter, parameter.grad)
        for model in methods_modules(frame)
        for module in modules_of(model)  # the class may override `parameters()`
        for parameter in parameters_here(module).values()
        if parameter is not None
        and (parameter.is_leaf or parameter.retains_grad)  # torch warns of any other
        and parameter.grad is not None
        and parameter.grad.dtype != parameter.dtype
        and parameter.grad_dtype in (None, parameter.grad.dtype)  # it can be put back
    }
    for parameter, _ in hidden.values():
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in hidden.values():
            more = parameter.grad
            parameter.grad = gradient if more is None else gradient + more


# Custom Functions, captured with all their derivatives.
#
# Where a derivative beyond the first would be another than the Function's own, the
# Function is left to Python: the graph breaks at its call.


def _differentiable(note: Callable[[str], None]) -> Callable[..., Any]:
    """Dynamo's `call_apply`, whose nodes call our op instead of torch's."""
    original: Any = AutogradFunctionVariable.call_apply
    around: list[Any] = []  # the Functions that are being traced, outermost first

    def call_apply(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        around.append(self.fn_cls)
        try:
            if _in_backward(tx) and not is_once_differentiable(around[0]):
                _leave(around[0], "calls another custom Function", tx, note)
            result = original(self, tx, args, kwargs)
            for node in reversed(tx.output.current_tracer.graph.nodes):
                if node.target is CUSTOM_FUNCTION:
                    break
                if node.target is TORCHS_CUSTOM_FUNCTION:
                    once = is_once_differentiable(self.fn_cls)
                    if not once and asks_for_grad_mode(self.fn_cls):
                        does = "asks for grad mode or switches it"
                        _leave(self.fn_cls, does, tx, note)
                    keep_grad_mode(tx.output.nn_modules[node.args[1].target])
                    node.target = CUSTOM_FUNCTION
                    node.kwargs = {**node.kwargs, ONCE: once}
                    break
            return result
        finally:
            around.pop()

    return call_apply


def _leave(function: Any, does: str, tx: Any, note: Callable[[str], None]) -> None:
    """Has the graph break at the call of a custom Function, with a line that says so.

    Raises:
        Unsupported: always; Dynamo breaks the graph.
    """
    paths = paths_in(rooted(tx.nn_module_stack))
    where = f" in module {paths[-1]}" if paths and paths[-1] else ""
    why = (
        f"the custom Function {function.__qualname__}{where} is left to Python, "
        f"because its backward {does}: a graph would have another second derivative"
    )
    note(why)
    raise Unsupported(f"autoamp: {why}")


def _in_backward(tx: Any) -> bool:
    """Whether the code that Dynamo traces now is a custom Function's `backward`."""
    # The tracer of the `backward` is inside the tracer of the `forward`.
    tracer, functions = tx.output.current_tracer, 0
    while tracer is not None:
        functions += getattr(tracer, "source_target", None) == "autograd.Function"
        tracer = tracer.parent
    return functions > 1


# Custom Functions under `torch.amp.custom_fwd`, captured as autocast runs them.
#
# `custom_fwd(cast_inputs=...)` casts the operands of a Function, and runs its `forward`
# with autocast off, only where autocast is on.  A graph that Dynamo captures without
# autocast tells nothing of that.  So Dynamo traces each call of such a Function in a
# region of autocast of its own, and the decorators act there as under autocast.

_DECORATED = torch.amp.custom_fwd(lambda _: None, device_type="cpu").__code__


def _has_custom_fwd(function: type[torch.autograd.Function]) -> bool:
    """Whether the `forward` of a custom Function is under `torch.amp.custom_fwd`."""
    return any(
        getattr(each, "__code__", None) is _DECORATED
        for each in unwrapped(function.forward)
    )


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
    if isinstance(result, Tensor) and result.dtype in LOW_DTYPES.values():
        return result.to(torch.float32)
    return result


def traced_in_widening(node: fx.Node) -> bool:
    """Whether a node is the cast to fp32 of a result that autocast leaves half.

    The name of our function in the stack trace tells; without a trace the answer is no.
    """
    return f"in {_widened_after_autocast.__name__}" in (node.stack_trace or "")


def _followed(dtype_of: DtypeOf, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, which traces such a Function as autocast runs it."""
    failed: set[Any] = set()

    def call_apply(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        function = self.fn_cls
        dtype, device = None, _device_of_fp32([*args, *kwargs.values()])
        followed = device and function not in failed and _has_custom_fwd(function)
        if followed and not _in_region(tx):
            dtype = dtype_of([*paths_in(rooted(tx.nn_module_stack))])
        if dtype is None:
            return original(self, tx, args, kwargs)
        cause = None
        try:
            result = _traced(tx, [self, device, dtype, *args], kwargs)
            if not _mixes_dtypes(tx):
                return result
        except (RestartAnalysis, SkipFrame):  # Dynamo's own, which end this trace
            raise
        except Exception as error:  # noqa: BLE001 (any: the Function fails so)
            cause = error
        # Dynamo begins the frame again, and traces the Function as it is.
        failed.add(function)
        tx.speculation_log.clear()  # the frame goes another way the next time
        raise RestartAnalysis(
            restart_reason=f"autoamp: {function.__name__} fails under autocast"
        ) from cause

    return call_apply


def _device_of_fp32(args: list[Any]) -> str | None:
    """The device type of the first fp32 tensor among `args`; None where there is none.

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
