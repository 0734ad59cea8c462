"""Every private or recent torch API this package uses, each with its fallback.

torch 2.13 is what the project is tested on; 2.11 must work.  Nothing else in the
package reaches into `torch._*` (a test enforces it), so that a new torch breaks one
file.  Nothing here changes global state outside the call that asks for it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch._dynamo
from torch import fx
from torch._guards import TracingContext, detect_fake_mode
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import (
    get_proxy_mode,
    make_fx,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

# Names other modules take from here: torch has no public spelling for them.
__all__ = ["FakeTensor", "FakeTensorMode", "HigherOrderOperator", "OpOverload"]

# Nodes that change the mode of what follows them in a graph.
SET_GRAD = torch._C._set_grad_enabled
ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast
CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
# What `x.data` is in Dynamo's graphs; the stubs do not know it.
GET_DATA: Any = getattr(torch._C._autograd, "_get_data_attr")  # noqa: B009
MODE_CHANGES = frozenset({SET_GRAD, ENTER_AUTOCAST, EXIT_AUTOCAST})


# -- capture -----------------------------------------------------------------------

_COMPILE_TIME_CONFIG = {
    # Without it nn.LSTM, GRU and RNN give no graph at all, silently.
    "allow_rnn": True,
    # DDPOptimizer would call the backend once per bucket with fake tensors; the eager
    # back end has per-op autograd, so DDP overlaps without any splitting.
    "optimize_ddp": False,
    # By default a hook registered after the capture is never called.
    "skip_nnmodule_hook_guards": False,
}


def _configure_while_compiling(callback: Any) -> None:
    """Makes Dynamo's frame callback run under `_COMPILE_TIME_CONFIG`.

    The callback runs only when a frame is compiled, so a converted call pays nothing
    for it and torch's configuration is what the user set everywhere else.  (The class
    of this one object is replaced: the C side walks the object's own attributes, and a
    wrapping object crashes it.)
    """
    base = type(callback)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(_COMPILE_TIME_CONFIG):
            return base.__call__(self, *args, **kwargs)

    callback.__class__ = type(base.__name__, (base,), {"__call__": call})


def compile_entry(
    entry: types.FunctionType, backend: Callable[..., Any]
) -> Callable[..., Any]:
    """`entry` compiled by Dynamo with `backend` and recompile limits of its own.

    Dynamo counts recompiles per code object, shared by every function of one source:
    two dozen models converted through the same lambda would exhaust the limit of 8 and
    then run fp32 without a word.  `isolate_recompiles` (torch >= 2.13) gives each
    compiled entry its own count; a fresh code object does so for the entry itself on
    older versions.
    """
    fresh = types.FunctionType(
        entry.__code__.replace(co_name=entry.__code__.co_name),
        entry.__globals__,
        entry.__name__,
        entry.__defaults__,
        entry.__closure__,
    )
    optional: dict[str, Any] = {}
    # `torch._dynamo.optimize` takes whatever `torch.compile` does, unnamed.
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        optional["isolate_recompiles"] = True
    context: Any = torch._dynamo.optimize(backend=backend, **optional)
    if hasattr(context, "callback"):  # absent where TORCHDYNAMO_DISABLE is set
        _configure_while_compiling(context.callback)
    compiled: Callable[..., Any] = context(fresh)
    return compiled


def inductor_compile(
    gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    """`gm` compiled by inductor, as `torch.compile` would from inside a backend."""
    from torch._inductor.compile_fx import compile_fx

    compiled: Callable[..., Any] = cast(Any, compile_fx(gm, list(example_inputs)))
    return compiled


# -- fake tensors and tracing --------------------------------------------------------


def new_fake_mode() -> FakeTensorMode:
    """A fake mode for graphs that did not come from Dynamo; static shapes."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def current_fake_mode(inputs: Sequence[Any] = ()) -> FakeTensorMode | None:
    """Dynamo's fake mode inside a backend, else the mode of `inputs`, else None."""
    context = TracingContext.try_get()
    if context is not None and context.fake_mode is not None:
        return context.fake_mode
    mode = detect_fake_mode(list(inputs))
    return mode if isinstance(mode, FakeTensorMode) else None


def fake_inputs(inputs: Sequence[Any], mode: FakeTensorMode) -> list[Any]:
    """`inputs` as fake tensors of `mode`, with the symbolic sizes Dynamo gave them.

    A fresh fake mode would lose the symbolic shapes, and faking without the recorded
    symbolic context would specialise them (one graph per shape).
    """
    context = TracingContext.try_get()
    recorded = context.tensor_to_context if context is not None else {}

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        symbolic = recorded.get(value) if context is not None else None
        if symbolic is None:
            return mode.from_tensor(value, static_shapes=True)
        return mode.from_tensor(
            value,
            static_shapes=False,
            symbolic_context=symbolic,
            source=getattr(symbolic, "tensor_source", None),
        )

    return [fake(value) for value in inputs]


def told_apart(fakes: Sequence[Any]) -> list[Any]:
    """`fakes` with a tensor that stands for two inputs replaced by an alias of itself.

    A trace knows tensors by identity and would read one input as the other.
    """
    seen: set[int] = set()
    result = []
    for fake in fakes:
        again = isinstance(fake, torch.Tensor) and id(fake) in seen
        result.append(fake.view_as(fake) if again else fake)
        seen.add(id(fake))
    return result


def trace_pre_dispatch(
    run: Callable[..., Any], inputs: Sequence[Any], mode: FakeTensorMode
) -> fx.GraphModule:
    """The ATen graph of `run(*inputs)`, above autograd and autocast.

    Composite ops (`linear`, `layer_norm`, `dropout`, attention) stay whole, the origin
    (module path, source line) of each node is kept where the caller sets it.
    """
    optional: dict[str, Any] = {}
    if "_disable_torch_fn_metadata_mode" in inspect.signature(make_fx).parameters:
        # Nothing here reads what that mode records, and it doubles the tracing time.
        optional["_disable_torch_fn_metadata_mode"] = True
    with fx.traceback.preserve_node_meta(), mode:
        return make_fx(
            run,
            tracing_mode="real",
            pre_dispatch=True,
            _allow_non_fake_inputs=True,
            _error_on_data_dependent_ops=False,
            **optional,
        )(*inputs)


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
    mode = get_proxy_mode()
    if mode is None:
        return result
    tracer: Any = mode.tracer
    proxy_args, proxy_kwargs = pytree.tree_map(tracer.unwrap_proxy, (args, kwargs))
    proxy = tracer.create_proxy(
        "call_function", target, proxy_args, proxy_kwargs, name=name
    )
    return track_tensor_tree(result, proxy, constant=None, tracer=tracer)


def module_proxy(name: str, module: fx.GraphModule) -> Any:
    """A `get_attr` of sub-graph `module`, registered as `name` in the trace."""
    mode = get_proxy_mode()
    if mode is None:
        return module
    tracer: Any = mode.tracer
    tracer.root.register_module(name, module)
    return tracer.create_proxy("get_attr", name, (), {})


def recorded_proxy(tensor: torch.Tensor) -> Any:
    """The trace's record of what `tensor` is, or None outside a trace."""
    mode = get_proxy_mode()
    return None if mode is None else mode.tracer.tensor_tracker.get(tensor)


def split_identity(tensor: torch.Tensor, before: Any) -> torch.Tensor:
    """An alias of `tensor` that stands for the op just traced; `tensor` for before it.

    An op that returns its own argument (`x.float()` of an fp32 tensor) makes the trace
    read every later use of `x` as a use of that op.  Uses of `x` stay uses of `x` when
    the op's result is another tensor object.
    """
    mode = get_proxy_mode()
    if mode is None:
        return tensor
    tracker = mode.tracer.tensor_tracker
    now = tracker[tensor]
    with outside_trace():
        alias = tensor.view_as(tensor)
    tracker[alias] = now
    tracker[tensor] = before
    return alias


def proxy_node(proxy: Any) -> fx.Node:
    """The graph node behind what `recorded_proxy` gave."""
    node = proxy.proxy.node
    assert isinstance(node, fx.Node)
    return node


def hint(value: Any) -> int:
    """An int for a possibly symbolic size, without specialising the graph on it.

    `int(size)` would add a guard and make one graph per shape.
    """
    if isinstance(value, int):
        return value
    node: Any = getattr(value, "node", None)
    for name in ("optimization_hint", "size_hint"):
        ask = getattr(getattr(node, "shape_env", None), name, None)
        if ask is not None:
            with contextlib.suppress(Exception):
                return int(ask(node.expr))
    known = getattr(node, "hint", None)
    return int(known) if known is not None else 1


def placeholder_sources(gm: fx.GraphModule) -> list[str]:
    """For each placeholder of a Dynamo graph, where its value comes from ("" unknown).

    For instance `L['mod'].fc.weight`.
    """
    sources: list[str] = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            source = getattr(node, "_dynamo_source", None)
            sources.append(source.name if source is not None else "")
    # `Source.name` is a method in older versions, a property in newer ones.
    return [name() if callable(name) else str(name) for name in sources]


def with_parameters(
    module: torch.nn.Module, values: dict[str, torch.Tensor]
) -> contextlib.AbstractContextManager[None]:
    """A context in which `module` has `values` for its parameters and buffers."""
    return torch.nn.utils.stateless._reparametrize_module(module, values)


# -- weights -----------------------------------------------------------------------


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` less the argument checks that only functorch transforms need.

    A third of the call's time; `apply` itself is used while such a transform is active.
    """
    apply: Callable[..., Any] = function.apply
    checks = getattr(torch._C, "_are_functorch_transforms_active", None)
    base = getattr(super(torch.autograd.Function, function), "apply", None)
    if checks is None or base is None:
        return apply

    def direct(*args: Any) -> Any:
        return apply(*args) if checks() else base(*args)

    return direct


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies every source into its target, converting dtypes, in one op."""
    torch._foreach_copy_(list(targets), list(sources))


def lazy_clone(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy-on-write clone, or None where torch has none.

    While it lives, any write to `tensor`, through `.data` or an older alias too, moves
    the data to a new address, which `data_address` shows.
    """
    make = getattr(torch, "_lazy_clone", None)
    if make is None or not hasattr(torch._C, "_data_address"):
        return None
    try:
        clone: torch.Tensor = make(tensor)
    except RuntimeError:  # storages that cannot be shared lazily (mapped, external)
        return None
    return clone


def data_address(tensor: torch.Tensor) -> int:
    """Where the data lies, without making a lazy copy real."""
    ask = getattr(torch._C, "_data_address", None)
    return int(ask(tensor)) if ask is not None else tensor.data_ptr()


def data_addresses(tensors: Iterable[torch.Tensor]) -> list[int]:
    """`data_address` of each, at a tenth of a microsecond each."""
    return list(map(getattr(torch._C, "_data_address", data_address), tensors))


def held_alone(tensor: torch.Tensor) -> bool:
    """Whether nothing else that lives now can hold a pointer to the tensor's memory.

    A numpy array or DLPack capsule made of it is another owner of its storage, or (of a
    tensor that needs no gradient) of the tensor.  Writes through those go unseen, and
    a lazy clone that moves the data would leave them behind on the old memory.
    """
    count = getattr(torch._C, "_storage_Use_Count", None)
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:  # sparse and other storage-less layouts
        return False
    if count is None or storage.nbytes() != tensor.numel() * tensor.itemsize:
        return False
    owners_now = 2  # the tensor and the Python object just made
    if count(storage._cdata) > owners_now:
        return False
    # A graph, DDP too, may own a tensor that needs a gradient; DLPack refuses those.
    owners = getattr(tensor, "_use_count", None)
    return tensor.requires_grad or (owners is not None and owners() == 1)


def end_lazy_clone(tensor: torch.Tensor) -> None:
    """Makes the storage a plain one again once its lazy clones are gone.

    Its memory stays where it is; else the next write would do so, and two threads that
    write at once would both.
    """
    tensor.data_ptr()


def inside_backward() -> bool:
    """Whether this thread runs a backward pass (a region is being recomputed)."""
    ask = getattr(torch._C, "_current_graph_task_id", None)
    return ask is not None and ask() != -1


# -- the device --------------------------------------------------------------------


@functools.cache
def cpu_low_precision_units() -> dict[torch.dtype, str]:
    """Low dtypes this CPU multiplies in hardware, with the name of the unit."""
    units: dict[torch.dtype, str] = {}

    def has(name: str) -> bool:
        ask = getattr(torch.cpu, name, None)
        return bool(ask()) if ask is not None else False

    if has("_is_amx_tile_supported"):
        units[torch.bfloat16] = "amx_bf16"
    elif has("_is_avx512_bf16_supported"):
        units[torch.bfloat16] = "avx512_bf16"
    if has("_is_amx_fp16_supported"):
        units[torch.float16] = "amx_fp16"
    return units


def storage_id(tensor: torch.Tensor) -> int:
    """A number equal for tensors that share storage; fake tensors have storage too."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # sparse and other storage-less layouts
        return id(tensor)


# -- ambient autocast ----------------------------------------------------------------

_AUTOCAST_DEVICES = ("cpu", "cuda")


def any_autocast() -> bool:
    """Whether the caller is inside a `torch.autocast` region."""
    return torch._C._is_any_autocast_enabled()


@contextlib.contextmanager
def autocast_off() -> Iterator[None]:
    """A region in which no ambient `torch.autocast` is on."""
    if not any_autocast():
        yield
        return
    with contextlib.ExitStack() as stack:
        for device in _AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
