"""The functions called in place of a captured graph: they count, copy and scale."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from autoamp.capture.captured import CapturedGraph
from autoamp.errors import AutoampError
from autoamp.scaling.backwards import watch
from autoamp.scaling.domain import ModelScaling
from autoamp.scaling.graph_run import GraphRun
from autoamp.scaling.leaves import Origins
from autoamp.scaling.watch import Watched


class Local(threading.local):
    """What happened in this thread.

    Attributes:
        runs: graphs run, those the pass failed on too, which are reported by
            themselves: a call that adds none went past us.
        rewritten: those of them that the pass rewrote.
        error: what we raised under `strict`; Dynamo wraps it in an error of its own.
        regions: in how many autocast regions the model was called, where that counts.
    """

    runs = 0
    rewritten = 0
    regions = sys.maxsize
    error: AutoampError | None = None


def unscaled(local: Local, captured: CapturedGraph) -> Callable[..., Any]:
    """A call of a graph that no gradient leaves, so that there is nothing to scale."""
    run = captured.prepared.run
    slots = captured.prepared.weights
    fresh = captured.copies.fresh if captured.copies is not None else None

    def call(*args: Any) -> Any:
        local.runs += 1
        local.rewritten += 1
        captured.runs += 1
        if fresh is None:
            return run(*args)
        return run(*args, *fresh([args[i] for i in slots]))

    return call


def scaled(
    local: Local,
    scaling: ModelScaling,
    captured: CapturedGraph,
    inputs: Sequence[Any],
    *,
    watches: bool,
) -> Callable[..., Any]:
    """A graph whose gradients are scaled and checked for overflows.

    Args:
        inputs: of this model.
        watches: gradients inside can be seen, where the loss scale asks for them.
    """
    run = captured.prepared.run
    slots, edge = captured.prepared.weights, captured.edge
    fresh = captured.copies.fresh if captured.copies is not None else None
    origins = Origins(captured, inputs, edge.exits)

    def call_scaled(*args: Any) -> Any:
        local.runs += 1
        local.rewritten += 1
        captured.runs += 1
        origin = origins.of(args)
        tensors, leaves = origin.leaves(args)
        extra = scaling.inputs(edge.devices, tensors)
        graph_run = GraphRun(scaling, origin, leaves, extra)
        copies = () if fresh is None else fresh([args[i] for i in slots])
        if watches and scaling.looks:
            watched = Watched(captured.gm, graph_run.look(extra))
            try:
                results = watched.run(*args, *copies, *extra)
            finally:
                watched.env.clear()  # an error may hold it, and it the inputs
        else:
            results = run(*args, *copies, *extra)
        watch(graph_run, results, tensors)
        if edge.written:
            watch(graph_run, [args[i] for i in edge.written], tensors)
        return results

    return call_scaled


def counted(local: Local, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, of which it is known that it ran."""

    def call(*args: Any) -> Any:
        local.runs += 1
        return run(*args)

    return call


def counting_sizes(
    call: Callable[..., Any], symbolic: Sequence[int], sizes: Counter[tuple[int, ...]]
) -> Callable[..., Any]:
    """`call` that notes the sizes it is called with: flops depend on them."""

    def counting(*args: Any) -> Any:
        sizes[tuple([args[i] for i in symbolic])] += 1
        return call(*args)

    return counting
