"""Reads and changes the record of a running trace: the node each tensor stands for."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import fx
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor_tree
from torch.utils import _pytree as pytree

from autoamp.compat.quick_nodes import quick_node

_ORIGIN = ("nn_module_stack", "stack_trace")
"""The keys in a node's `meta` that say where in the model the node comes from."""

_F = TypeVar("_F", bound=Callable[..., Any])


@contextlib.contextmanager
def outside_trace() -> Iterator[None]:
    """A region of a `trace_pre_dispatch` run that records nothing."""
    from torch._ops import _set_mode_pre_dispatch, unset_mode_pre_dispatch

    key = torch._C._TorchDispatchModeKey.PROXY
    mode = unset_mode_pre_dispatch(key)
    try:
        with torch.fx.experimental.proxy_tensor.disable_proxy_modes_tracing():
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
    record: Any = getattr(proxy_tensor, "_ProxyTensor", None)
    detached: Any = getattr(fake_impls, "fast_detach", None)
    if record is None or detached is None:
        track_tensor_tree(tensor, proxy, constant=None, tracer=tracer)
        return
    assert isinstance(tensor, FakeTensor)
    proxy.node.meta["val"] = detached(tensor.fake_mode, tensor)
    tracer.tensor_tracker[tensor] = record(proxy, None)


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


def module_proxy(name: str, module: fx.GraphModule) -> Any:
    """A `get_attr` of sub-graph `module`, registered as `name` in the trace."""
    tracer = _tracer()
    if tracer is None:
        return module
    tracer.root.register_module(name, module)
    return tracer.create_proxy("get_attr", name, (), {})
