"""Reads and changes the record of a running trace, and hears the ops of a call."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import fx
from torch._library import custom_ops
from torch._ops import (
    OpOverload,
    _set_mode_pre_dispatch,
    unset_mode_pre_dispatch,
)
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import profiler
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    get_proxy_mode,
    track_tensor_tree,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autoamp.compat.modes import AutocastState, in_autocast
from autoamp.compat.tracing import quick_node

_PROXY = torch._C._TorchDispatchModeKey.PROXY
_ORIGIN = ("nn_module_stack", "stack_trace")
"""The keys in a node's `meta` that say where in the model the node comes from."""


def profiled() -> bool:
    """Whether torch's profiler records at present; asked at every call of a graph."""
    return profiler._is_profiler_enabled


_F = TypeVar("_F", bound=Callable[..., Any])


@contextlib.contextmanager
def outside_trace() -> Iterator[None]:
    """A region of a `trace_pre_dispatch` run that records nothing."""
    mode = unset_mode_pre_dispatch(_PROXY)
    try:
        with proxy_tensor.disable_proxy_modes_tracing():
            yield
    finally:
        if mode is not None:
            _set_mode_pre_dispatch(mode)


def without_torch_function(function: _F) -> _F:
    """`function`, in which no mode looks at torch functions and tensors' attributes.

    While a trace is running a mode looks at each of them, which costs more than the
    function or attribute itself.
    """

    @functools.wraps(function)
    def quick(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return cast(_F, quick)


def _tracer() -> Any:
    """The tracer of the trace that is running; None outside a trace."""
    mode = get_proxy_mode()
    return None if mode is None else mode.tracer


def recorded_so_far() -> fx.Node | None:
    """The last node of the trace that is running; None outside a trace."""
    tracer = _tracer()
    if tracer is None:
        return None
    # In torch 2.11 the result of `reversed` is iterable, but no iterator.
    return next(iter(reversed(tracer.graph.nodes)), None)


def recorded_since(mark: fx.Node | None) -> list[fx.Node]:
    """The nodes recorded after `mark` in the trace that is running, in order."""
    tracer = _tracer()
    if tracer is None or mark is None:
        return []
    after = itertools.takewhile(lambda n: n is not mark, reversed(tracer.graph.nodes))
    return [*after][::-1]


def forget_since(mark: fx.Node | None) -> None:
    """Takes nodes recorded after node `mark` out of the trace that is running."""
    for node in reversed(recorded_since(mark)):
        node.graph.erase_node(node)


def recorded_proxy(tensor: torch.Tensor) -> Any:
    """The trace's record of `tensor`, or None outside a trace."""
    tracer = _tracer()
    return None if tracer is None else tracer.tensor_tracker.get(tensor)


def proxy_node(proxy: Any) -> fx.Node:
    """The graph node behind a result of `recorded_proxy`."""
    node = proxy.proxy.node
    assert isinstance(node, fx.Node)
    return node


def record_call(
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    name: str,
) -> Any:
    """Records one `call_function` node in the trace that is running; gives `result`.

    `result` (fake tensors, any nesting) becomes the value of the new node.
    """
    tracer = _tracer()
    if tracer is None:
        return result
    proxy_args, proxy_kwargs = pytree.tree_map(tracer.unwrap_proxy, (args, kwargs))
    proxy = tracer.create_proxy(
        "call_function", target, proxy_args, proxy_kwargs, name=name
    )
    return track_tensor_tree(result, proxy, constant=None, tracer=tracer)


@without_torch_function
def recorded_inputs(values: Sequence[Any]) -> Sequence[Any]:
    """`values`, now placeholders of the trace that is running, which is empty so far.

    Recording them here is quicker: a trace that is given `values` as arguments looks at
    each many times.
    """
    tracer = _tracer()
    for value in values:
        node = tracer.graph.create_node("placeholder", "given", (), {}, "given")
        proxy = fx.Proxy(node, tracer)
        if isinstance(value, FakeTensor):
            _track(value, proxy, tracer)
        else:
            track_tensor_tree(value, proxy, constant=None, tracer=tracer)
    return values


def recorded_input(at: int) -> Any:
    """The record of input number `at` of the trace that is running."""
    tracer = _tracer()
    inputs = tracer.graph.find_nodes(op="placeholder")
    return fx.Proxy(inputs[at], tracer)


def record_op(target: Any, args: Any, kwargs: Any, like: fx.Node) -> fx.Node:
    """Records a call of a torch op on nodes of the trace that is running.

    The node is named as if it had been traced, and has the origin of node `like`.
    """
    graph: fx.Graph = _tracer().graph
    is_op = isinstance(target, torch._ops.OpOverload)
    name = graph._target_to_str((target.overloadpacket if is_op else target).__name__)
    # The tracer is not used: it is slow, because it notes things that no pass reads.
    node = quick_node(graph, "call_function", target, args, kwargs, name)
    for key in _ORIGIN:
        if key in like.meta:
            node.meta[key] = copy.copy(like.meta[key])
    return node


def record_value(node: fx.Node, tensor: torch.Tensor) -> None:
    """Has `tensor` stand for a node of the trace that is running."""
    tracer = _tracer()
    _track(tensor, fx.Proxy(node, tracer), tracer)


def record_as(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Has `other` stand for the node of `tensor` in the trace that is running."""
    tracer = _tracer()
    _track(other, tracer.tensor_tracker[tensor].proxy, tracer)


def _track(tensor: torch.Tensor, proxy: fx.Proxy, tracer: Any) -> None:
    """Does the work of `track_tensor_tree` for a tensor without symbolic sizes."""
    assert isinstance(tensor, FakeTensor)
    proxy.node.meta["val"] = fake_impls.fast_detach(tensor.fake_mode, tensor)
    tracer.tensor_tracker[tensor] = proxy_tensor._ProxyTensor(proxy, None)


def split_identity(tensor: torch.Tensor, before: Any) -> torch.Tensor:
    """An alias of `tensor` that stands for the op just traced.

    `tensor` stands for `before` again, its proxy from before the op.  An op that
    returns its own argument (`x.float()` of an fp32 tensor) makes the trace read every
    later use of `x` as a use of that op.  Uses of `x` stay uses of `x` when the op's
    result is another tensor object.
    """
    tracer = _tracer()
    if tracer is None:
        return tensor
    tracker = tracer.tensor_tracker
    now = tracker[tensor]
    alias = aliased(tensor)
    tracker[alias] = now
    tracker[tensor] = before
    return alias


def aliased(tensor: torch.Tensor) -> torch.Tensor:
    """An alias of `tensor` that a running trace knows nothing of."""
    with outside_trace():
        return tensor.view_as(tensor)


def restrided(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The memory of `tensor` with the layout of `like`, which has the same dtype."""
    with outside_trace():
        shape, stride, offset = like.shape, like.stride(), like.storage_offset()
        return tensor.detach().as_strided(shape, stride, offset)


def with_strides(tensor: torch.Tensor, strides: Sequence[Any]) -> torch.Tensor:
    """The memory of `tensor` with other strides."""
    with outside_trace():
        offset = tensor.storage_offset()
        return tensor.detach().as_strided(tensor.shape, strides, offset)


def module_proxy(name: str, module: fx.GraphModule) -> Any:
    """A `get_attr` of sub-graph `module`, registered as `name` in the trace."""
    tracer = _tracer()
    if tracer is None:
        return module
    tracer.root.register_module(name, module)
    return tracer.create_proxy("get_attr", name, (), {})


class Heard(NamedTuple):
    """The op a call comes to; `target` is None where the call returns its argument."""

    target: OpOverload | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _AnotherOpError(Exception):
    """The call comes to more than one op."""


class _Listening(ProxyTorchDispatchMode):
    """Takes the place of a trace for one call, and gives the op's known `result`."""

    def __init__(self, tracer: Any, result: Any) -> None:
        super().__init__(tracer, "real", pre_dispatch=True)
        self.result = result
        self.heard: Heard | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self.heard is not None:
            raise _AnotherOpError
        self.heard = Heard(func, args, kwargs or {})
        if isinstance(self.result, torch.Tensor):
            return self.result
        return (tuple if len(func._schema.returns) > 1 else list)(self.result)


def op_heard(call: Callable[[], Any], result: Any) -> Heard | None:
    """The one op that `call` comes to in a trace.

    The trace goes on as if `call` had not been made.  The answer is None where `call`
    comes to several ops, and where `call` does not pass on `result` as the op's result.

    Args:
        result: a fake tensor, or a list or tuple of some.
    """
    mode: Any = unset_mode_pre_dispatch(_PROXY)
    if mode is None:  # no trace is running
        return None
    listening = _Listening(mode.tracer, result)
    try:
        _set_mode_pre_dispatch(listening)
        try:
            given = call()
        finally:
            unset_mode_pre_dispatch(_PROXY)
    except Exception:  # noqa: BLE001 (ours, or since the result is no such op's)
        return None
    finally:
        _set_mode_pre_dispatch(mode)
    is_same = given is result
    if isinstance(given, list | tuple) and not isinstance(result, torch.Tensor):
        is_same = len(given) == len(result) and all(map(operator.is_, given, result))
    if not is_same:
        return None
    return listening.heard or Heard(None, (), {})


class Passed(NamedTuple):
    """How the autocast kernel of an op calls the op again."""

    args: tuple[Any, ...]
    """The arguments that the kernel gives to the op."""
    given: Any
    """The op's result inside the kernel."""
    result: Any
    """The kernel's result."""


def has_autocast_kernel(op: OpOverload, device: str) -> bool:
    """Whether an op has a kernel of its own for autocast on a device type."""
    key = _autocast_key(device)
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return key is not None and has(op.name(), key)


def registered_dtype(op: OpOverload, device: str) -> torch.dtype | None:
    """The dtype that `register_autocast` was given for an op; None where it was not.

    Torch keeps the dtype of a `custom_op` on its definition, and the dtype of any other
    op in the closure of a kernel written in Python.
    """
    definition = custom_ops.OPDEFS.get(op._schema.name)
    found = getattr(definition, "_autocast_dtype", {}).get(device)
    if found is None:
        key = getattr(torch._C.DispatchKey, _autocast_key(device) or "", None)
        kernel = None if key is None else op.py_kernels.get(key)
        if inspect.isfunction(kernel):
            found = inspect.getclosurevars(kernel).nonlocals.get("cast_inputs")
    return found if isinstance(found, torch.dtype) else None


def passed_under_autocast(
    op: OpOverload, args: Sequence[Any], state: AutocastState
) -> Passed | None:
    """How an op's autocast kernel calls the op, on fake tensors.

    The answer is None where the kernel does not call the op exactly once, or fails.
    """
    watch = _Watch(op)
    try:
        with torch.no_grad(), in_autocast(state), watch:
            result = op(*args)
    except Exception:  # noqa: BLE001 (the kernel is the user's)
        return None
    if len(watch.calls) != 1:
        return None
    ((called, given),) = watch.calls
    return Passed(called, given, result)


def _autocast_key(device: str) -> str | None:
    try:
        return f"Autocast{torch._C._dispatch_key_for_device(device)}"
    except RuntimeError:  # no such device type
        return None


class _Watch(TorchDispatchMode):
    """Notes the arguments and the result of each call of one op."""

    def __init__(self, op: OpOverload) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.op = op
        self.calls: list[tuple[tuple[Any, ...], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is self.op:
            self.calls.append((args, result))
        return result


class CountingDispatch(TorchDispatchMode):
    """A mode that sees every operator, and under which Dynamo still captures.

    A plain `TorchDispatchMode` makes Dynamo step aside, and a compiled or converted
    model then runs as plain fp32 without a word.  The two attributes below let Dynamo
    compile and run its graphs, higher-order operators included, under this mode.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether Dynamo may go on as if this mode were not there: yes."""
        return True


def kept_by_function(node: Any) -> list[Any]:
    """All that a node of an `autograd.Function` keeps outside `save_for_backward`.

    That is the attributes of its context, and the closure of its backward, as Dynamo's
    own operator for a captured Function has one.  Nothing for a node of any other kind.
    """
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return []
    cells = type(node)._forward_cls.backward.__closure__ or ()  # type: ignore[attr-defined]
    return [vars(node), [cell.cell_contents for cell in cells]]
