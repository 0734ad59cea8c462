"""Turns any FX graph into a pre-dispatch ATen graph, where each op has one name.

Dynamo's graphs spell one op three ways (`F.linear`, `nn.Linear`, a method).  ATen above
autograd has one name for it, which autocast's lists use too.  Composite ops stay
whole, and autograd still runs below the graph, so attention kernels are chosen by
dtype.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.errors import CaptureError
from autoamp.passes.ops import drop_dead
from autoamp.passes.see.dtensors_as_whole import (
    computes_on_dtensors,
    computes_on_nested,
    note_held,
    whole_inputs,
)
from autoamp.passes.see.lowering import Lowering
from autoamp.passes.see.op_cache import OpCache, op_cache_for
from autoamp.passes.see.parts import parts_on
from autoamp.passes.see.regions import Region, Regions
from autoamp.passes.see.strides import record_strides

# NOTE: two tracers, one after the other.
#
# Dynamo alone would leave `F.linear`, `nn.Linear` and `x.linear` as three nodes, and a
# rule for each.  `make_fx` alone cannot read the models that people run: it sees the
# ops of one call, without the branches, sizes and hooks that a later call may take, for
# which Dynamo has guards and graph breaks; `symbolic_trace` failed on 7 of 7 models of
# transformers.  `torch.export` makes one graph of a call or none.  So Dynamo captures
# the call, and `make_fx` runs Dynamo's graph.
#
# It runs above autograd (`pre_dispatch`).  AOT autograd's graphs are lowered further:
# their attention has been chosen for fp32 operands before a pass sees it, composite ops
# have come apart into ops that autocast's lists do not name, and the backward is in the
# graph, which eager PyTorch could then no longer make by itself.

_PACKAGE = str(Path(__file__).parents[2])

UNTRACED = "autoamp_untraced"
"""In the `meta` of an ATen graph: the names of calls that stayed whole, to reasons."""

NUMBER = "autoamp_number"
"""In the `meta` of a placeholder for the model's own tensor: the tensor's number."""

WIDENED = "autoamp_widened"
"""Set in the `meta` of a cast to fp32 that our capture made, of a result that is half
under autocast."""

_METADATA_HOLDS = torch.ops.aten._assert_tensor_metadata.default
"""`torch.export` writes this call before a cast of the model's own.  The call asserts
the dtype and the device that the trace has found, which are not the dtype after the
passes, and it has no result."""

_OWN = re.compile(r"L\['(mod|self)'\]|G\[")
"""The start of a Dynamo source that is not an argument of the call."""


@dataclass(frozen=True)
class Normalised:
    """An ATen graph and the fake tensors it was traced with."""

    gm: fx.GraphModule
    inputs: tuple[Any, ...]
    fake_mode: compat.FakeTensorMode


def normalise(
    gm: fx.GraphModule, example_inputs: Sequence[Any], device: str | None = None
) -> Normalised:
    """The ATen graph of `gm`; `gm` is not changed.

    Args:
        gm: a Dynamo graph (parameters are placeholders) or any other `GraphModule`
            whose parameters and buffers are its own attributes.
        example_inputs: one value per placeholder, real or fake tensors, or ints.
        device: the type of the device that the graph is to run on; None for its own.

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
    if computes_on_nested(gm, example_inputs):
        raise CaptureError("no pass follows the lengths that a nested tensor holds")
    mode: compat.FakeTensorMode | None = None
    values, op_cache = example_inputs, None
    if meshed := computes_on_dtensors(gm, example_inputs):
        mode = compat.current_fake_mode(example_inputs) or compat.new_fake_mode()
        values = whole_inputs(gm, example_inputs, mode)
    else:
        op_cache = op_cache_for(gm, example_inputs)
    if op_cache is not None:
        fakes = op_cache.inputs
        with contextlib.suppress(CaptureError):  # the trace below reports the error
            lowered = _trace(gm, fakes, op_cache.mode, op_cache, device=device)
            _restore_placeholders(lowered, gm, fakes, example_inputs)
            return Normalised(lowered, fakes, op_cache.mode)
    # Dynamo's own mode if there is one: its symbolic sizes belong to it, and torch
    # refuses an op on fake tensors of two modes.
    mode = mode or compat.current_fake_mode(example_inputs) or compat.new_fake_mode()
    fakes = tuple(compat.fake_inputs(values, mode))
    lowered = _trace(gm, fakes, mode, meshed=meshed, device=device)
    if meshed:
        note_held(lowered, example_inputs)
    _restore_placeholders(lowered, gm, fakes, example_inputs)
    return Normalised(lowered, fakes, mode)


def _trace(
    gm: fx.GraphModule,
    fakes: Sequence[Any],
    mode: compat.FakeTensorMode,
    op_cache: OpCache | None = None,
    outer: Sequence[Region] = (),
    *,
    meshed: bool = False,
    device: str | None = None,
) -> fx.GraphModule:
    """The ATen graph of `gm`, whose own parameters and buffers stay attributes.

    Args:
        outer: the autocast regions of the model's own that `gm` is called in.
        meshed: whether `gm` computes on DTensors, each of which the inputs give whole.
        device: the type of the device that `gm` is to run on; None for its own.
    """
    gm = fold_transforms(gm)
    named = {**dict(gm.named_parameters()), **dict(gm.named_buffers())}
    held = compat.fake_inputs([*named.values()], mode)

    def lower(
        body: fx.GraphModule, inputs: Sequence[Any], regions: Regions
    ) -> fx.GraphModule:
        outer = regions.inside
        lowered = _trace(body, inputs, mode, outer=outer, meshed=meshed, device=device)
        _restore_placeholders(lowered, body, tuple(inputs), inputs)
        return lowered

    regions = Regions(gm, outer)
    lowering = Lowering(gm, mode, op_cache, lower, regions, meshed=meshed)

    def run(*values: Any) -> Any:
        attributes = dict(zip(named, values, strict=False))
        with compat.with_parameters(gm, attributes):
            return lowering.run(*values[len(named) :])

    try:
        # A trace tells tensors apart by identity: tied weights would become one input.
        inputs = _told_apart([*held, *fakes])
        given = inputs if op_cache is None else []
        call = run if op_cache is None else lambda: run(*compat.recorded_inputs(inputs))
        traced = compat.trace_pre_dispatch(call, given, mode, parts_on(device))
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
        if node.target is _METADATA_HOLDS:
            traced.graph.erase_node(node)
            continue
        # Read before the frames of this package are taken out of the trace.
        if compat.traced_in_widening(node):
            node.meta[WIDENED] = True
        trace = _without_our_frames(node.meta.pop("stack_trace", None) or "")
        if trace:
            node.meta["stack_trace"] = trace
        if _refuses_backward(node, mode):
            _detach_operands(traced.graph, node)
    drop_dead(traced.graph)
    record_strides(traced)
    traced.recompile()
    return traced


def _told_apart(fakes: Sequence[Any]) -> list[Any]:
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


def _placeholders_to_attributes(
    traced: fx.GraphModule, named: dict[str, torch.Tensor]
) -> None:
    placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    # The inputs of the caller follow behind these placeholders.
    for (path, value), node in zip(named.items(), placeholders, strict=False):
        owner: torch.nn.Module = traced
        *parents, name = path.split(".")
        for parent in parents:
            if not hasattr(owner, parent):
                owner.add_module(parent, torch.nn.Module())
            owner = getattr(owner, parent)
        is_parameter = isinstance(value, torch.nn.Parameter)
        if isinstance(value, torch.nn.Parameter):
            owner.register_parameter(name, value)
        else:
            owner.register_buffer(name, value)
        with traced.graph.inserting_before(node):
            attribute = traced.graph.get_attr(path)
        attribute.meta = dict(node.meta)
        attribute.meta["autoamp_requires_grad"] = value.requires_grad
        attribute.meta["autoamp_is_parameter"] = is_parameter
        node.replace_all_uses_with(attribute)
        traced.graph.erase_node(node)


def _detach_operands(graph: fx.Graph, node: fx.Node) -> None:
    for operand in node.all_input_nodes:
        with graph.inserting_before(node):
            # A detached operand keeps the op out of the backward, as its call below
            # autograd does in the model.
            apart = graph.call_function(torch.ops.aten.detach.default, (operand,))
        apart.meta = dict(node.meta)
        with torch.no_grad():
            apart.meta["val"] = operand.meta["val"].detach()
        node.replace_input_with(operand, apart)


@functools.lru_cache(maxsize=1024)  # the nodes of one line share a trace
def _without_our_frames(trace: str) -> str:
    if _PACKAGE not in trace:
        return trace
    frames = re.split(r"(?m)^(?=  File )", trace)
    return "".join(f for f in frames if f'File "{_PACKAGE}' not in f)


def _refuses_backward(node: fx.Node, mode: compat.FakeTensorMode) -> bool:
    """Whether a node is a factory whose backward would raise, because torch lacks it.

    Torch's functions that take tensor options call their op below autograd
    (`torch.randint_like`, `linspace` of tensors).  A trace records the op itself, which
    would take part in the backward and raise there.
    """
    target = node.target
    if not isinstance(target, compat.OpOverload) or not node.all_input_nodes:
        return False
    if not any(a.name == "pin_memory" for a in compat.schema(target).arguments):
        return False
    # Of numbers alone there is no backward, and `arange(n * 0.1)` would fail here.
    if not any(isinstance(n.meta["val"], torch.Tensor) for n in node.all_input_nodes):
        return False

    def leaf(operand: fx.Node) -> Any:
        value = operand.meta["val"]
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.detach().requires_grad_()
        return value

    with mode, torch.enable_grad(), compat.outside_trace():
        args, kwargs = fx.map_arg((node.args, node.kwargs), leaf)
        result = target(*args, **kwargs)
    maker = getattr(result, "grad_fn", None)
    return maker is not None and maker.name().endswith("::NotImplemented")


def _restore_placeholders(
    lowered: fx.GraphModule,
    original: fx.GraphModule,
    fakes: Sequence[Any],
    given: Sequence[Any],
) -> None:
    """Gives placeholders their readable names, sources and gradient flags back.

    Placeholders for the model's own one-element tensors get the numbers as well.
    """
    sources = compat.placeholder_sources(original)
    before = [n for n in original.graph.nodes if n.op == "placeholder"]
    after = [n for n in lowered.graph.nodes if n.op == "placeholder"]
    every = zip(before, after, fakes, sources, given, strict=True)
    for old, new, fake, source, real in every:
        # A number of the caller's would be another one at the next call.
        if _OWN.match(source):
            new.meta[NUMBER] = compat.held_number(real)
        path = old.meta.get("autoamp_path") or compat.module_path(source)
        name = re.sub(r"\W+", "_", path).strip("_") if path else old.name
        name = "self_" if name == "self" else name  # the generated code uses `self`
        new.name = compat.free_name(lowered.graph, name or old.name)
        new.target = new.name
        new.meta["autoamp_path"] = path
        new.meta["autoamp_requires_grad"] = (
            isinstance(fake, torch.Tensor) and fake.requires_grad
        )
        new.meta["autoamp_is_parameter"] = isinstance(fake, torch.nn.Parameter)
    lowered.recompile()


_OUTSIDE = ("placeholder", "get_attr", "output")


def fold_transforms(gm: fx.GraphModule) -> fx.GraphModule:
    """`gm` with each outermost transform as one call; `gm` itself if it has none."""
    spans = _spans(gm.graph)
    if not spans:
        return gm
    folded = fx.GraphModule(gm, gm.graph)
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    inside = {node: span for span in spans for node in span}
    for node in gm.graph.nodes:
        span = inside.get(node)
        if span is None:
            values[node] = graph.node_copy(node, values.__getitem__)
        elif node is span[-1]:
            name = f"autoamp_transformed_{spans.index(span)}"
            setattr(folded, name, _call(gm, span, name, graph, values))
    folded.graph = graph
    return folded


def _spans(graph: fx.Graph) -> list[list[fx.Node]]:
    """The nodes of each outermost transform, from its entry to its exit."""
    spans: list[list[fx.Node]] = []
    depth = 0
    for node in graph.nodes:
        if node.target in compat.TRANSFORM_ENTRIES:
            if depth == 0:
                spans.append([])
            depth += 1
        # Inputs and attributes stay outside, and become operands of the call.
        if depth and node.op not in _OUTSIDE:
            spans[-1].append(node)
        if node.target in compat.TRANSFORM_EXITS:
            depth -= 1
    return spans


def _call(
    gm: fx.GraphModule,
    span: list[fx.Node],
    name: str,
    graph: fx.Graph,
    values: dict[fx.Node, fx.Node],
) -> fx.GraphModule:
    """The sub-graph of `span`; `graph` gets the call and `values` its results."""
    members = frozenset(span)
    read = (i for n in span for i in n.all_input_nodes if i not in members)
    operands = [*dict.fromkeys(read)]
    results = [n for n in span if not members.issuperset(n.users)]
    body = fx.Graph()
    inner = {node: body.placeholder(node.name) for node in operands}
    for node in span:
        inner[node] = body.node_copy(node, inner.__getitem__)
    body.output(tuple(inner[node] for node in results))

    target = graph.get_attr(name)
    call = graph.call_function(compat.WRAP, (target, *(values[o] for o in operands)))
    # That value is of the first call inside, not of the whole.
    call.meta = {k: v for k, v in span[0].meta.items() if k != "example_value"}
    for index, node in enumerate(results):
        values[node] = graph.call_function(operator.getitem, (call, index))
        values[node].meta = dict(node.meta)
    return fx.GraphModule(gm, body)
