"""Functions called in place of a captured graph: they count, copy weights and scale."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from autoamp.capture.captured import CapturedGraph
from autoamp.errors import AutoampError
from autoamp.node_by_node.gradient_sizes import GradientSizes
from autoamp.node_by_node.held import Broken, Held, first_held
from autoamp.node_by_node.observer import Observer
from autoamp.node_by_node.runner import Runner
from autoamp.options import Options
from autoamp.overflow.recorder import Recorder
from autoamp.pipeline.prepared import Prepared
from autoamp.rewrite.bindings import with_bindings
from autoamp.training.before_run import inputs_of_run
from autoamp.training.ledger.backwards import watch
from autoamp.training.ledger.graph_run import GraphRun
from autoamp.training.ledger.leaves import Origins
from autoamp.training.model_scaling import ModelScaling
from autoamp.weights.shards import SHARDED


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


def hold_first_run(
    prepared: Prepared, options: Options, tell: Callable[[str], None]
) -> None:
    """Has the first run of a graph hold its results to the graph's dtypes.

    Args:
        options: the options by which the user may keep an op in fp32.
        tell: called with a sentence about each result that has to be cast; the casts
            are part of the graph from then on.
    """
    plain = prepared.run

    def amended(broken: list[Broken]) -> None:
        nonlocal plain
        plain = with_bindings(prepared.gm)
        for each in broken:
            cure = (
                f"{options.advice('deny', [each.denied])} keeps {each.denied} in fp32"
            )
            problem = f"{each.sentence}; {cure}" if each.denied else each.sentence
            prepared.notes += (problem,)
            tell(problem)

    def settled() -> None:
        prepared.run = plain

    prepared.run = first_held(prepared.gm, amended, settled)


def unscaled(local: Local, captured: CapturedGraph) -> Callable[..., Any]:
    """The function called for a graph without gradients to scale."""
    prepared = captured.prepared
    slots, wide = prepared.weights, prepared.read_wide
    fresh = captured.copies.fresh if captured.copies is not None else None

    def call(*args: Any) -> Any:
        local.runs += 1
        local.rewritten += 1
        captured.runs += 1
        if SHARDED:
            SHARDED.note_wide([args[i] for i in wide])
        if fresh is None:
            return prepared.run(*args)
        return prepared.run(*args, *fresh([args[i] for i in slots]))

    return call


def noting_leaves(
    scaling: ModelScaling, call: Callable[..., Any]
) -> Callable[..., Any]:
    """`call`, whose first run tells `scaling` which tensors it was given to train."""
    first = True

    def call_noting(*args: Any) -> Any:
        nonlocal first
        if first:
            first = False
            scaling.ledger.note_leaves(args)
        return call(*args)

    return call_noting


def scaled(
    local: Local,
    scaling: ModelScaling,
    captured: CapturedGraph,
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
    fresh = captured.copies.fresh if captured.copies is not None else None
    origins = Origins(captured, inputs, edge.exits)

    def call_scaled(*args: Any) -> Any:
        local.runs += 1
        local.rewritten += 1
        captured.runs += 1
        if SHARDED:
            SHARDED.note_wide([args[i] for i in wide])
        origin = origins.of(args)
        tensors, leaves = origin.leaves(args)
        extra = inputs_of_run(scaling, edge.devices, tensors)
        graph_run = GraphRun(scaling, origin, leaves, extra)
        copies = () if fresh is None else fresh([args[i] for i in slots])
        if watches and (scaling.skip_watch.watching or scaling.wants_size):
            observers: list[Observer] = [Held()]
            if scaling.wants_size:
                observers.append(GradientSizes(graph_run.begin_sizes(extra)))
            if scaling.skip_watch.watching:
                observers.append(Recorder(scaling.skip_watch.trail()))
            results = Runner(captured.gm, observers).run(*args, *copies, *extra)
        else:
            results = prepared.run(*args, *copies, *extra)
        watch(graph_run, results, tensors)
        if edge.written:
            watch(graph_run, [args[i] for i in edge.written], tensors)
        return results

    return call_scaled


def counting_runs(local: Local, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, with its runs counted in `local`."""

    def call(*args: Any) -> Any:
        local.runs += 1
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
