"""Any FX graph to one spelling per op: the pre-dispatch ATen graph.

Dynamo's graphs spell one op three ways (`F.linear`, `nn.Linear`, a method).  ATen above
autograd has one, its names are those autocast's lists use, composite ops stay whole,
and autograd still runs below it, so attention kernels are chosen by dtype.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.analyse.control_flow import (
    BODY_LEFT,
    BODY_RECORDS,
    CONTROL_FLOW,
    LOWERED_BODY,
    Places,
    body_inputs,
    written_input,
)
from autoamp.analyse.settled import spellings_of
from autoamp.analyse.spelling import Spellings
from autoamp.analyse.transforms import fold_transforms
from autoamp.errors import CaptureError
from autoamp.graph_functions import LEAF_FUNCTIONS, checkpointed
from autoamp.ops import drop_dead, has_effect

_PACKAGE = str(Path(__file__).parent.parent)


UNTRACED = "autoamp_untraced"
"""In the `meta` of an ATen graph: calls that stayed whole, and why, by their names."""


NUMBER = "autoamp_number"
"""In the `meta` of a placeholder: the number in the model's own tensor given for it."""

_OWN = re.compile(r"L\['(mod|self)'\]|G\[")
"""Where a Dynamo source begins that is not an argument of the call."""


@dataclass(frozen=True)
class Normalised:
    """An ATen graph and the fake tensors it was traced with."""

    gm: fx.GraphModule
    inputs: tuple[Any, ...]
    fake_mode: compat.FakeTensorMode


def normalise(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Normalised:
    """The ATen graph of `gm`; `gm` is not changed.

    Args:
        gm: a Dynamo graph (parameters are placeholders) or any other `GraphModule`
            whose parameters and buffers are its own attributes.
        example_inputs: one value per placeholder, real or fake tensors, or ints.

    Raises:
        CaptureError: an op could not be traced; the message names it.
    """
    wanted = sum(n.op == "placeholder" for n in gm.graph.nodes)
    if isinstance(example_inputs, torch.Tensor) or len(example_inputs) != wanted:
        given = "one tensor" if torch.is_tensor(example_inputs) else len(example_inputs)
        message = (
            f"the graph has {wanted} inputs, but {given} given as example inputs; give "
            "a sequence of one value per input"
        )
        raise CaptureError(message)
    spellings = spellings_of(gm, example_inputs)
    if spellings is not None:
        mode, fakes = spellings.mode, spellings.inputs
        with contextlib.suppress(CaptureError):  # the long way says what is wrong
            lowered = _trace(gm, fakes, mode, spellings)
            _restore_placeholders(lowered, gm, fakes, example_inputs)
            return Normalised(lowered, fakes, mode)
    mode = compat.current_fake_mode(example_inputs) or compat.new_fake_mode()
    fakes = tuple(compat.fake_inputs(example_inputs, mode))
    lowered = _trace(gm, fakes, mode)
    _restore_placeholders(lowered, gm, fakes, example_inputs)
    return Normalised(lowered, fakes, mode)


def _trace(
    gm: fx.GraphModule,
    fakes: Sequence[Any],
    mode: compat.FakeTensorMode,
    spellings: Spellings | None = None,
) -> fx.GraphModule:
    """The ATen graph of `gm`, whose own parameters and buffers stay attributes."""
    gm = fold_transforms(gm)
    named = {**dict(gm.named_parameters()), **dict(gm.named_buffers())}
    fake_named = dict(
        zip(named, compat.fake_inputs([*named.values()], mode), strict=True)
    )
    lowering = _Lowering(gm, mode, spellings)

    def run(*values: Any) -> Any:
        attributes = dict(zip(named, values, strict=False))
        with compat.with_parameters(gm, attributes):
            return lowering.run(*values[len(named) :])

    try:
        inputs = compat.told_apart([*fake_named.values(), *fakes])
        if spellings is None:
            traced = compat.trace_pre_dispatch(run, inputs, mode)
        else:
            begin = compat.recorded_inputs
            traced = compat.trace_pre_dispatch(lambda: run(*begin(inputs)), (), mode)
    except Exception as error:
        where = lowering.current_node
        at = f" at {where.format_node()}" if where is not None else ""
        message = (
            f"tracing to ATen failed{at}: {type(error).__name__}: {error}. "
            "This graph runs unconverted; report this with the op named above."
        )
        raise CaptureError(message) from error
    for name, body in lowering.bodies.items():
        setattr(traced, name, body)
    traced.meta[UNTRACED] = lowering.untraced
    _placeholders_to_attributes(traced, named)
    for node in list(traced.graph.nodes):
        _drop_our_frames(node)
        if _refuses_backward(node, mode):
            _detach_operands(traced.graph, node)
    drop_dead(traced.graph)
    traced.recompile()
    return traced


def _drop_our_frames(node: fx.Node) -> None:
    """Takes the frames of this package out of a node's stack trace."""
    trace = _without_our_frames(node.meta.get("stack_trace") or "")
    if trace:
        node.meta["stack_trace"] = trace
    else:
        node.meta.pop("stack_trace", None)


@functools.lru_cache(maxsize=1024)  # the nodes of one line share it
def _without_our_frames(trace: str) -> str:
    if _PACKAGE not in trace:
        return trace
    frames = re.split(r"(?m)^(?=  File )", trace)
    return "".join(f for f in frames if f'File "{_PACKAGE}' not in f)


def _refuses_backward(node: fx.Node, mode: compat.FakeTensorMode) -> bool:
    """Whether it is a factory whose result would be of a derivative torch lacks.

    Torch's functions that take tensor options call their op below autograd
    (`torch.randint_like`, `linspace` of tensors); the op itself, which is what a trace
    records, would take part in the backward, only to raise there.
    """
    target = node.target
    if not isinstance(target, compat.OpOverload) or not node.all_input_nodes:
        return False
    if not any(a.name == "pin_memory" for a in target._schema.arguments):
        return False
    with mode, torch.enable_grad(), compat.outside_trace():
        args, kwargs = fx.map_arg((node.args, node.kwargs), _as_leaf)
        result = target(*args, **kwargs)
    maker = getattr(result, "grad_fn", None)
    return maker is not None and maker.name().endswith("::NotImplemented")


def _as_leaf(node: fx.Node) -> Any:
    value = node.meta["val"]
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value


def _detach_operands(graph: fx.Graph, node: fx.Node) -> None:
    for operand in node.all_input_nodes:
        with graph.inserting_before(node):
            apart = graph.call_function(torch.ops.aten.detach.default, (operand,))
        apart.meta = dict(node.meta)
        with torch.no_grad():
            apart.meta["val"] = operand.meta["val"].detach()
        node.replace_input_with(operand, apart)


def _placeholders_to_attributes(
    traced: fx.GraphModule, named: dict[str, torch.Tensor]
) -> None:
    placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    for (name, value), node in zip(named.items(), placeholders, strict=False):
        _assign(traced, name, value)
        with traced.graph.inserting_before(node):
            attribute = traced.graph.get_attr(name)
        attribute.meta = dict(node.meta)
        attribute.meta["autoamp_requires_grad"] = value.requires_grad
        attribute.meta["autoamp_is_parameter"] = isinstance(value, torch.nn.Parameter)
        node.replace_all_uses_with(attribute)
        traced.graph.erase_node(node)


def _assign(root: torch.nn.Module, path: str, value: torch.Tensor) -> None:
    """Sets parameter or buffer `path` ("a.b.weight") of `root`."""
    *parents, name = path.split(".")
    for parent in parents:
        if not hasattr(root, parent):
            root.add_module(parent, torch.nn.Module())
        root = getattr(root, parent)
    if isinstance(value, torch.nn.Parameter):
        root.register_parameter(name, value)
    else:
        root.register_buffer(name, value)


class _Lowering(fx.Interpreter):
    """Runs a graph for the tracer; keeps what must not be traced through whole."""

    def __init__(
        self,
        gm: fx.GraphModule,
        mode: compat.FakeTensorMode,
        spellings: Spellings | None,
    ) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.mode = mode
        self.spellings = spellings
        self.bodies: dict[str, fx.GraphModule] = {}
        self.untraced: dict[str, str] = {}
        self.current_node: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self.current_node = n
        if n.op == "placeholder":
            return self.placeholder(n.target, n.args, n.kwargs)
        known = self.spellings
        call = known.call(n, self.env) if known is not None else None
        if known is not None and call is not None:
            known.learn(call, n, functools.partial(self._called, n))
            repeated = known.repeated(call, n)
            if repeated is not None:
                return repeated
        with fx.traceback.set_current_meta(n):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            before = _proxies((args, kwargs))
            mark = compat.recorded_so_far()
            try:
                result = getattr(self, n.op)(n.target, args, kwargs)
            except Exception as error:
                if not _may_stay_whole(n):
                    raise
                compat.forget_since(mark)
                result = self._untraced(n, args, kwargs, error)
            result = _keep_identities_apart(result, before)
            if known is not None and call is not None:
                made = compat.recorded_since(mark)
                result = known.adopt(call, n, made, result)
            return result

    def _called(self, n: fx.Node) -> Any:
        """The call of a node, of torch's functions and methods alone."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if isinstance(n.target, str):
            return super().call_method(n.target, args, kwargs)
        return super().call_function(n.target, args, kwargs)

    def _untraced(self, n: fx.Node, args: Any, kwargs: Any, error: Exception) -> Any:
        """A call that cannot be traced to ATen: one node, run as the user wrote it."""
        target: Any = n.target
        if n.op == "call_method":
            target = getattr(torch.Tensor, str(n.target))
        self.untraced[n.name] = f"{type(error).__name__}: {error}"
        with compat.outside_trace(), self.mode:
            result = pytree.tree_map_only(
                torch.Tensor,
                lambda v: torch.empty_strided(
                    v.shape, v.stride(), dtype=v.dtype, device=v.device
                ),
                n.meta["example_value"],
            )
        return compat.record_call(target, args, kwargs, result, n.name)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is compat.CHECKPOINT:
            return self._checkpoint(args, kwargs)
        if isinstance(target, compat.HigherOrderOperator):
            return self._opaque(target, args, kwargs)
        if target in compat.PACKED and compat.is_packed(args):
            return self._packed(target, args)
        if target is getattr and args[1] == "data" and torch.is_tensor(args[0]):
            target, args = compat.GET_DATA, args[:1]
        # The tracer does not see `.data`: it would become a constant of the graph, and
        # what is written to it would be lost.
        if target in LEAF_FUNCTIONS or target is compat.GET_DATA:
            return self._opaque(target, args, kwargs)
        return super().call_function(target, args, kwargs)

    def _checkpoint(self, args: Any, kwargs: Any) -> Any:
        """A checkpointed region: its body becomes an ATen graph of its own."""
        body, *operands = args
        with compat.outside_trace():
            result = _InPlace(body).run(*operands)
            lowered = self._lowered(body, operands, "checkpointed")
        proxy_body = self._register(lowered)
        options = {k: v for k, v in kwargs.items() if k == "preserve_rng_state"}
        return compat.record_call(
            checkpointed, (proxy_body, *operands), options, result, "checkpointed"
        )

    def _packed(self, target: Any, args: Any) -> Any:
        """A recurrent layer on a packed sequence, whose lengths are in a tensor."""
        with compat.outside_trace():
            result = compat.packed_result(*args)
        op = compat.PACKED[target]
        return compat.record_call(op, args, {}, result, target.__name__)

    def _opaque(self, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One untraced node: custom autograd Functions, control flow, our own calls.

        Traced through, a custom Function silently loses its backward.
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
        self, places: Places, args: Sequence[Any], name: str
    ) -> tuple[Any, ...]:
        """`args` of a branch or loop, with bodies that are ATen graphs if they can be.

        One that cannot be, or that writes to what it is handed, stays as it is.
        """
        flows = torch.is_grad_enabled() and any(
            isinstance(value, torch.Tensor) and value.requires_grad
            for value in pytree.tree_leaves(args)
        )
        found = list(args)
        for place in places.bodies:
            body, shared = args[place], args[places.shared]
            try:
                with compat.outside_trace():
                    inputs = body_inputs(body, shared, self.mode, flows)
                    lowered = self._lowered(body, inputs, name)
                written = written_input(lowered)
                if written is not None:
                    raise CaptureError(f"it writes to its input {written}")
            except CaptureError as error:
                lowered = copy.copy(body)
                lowered.meta = {**body.meta, BODY_LEFT: str(error)}
            found[place] = lowered
        return tuple(found)

    def _lowered(
        self, body: fx.GraphModule, inputs: Sequence[Any], name: str
    ) -> fx.GraphModule:
        """The ATen graph of a sub-graph that op `name` calls, to be rewritten too."""
        lowered = _trace(body, inputs, self.mode)
        _restore_placeholders(lowered, body, tuple(inputs), inputs)
        lowered.meta[LOWERED_BODY] = name
        lowered.meta[BODY_RECORDS] = torch.is_grad_enabled()
        return lowered

    def _fake_result(self, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            if target is checkpointed:
                return args[0](*args[1:])
            return target(*args, **kwargs)
        except Exception:
            # Some higher-order ops cannot run outside their own tracing; Dynamo left
            # what it saw on the node.
            node = self.current_node
            if node is not None and "example_value" in node.meta:
                return node.meta["example_value"]
            raise

    def _register(self, body: fx.GraphModule) -> Any:
        name = f"body_{len(self.bodies)}"
        self.bodies[name] = body
        # The tracer drops what looks dead in sub-graphs too, and takes `x.mul_(2)` for
        # dead: it gets another copy to do that to.
        graph = fx.Graph()
        graph.output(graph.graph_copy(body.graph, {}))
        return compat.module_proxy(name, fx.GraphModule(body, graph))


def _may_stay_whole(node: fx.Node) -> bool:
    """Whether a call's result is known without tracing it, and it writes to nothing.

    A view of an operand may be among them: `verify` sees what is written through it.
    """
    calls = node.op in ("call_function", "call_method")
    if not calls or isinstance(node.target, compat.HigherOrderOperator):
        return False
    return "example_value" in node.meta and not has_effect(node)


class _InPlace(fx.Interpreter):
    """Runs checkpointed regions as if they were not.

    Torch's own op runs them under a mode that knows no other higher-order op, such as
    the branches of `torch.cond`.
    """

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is compat.CHECKPOINT:
            body, *operands = args
            return _InPlace(body).run(*operands)
        return super().call_function(target, args, kwargs)


def _proxies(values: Any) -> list[tuple[torch.Tensor, Any]]:
    tensors = [v for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor)]
    return [(t, compat.recorded_proxy(t)) for t in tensors]


def _keep_identities_apart(
    result: Any, before: Sequence[tuple[torch.Tensor, Any]]
) -> Any:
    """Gives a non-mutating op that returned its own argument a result of its own."""
    if not isinstance(result, torch.Tensor):
        return result
    for tensor, proxy in before:
        if result is tensor and proxy is not None:
            now = compat.recorded_proxy(result)
            if now is proxy or now is None:
                return result
            target = compat.proxy_node(now).target
            mutates = (
                isinstance(target, compat.OpOverload) and target._schema.is_mutable
            )
            return result if mutates else compat.split_identity(result, proxy)
    return result


def _restore_placeholders(
    lowered: fx.GraphModule,
    original: fx.GraphModule,
    fakes: Sequence[Any],
    given: Sequence[Any],
) -> None:
    """Gives placeholders their readable names, sources and gradient flags back.

    And the numbers in 0-dim buffers and the like, which are the model's own.
    """
    sources = compat.placeholder_sources(original)
    before = [n for n in original.graph.nodes if n.op == "placeholder"]
    after = [n for n in lowered.graph.nodes if n.op == "placeholder"]
    every = zip(before, after, fakes, sources, given, strict=True)
    for old, new, fake, source, real in every:
        if _OWN.match(source):
            new.meta[NUMBER] = compat.held_number(real)
        path = module_path(source) or old.meta.get("autoamp_path", "")
        name = re.sub(r"\W+", "_", path).strip("_") if path else old.name
        name = "self_" if name == "self" else name  # the generated code has that one
        new.name = lowered.graph._graph_namespace.create_name(name or old.name, None)
        new.target = new.name
        new.meta["autoamp_path"] = path
        new.meta["autoamp_requires_grad"] = (
            isinstance(fake, torch.Tensor) and fake.requires_grad
        )
        new.meta["autoamp_is_parameter"] = isinstance(fake, torch.nn.Parameter)
    lowered.recompile()


@functools.lru_cache(maxsize=4096)  # asked for every node, of few modules
def module_path(source: str) -> str:
    """A Dynamo source as a user would write it: `L['mod'].fc.weight` is `fc.weight`.

    `_modules['0']`, `_parameters['w']`, `[0]` and `['a']` all become dotted names;
    arguments the entry takes as `*args` and `**kwargs` lose that.
    """
    path = re.sub(r"\._(modules|parameters|buffers)\b", "", source)
    path = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", path)
    path = re.sub(r"^L?\.?(mod|self)\b\.?", "", path.removeprefix("L.")).strip(".")
    return re.sub(r"^args\.(?=\d)", "input.", path.removeprefix("kwargs."))
