"""One captured graph as one model runs it: counted, with weight copies, scaled.

Where no graph of ours can run, a region of `torch.autocast` stands in for it.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.dtypes import LOW_DTYPES, UNSCALED
from autoamp.errors import AutoampError
from autoamp.passes.check.promised_dtypes import Held
from autoamp.passes.decide.devices import main_device
from autoamp.passes.graph_record import Edge, Prepared, Rewritten
from autoamp.passes.node_by_node import GradientSizes, Observer, Runner
from autoamp.runtime.ranges import refreshed_in_range, with_ranges
from autoamp.training.attach import before_run
from autoamp.training.blame.recorder import Recorder
from autoamp.training.blame.remedy import SkipWatch
from autoamp.training.buffers import Written
from autoamp.training.leaves import Origins
from autoamp.training.ledger import GraphRun, watch
from autoamp.training.model_scaling import ModelLedger, ModelScaling
from autoamp.training.shards import SHARDED
from autoamp.training.weight_copies import WeightCopies


class Local(threading.local):
    """The runs and errors of this thread.

    Attributes:
        runs: how many graphs ran, including graphs the pass failed on, which are
            reported separately; a call that adds no run went past us.
        rewritten: how many graphs ran that the pass rewrote.
        error: the error we raised under `strict`, which Dynamo wraps in its own.
        regions: how many autocast regions the model was called in; `sys.maxsize` where
            no converted model is called.
    """

    runs = 0
    rewritten = 0
    regions = sys.maxsize
    error: AutoampError | None = None


@dataclass(eq=False)
class Graph:
    """A graph as one model runs it.

    Attributes:
        prepared: the graph, which other models may run as well.
        copies: the weight copies the graph is given, or None where it needs none.
        runs: how often the graph ran.
        sizes: how often the graph ran with which values of its symbolic sizes; empty
            where it has none.
    """

    prepared: Prepared
    copies: WeightCopies | None = None
    runs: int = 0
    sizes: Counter[tuple[int, ...]] = field(default_factory=Counter)

    def steps(self) -> tuple[Callable[..., Any] | None, Callable[..., Any]]:
        """What gives the weight copies, or None, and what runs the graph with them."""
        fresh: Callable[..., Any] | None
        fresh = None if self.copies is None else self.copies.fresh
        if not compat.profiled():
            return fresh, self.prepared.run
        if self.copies is not None:
            fresh = refreshed_in_range(self.copies.fresh, self.copies.low)
        return fresh, with_ranges(self.prepared)

    @property
    def rewritten(self) -> Rewritten | None:
        """The pass's result, or None where it failed."""
        return self.prepared.rewritten

    @property
    def gm(self) -> fx.GraphModule:
        """The graph that is run, with weight copies as extra inputs."""
        return self.prepared.gm

    @property
    def problem(self) -> str:
        """Why the graph runs unconverted; "" where it is converted."""
        return self.prepared.problem

    @property
    def edge(self) -> Edge:
        """The inputs that loss scaling adds to the graph."""
        return self.prepared.edge

    @property
    def in_own_autocast(self) -> bool:
        """Whether some of the graph runs under a `torch.autocast` of the script's."""
        if self.rewritten is None or self.prepared.own_autocast:
            return self.prepared.own_autocast
        every = [each.facts.nodes for each in self.rewritten.with_bodies()]
        return any(node.autocast for nodes in every for node in nodes.values())


def unscaled(
    local: Local,
    captured: Graph,
    ledger: ModelLedger | None = None,
    skip_watch: SkipWatch | None = None,
) -> Callable[..., Any]:
    """The function called for a graph without gradients to scale.

    Args:
        ledger: is told at the first run which tensors the graph was given to train.
        skip_watch: watches the runs after a skipped step, where the graph can be run
            node by node.
    """
    prepared = captured.prepared
    slots, wide = prepared.weights, prepared.read_wide

    def call(*args: Any) -> Any:
        nonlocal ledger
        local.runs += 1
        local.rewritten += 1
        captured.runs += 1
        if ledger is not None:
            ledger.note_leaves(args)
            ledger = None
        if SHARDED:
            SHARDED.note_wide([args[i] for i in wide])
        fresh, run = captured.steps()
        copies = () if fresh is None else fresh([args[i] for i in slots])
        if skip_watch is not None and skip_watch.watching and torch.is_grad_enabled():
            observers = [Held(), _recorder(skip_watch, captured)]
            return Runner(captured.gm, observers).run(*args, *copies)
        return run(*args, *copies)

    return call


def scaled(
    local: Local,
    scaling: ModelScaling,
    captured: Graph,
    inputs: Sequence[Any],
    *,
    watches: bool,
) -> Callable[..., Any]:
    """The function called for a graph whose gradients are scaled and checked.

    Args:
        inputs: the inputs of this model.
        watches: gradients inside the graph can be watched, where the loss scale asks
            for that.
    """
    prepared, edge = captured.prepared, captured.edge
    slots, wide = prepared.weights, prepared.read_wide
    origins = Origins(captured, inputs, edge.exits)

    def call_scaled(*args: Any) -> Any:
        local.runs += 1
        local.rewritten += 1
        captured.runs += 1
        if SHARDED:
            SHARDED.note_wide([args[i] for i in wide])
        origin = origins.of(args)
        tensors, leaves = origin.leaves(args)
        before_run(scaling, tensors)
        # Each run has a scale and flags of its own: two forwards may be alive at once,
        # and their backwards come in any order.
        before = [args[i].grad_fn for i in origin.computed]
        graph_run = GraphRun(scaling, origin, leaves, edge.devices)
        extra = graph_run.edge
        fresh, run = captured.steps()
        copies = () if fresh is None else fresh([args[i] for i in slots])
        if watches and (scaling.skip_watch.watching or scaling.wants_size):
            observers: list[Observer] = [Held()]
            if scaling.wants_size:
                graph_run.magnitudes = []
                observers.append(GradientSizes(graph_run.magnitudes))
            if scaling.skip_watch.watching:
                observers.append(_recorder(scaling.skip_watch, captured))
            results = Runner(captured.gm, observers).run(*args, *copies, *extra)
        else:
            results = run(*args, *copies, *extra)
        # A backward may begin at an input that the graph has written to, and reach none
        # of its results.
        watch(graph_run, [*results, *(args[i] for i in edge.written)], tensors, before)
        return results

    return call_scaled


def undone(
    call: Callable[..., Any], ledger: ModelLedger, written: Written
) -> Callable[..., Any]:
    """`call`, whose writes to buffers a skipped step undoes."""

    # A call that records no gradients leads to no step.
    def call_undone(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return call(*args)
        buffers = written.buffers(args)
        ledger.keep(buffers)
        try:
            return call(*args)
        finally:
            # A graph that raises may have written to some of its buffers.
            ledger.buffers.note(buffers)

    return call_undone


def _recorder(skip_watch: SkipWatch, captured: Graph) -> Recorder:
    trail = skip_watch.trail(captured.rewritten)
    here = compat.around_now()
    return Recorder(trail, exact=skip_watch.asks_fp32, here=here)


def counting_runs(local: Local, captured: Graph) -> Callable[..., Any]:
    """What runs a graph that the pass failed on, with its runs counted."""
    run = captured.prepared.run

    def call(*args: Any) -> Any:
        local.runs += 1
        captured.runs += 1
        return run(*args)

    return call


def counting_sizes(
    call: Callable[..., Any], symbolic: Sequence[int], sizes: Counter[tuple[int, ...]]
) -> Callable[..., Any]:
    """`call`, which also counts the sizes it is called with: flops depend on them."""

    def counting(*args: Any) -> Any:
        sizes[tuple([args[i] for i in symbolic])] += 1
        return call(*args)

    return counting


def autocast_for(
    model: nn.Module, args: tuple[Any, ...], low: torch.dtype, *, cached: bool = False
) -> torch.autocast:
    """A region of autocast for a call `model(*args)`; `fp32_results` follows it.

    Autocast is used where our graphs cannot run: under `vmap` and `torch.func`, inside
    a module the user compiles as one graph, or where Dynamo captures nothing.

    Args:
        cached: whether all uses of a weight share a cast, as is autocast's default.
            Without, each use has its own cast, so a weight's gradient sums in fp32.
    """
    # The function of `nn.Module` is called, since a class may have `parameters` of its
    # own.
    weight = next(nn.Module.parameters(model), None)
    device = "meta" if weight is None else weight.device.type
    if device == "meta":  # its weights are arguments
        tensors = (v for v in pytree.tree_leaves(args) if isinstance(v, torch.Tensor))
        device = next((value.device.type for value in tensors), "cpu")
    # One shared cast would sum a weight's gradient in the low dtype: the sum of 1,000
    # uses, each with gradient 1, is 256 in bf16.
    return torch.autocast(device_type=device, dtype=low, cache_enabled=cached)


def fp32_results(result: Any, low: torch.dtype) -> Any:
    """The result of a call under autocast, widened as it is without autocast.

    A caller written for fp32 results may fail on half ones.
    """

    def widen(value: Any) -> Any:
        # A caller that was traced with fp32 fails on a low result: "mat1 and mat2 must
        # have the same dtype, but got BFloat16 and Float".
        if isinstance(value, torch.Tensor) and value.dtype == low:
            return value.to(torch.float32)
        return value

    return pytree.tree_map(widen, result)


def graph_under_autocast(
    gm: fx.GraphModule, run: Callable[..., Any], low: torch.dtype
) -> Callable[..., Any]:
    """`run`, which runs graph `gm`, under autocast; fp32 results stay fp32.

    Args:
        low: the compute dtype where nothing is differentiated.
    """
    (output,) = gm.graph.find_nodes(op="output")
    # Dynamo's fake tensors have the dtypes from before any rewrite.
    fakes = [
        node.meta.get("example_value") if isinstance(node, fx.Node) else None
        for node in output.args[0]
    ]
    wide = [isinstance(t, torch.Tensor) and t.dtype == torch.float32 for t in fakes]

    def call(*args: Any) -> Any:
        with autocast_region(gm, low):
            results = run(*args)
        return tuple(
            r.to(torch.float32) if keep and r.dtype != torch.float32 else r
            for r, keep in zip(results, wide, strict=True)
        )

    return call


def autocast_region(gm: fx.GraphModule, low: torch.dtype) -> torch.autocast:
    """A region of autocast for graph `gm`, with `low` where it is not differentiated.

    Each use of a weight has its own cast, so that the weight's gradient sums in fp32.
    """
    device, dtype = main_device(gm).type, unscaled_dtype(low)
    return torch.autocast(device_type=device, dtype=dtype, cache_enabled=False)


def unscaled_dtype(low: torch.dtype) -> torch.dtype:
    """The compute dtype for a region where nothing scales the loss."""
    return UNSCALED if torch.is_grad_enabled() else low


def all_widened(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, with half tensors as fp32.

    A list or dict without half tensors stays the caller's own object, because a model
    may append to a list it is given.
    """

    def widen(argument: Any) -> Any:
        leaves = pytree.tree_leaves(argument)
        if all(_widened(leaf) is leaf for leaf in leaves):
            return argument
        return pytree.tree_map(_widened, argument)

    return tuple(map(widen, args)), {k: widen(v) for k, v in kwargs.items()}


def _widened(value: Any) -> Any:
    """`value`; as fp32 where it is a half tensor, which an ambient autocast made.

    The ambient autocast region is off inside the model.
    """
    if isinstance(value, torch.Tensor) and value.dtype in LOW_DTYPES.values():
        return value.to(torch.float32)
    return value
