"""Makes fake tensors, traces functions with them, and makes and reads graphs."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch._higher_order_ops.wrap
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch import predispatch
from torch._guards import TracingContext, detect_fake_mode
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import _lazy_graph_module as lazy
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autoamp.compat.module_paths import source_name


def new_fake_mode(*, symbolic: bool = True) -> FakeTensorMode:
    """A fake mode for graphs that did not come from Dynamo; static shapes.

    Args:
        symbolic: a size that depends on data is unknown; otherwise it is an error.
    """
    shape_env = ShapeEnv() if symbolic else None
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=shape_env)


def current_fake_mode(inputs: Sequence[Any] = ()) -> FakeTensorMode | None:
    """Dynamo's fake mode inside a backend, else the mode of `inputs`, else None."""
    context = TracingContext.try_get()
    if context is not None and context.fake_mode is not None:
        return context.fake_mode
    mode = detect_fake_mode(list(inputs))
    return mode if isinstance(mode, FakeTensorMode) else None


def in_capture() -> bool:
    """Whether this is a backend, called for a graph that Dynamo has just captured."""
    return TracingContext.try_get() is not None


def copied_placeholder(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A placeholder of `graph` like `node`, with its source, and without a default."""
    new = graph.node_copy(node)
    new.args = ()
    if hasattr(node, "_dynamo_source"):
        new._dynamo_source = node._dynamo_source
    return new


def take_trees_like(gm: fx.GraphModule, other: fx.GraphModule) -> None:
    """Has `gm` take arguments and give results in the containers of `other`."""
    gm.graph.set_codegen(other.graph._codegen)


def forget_inputs(gm: fx.GraphModule) -> None:
    """Lets the fake modes of `gm` forget which tensors they have made fakes of.

    Fake modes live as long as the graph, and hold weak references to those tensors;
    `torch.utils.swap_tensors` refuses a tensor with a weak reference.  The function is
    to be called once all is traced, because a tensor met again would get another fake.
    """
    kept = [n.meta.get(key) for n in gm.graph.nodes for key in ("val", "example_value")]
    modes: list[Any] = [v.fake_mode for v in kept if isinstance(v, FakeTensor)]
    context = TracingContext.try_get()
    if context is not None:
        modes.append(context.fake_mode)
    for mode in modes:
        if mode is not None:
            describer = mode.fake_tensor_converter.meta_converter.describer
            describer.lookup_tensor = type(describer.lookup_tensor)()


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


def trace_pre_dispatch(
    run: Callable[..., Any],
    inputs: Sequence[Any],
    mode: FakeTensorMode,
    parts: Mapping[OpOverload, Callable[..., Any]],
) -> fx.GraphModule:
    """The ATen graph of `run(*inputs)`, above autograd and autocast.

    Composite ops (`linear`, `layer_norm`, `dropout`, attention) stay whole, and the
    origin (module path, source line) of each node is kept where the caller sets it.

    Args:
        parts: functions that are called in the place of ops; an op stays whole where
            its function returns `NotImplemented`.
    """
    with fx.traceback.preserve_node_meta(), mode:
        return make_fx(
            run,
            decomposition_table=dict(parts),
            tracing_mode="real",
            pre_dispatch=True,
            _allow_non_fake_inputs=True,
            _error_on_data_dependent_ops=False,
            # Nothing reads the records of that mode, and the mode doubles the time.
            _disable_torch_fn_metadata_mode=True,
        )(*inputs)


def as_traced() -> contextlib.AbstractContextManager[Any]:
    """A region in which fake tensors meet the functions that a trace sends them to.

    Torch has written some composite ops a second time for fake tensors.  Outside this
    region fake tensors meet the kernels of `lstm` for GPUs, which ask the driver and
    read memory.
    """
    region: contextlib.AbstractContextManager[Any] = enable_python_dispatcher()
    return region


def is_plain_fake(value: Any) -> bool:
    """Whether `value` is a fake tensor with strides, and of no subclass."""
    return type(value) is FakeTensor and value.layout == torch.strided


def graph_module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A `GraphModule` whose code is made when it is first called or looked at."""
    with lazy._use_lazy_graph_module(True):
        return lazy._make_graph_module(root, graph)


def make_code(gm: fx.GraphModule) -> None:
    """Makes the code of a `GraphModule` now: from now on its `forward` is that code."""
    if isinstance(gm, lazy._LazyGraphModule):
        gm.real_recompile()


def hint(value: Any) -> int:
    """An int for a possibly symbolic size, without specialising the graph on it.

    `int(size)` would add a guard and make one graph per shape.
    """
    if isinstance(value, int):
        return value
    node: Any = getattr(value, "node", None)
    for name in ("optimization_hint", "size_hint"):  # the second in torch 2.11
        ask = getattr(getattr(node, "shape_env", None), name, None)
        if ask is not None:
            with contextlib.suppress(Exception):
                return int(ask(node.expr))
    known = getattr(node, "hint", None)
    return int(known) if known is not None else 1


def like(
    value: Any, *, device: torch.device | str | None = None, symbolic: bool = False
) -> Any:
    """An empty tensor with the shape, strides, dtype and device of `value`.

    In a fake mode the tensor is a fake one.  The parts of a list or tuple are made each
    by itself; another value stays as it is.

    Args:
        device: another device than the value's.
        symbolic: whether symbolic sizes stay symbolic; they become numbers else.
    """
    if isinstance(value, torch.Tensor):
        dtype, device = value.dtype, device or value.device
        plain = symbolic or type(value) is torch.Tensor
        sizes = value.shape if plain else [hint(size) for size in value.shape]
        if value.layout is not torch.strided:
            return torch.empty(sizes, dtype=dtype, device=device)
        strides = value.stride()
        if not plain:
            strides = tuple([hint(stride) for stride in strides])
        return torch.empty_strided(sizes, strides, dtype=dtype, device=device)
    if isinstance(value, (list, tuple)):
        return type(value)(like(v, device=device, symbolic=symbolic) for v in value)
    if isinstance(value, torch.SymInt) and not symbolic:
        return hint(value)
    return value


def size_symbols(gm: fx.GraphModule) -> list[Any]:
    """The symbols of a graph's inputs that are symbolic sizes, in order."""
    values = [n.meta.get("val") for n in gm.graph.nodes if n.op == "placeholder"]
    return [v.node.expr for v in values if isinstance(v, torch.SymInt)]


def size_with(value: Any, values: Mapping[Any, int]) -> int:
    """The value of a possibly symbolic size, given the values of its symbols."""
    expression = getattr(getattr(value, "node", None), "expr", None)
    if expression is not None and hasattr(expression, "subs"):
        known = expression.subs(dict(values))
        if known.is_number:
            return int(known)
    return hint(value)


def placeholder_sources(gm: fx.GraphModule) -> list[str]:
    """For each placeholder of a Dynamo graph, where its value comes from ("" unknown).

    A source is, for instance, `L['mod'].fc.weight`.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    sources = [getattr(node, "_dynamo_source", None) for node in inputs]
    return ["" if source is None else source_name(source) for source in sources]


with_parameters = torch.nn.utils.stateless._reparametrize_module
"""`with_parameters(module, values)`: its parameters and buffers are `values`, by name.
"""


def schema(op: torch._ops.OpOverload) -> torch.FunctionSchema:
    """The schema of a torch op: its arguments and results, with their aliases."""
    return op._schema


@functools.cache  # torch makes a schema's arguments anew each time it is asked
def argument_names(op: torch._ops.OpOverload) -> tuple[str, ...]:
    """The names of an op's arguments, in the order of its schema."""
    return tuple(argument.name for argument in schema(op).arguments)


@functools.cache
def written_arguments(op: torch._ops.OpOverload) -> tuple[str, ...]:
    """The names of the arguments that an op writes to, as its schema declares."""
    return tuple(
        argument.name
        for argument in schema(op).arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def free_name(graph: fx.Graph, wanted: str) -> str:
    """A name no node of `graph` has: `wanted`, or one like it."""
    return graph._graph_namespace.create_name(wanted, None)


# Targets of nodes that change the mode of the nodes after them in a graph.
SET_GRAD = torch._C._set_grad_enabled
ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast
CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
COND = torch.ops.higher_order.cond
MAP = torch.ops.higher_order.map_impl
SCAN = torch.ops.higher_order.scan
WHILE_LOOP = torch.ops.higher_order.while_loop
# Dynamo's graphs call this function for `x.data`; the stubs do not know the name.
GET_DATA: Any = getattr(torch._C._autograd, "_get_data_attr")  # noqa: B009
MODE_CHANGES = frozenset({SET_GRAD, ENTER_AUTOCAST, EXIT_AUTOCAST})

# Where a transform of torch.func starts and ends in Dynamo's graphs.
TRANSFORM_ENTRIES, TRANSFORM_EXITS = (
    frozenset(
        getattr(module, f"_{transform}_{change}_nesting")
        for module in (torch._C._functorch, predispatch)
        for transform in ("vmap", "grad", "jvp")
        if hasattr(module, f"_{transform}_{change}_nesting")  # 2.11 has two of "jvp"
    )
    for change in ("increment", "decrement")
)
# An op that calls a sub-graph, and does nothing else.
WRAP = torch.ops.higher_order.wrap

# The op that registers a hook on a tensor inside a graph; torch 2.11 has none.
REGISTER_HOOK: Any = next(
    (
        vars(importlib.import_module(name))["register_hook_op"]
        for name in ["torch._higher_order_ops.register_hook"]
        if importlib.util.find_spec(name) is not None
    ),
    None,
)

# The module and name by which `clip_grad_norm_` finds its norm function.
TOTAL_NORM: tuple[Any, str] = (torch.nn.utils.clip_grad, "_get_total_norm")


def under_custom_fwd(body: torch.fx.GraphModule) -> bool:
    """Whether the graph is of a `forward` decorated with `torch.amp.custom_fwd`.

    Dynamo's graphs keep nothing of the decorator but its frame in the stack traces.
    Without stack traces the answer is no.
    """
    return any(map(in_custom_fwd, body.graph.nodes))


def in_custom_fwd(node: torch.fx.Node) -> bool:
    """Whether a call was made in a `forward` decorated with `torch.amp.custom_fwd`."""
    return "in decorate_fwd" in (node.stack_trace or "")


def quick_node(  # noqa: PLR0917
    graph: fx.Graph,
    op: str,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str | None = None,
) -> fx.Node:
    """`graph.create_node(op, target, args, kwargs, name)`, without a search.

    `create_node` looks at every leaf of the arguments, to warn of symbolic numbers that
    are no nodes (torch 2.13), and that takes more time than all else it does.
    """
    node = graph.create_node(op, target, (), {}, name)
    if args:
        node.args = args
    if kwargs:
        node.kwargs = kwargs
    return node


def quick_copy(
    graph: fx.Graph, into: fx.Graph, values: dict[fx.Node, fx.Node]
) -> fx.Node:
    """Copies a graph with its output into the empty graph `into`; gives the output.

    Args:
        values: gets the copy of each node but the output.
    """
    result: Any = None
    for node in graph.nodes:
        if node.op == "output":
            result = fx.map_arg(node.args[0], values.__getitem__)
            break
        args: Any = fx.map_arg(node.args, values.__getitem__)
        kwargs: Any = fx.map_arg(node.kwargs, values.__getitem__)
        new = quick_node(into, node.op, node.target, args, kwargs, node.name)
        if node.type is not None:
            new.type = node.type
        new.meta.update(node.meta)
        values[node] = new
    output: fx.Node = into.output(result)
    return output
