"""Runs the list of passes on a captured graph, checks each, and retreats on failure.

Three ways lead in: `rewrite_graph` and `rewrite_normalised` run the list up to the
rewritten graph, `prepare` runs all of it and has the back end compile the result.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.errors import AutoampError, CaptureError
from autoamp.messages import printable_line
from autoamp.passes.check.checks import Checks
from autoamp.passes.functions import checkpoint_as_python_does
from autoamp.passes.graph_record import Prepared, Rewritten, Setting
from autoamp.passes.list import PASSES, LeaveOut, Pass, Phase
from autoamp.passes.options import PassOptions
from autoamp.passes.see.dtensors_as_whole import ON_MESH
from autoamp.passes.see.low_outside import mark_low_outside
from autoamp.passes.see.normalise import UNTRACED, Normalised, normalise
from autoamp.passes.see.regions import BODY_LEFT, BODY_RECORDS, LOW_INPUTS, LOWERED_BODY
from autoamp.passes.write.body_inputs import casts_of_inputs
from autoamp.passes.write.for_compilers import compiled
from autoamp.passes.write.hoist_weight_casts import read_wide
from autoamp.passes.write.scale_edge import arguments_of

_ANYWHERE = Setting()

RETRIES = 4
"""How often a pass is run again at most."""

REACHES = (0, 2, 4, 8)
"""Sizes of a region, in steps from the named nodes; the least that adds nodes is taken.

The largest sizes are there because a low kernel may lay out its result differently, and
the failure shows only some views further down, at the first view that cannot be made.
"""

REPORT = "kept in fp32 after a failed check: please report"


def rewrite_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: PassOptions,
    low: torch.dtype,
    **setting: Any,
) -> Rewritten:
    """Runs the passes that see, decide and write on `gm`, which is not changed.

    Args:
        **setting: the fields of `Setting`.

    Raises:
        AutoampError: a pass failed; the message says where.
    """
    seconds: dict[str, float] = {}
    with _timed(seconds, "normalise"):
        normalised = normalise(gm, example_inputs, Setting(**setting).device_type)
    return rewrite_normalised(normalised, options, low, Setting(**setting), seconds)


def rewrite_normalised(
    normalised: Normalised,
    options: PassOptions,
    low: torch.dtype,
    setting: Setting,
    seconds: dict[str, float],
) -> Rewritten:
    """As `rewrite_graph`, of an ATen graph; adds the times to `seconds`."""
    begun = _first_record(normalised, options, low, setting, seconds)
    return _as_reported(_run(begun, Phase.WRITE))


def prepare(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    options: PassOptions,
    low: torch.dtype,
    *,
    scaled: bool,
    setting: Setting = _ANYWHERE,
) -> Prepared:
    """Runs all passes on `gm`, and has the back end make a function of the result.

    Args:
        inputs: the inputs Dynamo captured `gm` with.
        options: the options of the conversion; `options.backend` compiles the result.
        scaled: whether the gradients of the graph are scaled at its edge.
        setting: the device `gm` is to run on, by default the one it was captured on,
            and the prices.

    Raises:
        AutoampError: a pass failed; the message says where.
    """
    eager = options.backend == "eager"
    setting = replace(
        setting,
        free_weights=True,
        own_kernels=eager and options.fuse is not False,
        scaled=scaled,
    )
    seconds: dict[str, float] = {}
    with _timed(seconds, "normalise"):
        normalised = normalise(gm, inputs, setting.device_type)
    begun = _first_record(normalised, options, low, setting, seconds)
    work = _run(begun, Phase.PREPARE)
    assert work.rewritten is not None
    code = work.code or work.gm
    if not eager:
        compat.as_dynamo_gave(code, gm)
    if setting.makes_code:
        compat.make_code(code)
    return Prepared(
        work.rewritten,
        work.gm,
        code.forward if eager else compiled(work, code, arguments_of(work, inputs)),
        notes=(*work.rewritten.retreats(), *work.notes),
        weights=work.weights,
        read_wide=read_wide(work.gm, len(inputs)),
        layouts=work.layouts,
        edge=work.edge,
        sizes=tuple(i for i, v in enumerate(inputs) if isinstance(v, torch.SymInt)),
    )


def as_it_is(
    gm: fx.GraphModule, inputs: Sequence[Any], options: PassOptions, problem: str
) -> Prepared:
    """The graph made ready to run in fp32, because of `problem`."""
    if options.backend == "eager":
        checkpoint_as_python_does(gm)
    exact = options.exact_casts
    run = compat.compile_with(options.backend, gm, inputs, exact_casts=exact)
    return Prepared(None, gm, run, problem)


# -- the run of the list -----------------------------------------------------------


def _run(work: Rewritten, last: Phase, passes: Sequence[Pass] = PASSES) -> Rewritten:
    """Runs the passes up to phase `last`, and retreats where a pass or its check fails.

    Where the graph cannot go without the pass, the nodes that the error names are kept
    in fp32, and the list goes on at the first pass that decides.
    """
    wanted = [each for each in passes if each.phase <= last]
    started: dict[int, Rewritten] = {}
    left_out: set[str] = set()
    checks, at, failures = Checks(), 0, 0
    deciding = (i for i, each in enumerate(wanted) if each.phase is Phase.DECIDE)
    first = next(deciding, len(wanted))
    while at < len(wanted):
        each = wanted[at]
        # Reports show the graph with its casts, and none of the functions that come in
        # later.
        if each.phase is Phase.PREPARE and work.rewritten is None:
            work = replace(work, rewritten=_as_reported(work))
        # A retreat goes back to one of these records, which no pass changes.
        started[at] = work
        try:
            if each.name not in left_out:
                work = _run_one(each, work, checks)
            at += 1
        except LeaveOut as told:
            left_out.add(told.name)
            at = next(i for i, p in enumerate(wanted) if p.name == told.name)
            work = started[at]
        except Exception as error:
            # A pass with `without` raises under `strict` alone. Before the first
            # decision there is none to change.
            if each.without or at < first:
                raise
            again = started[first]
            fresh = wider(error, again.before.graph, again.given_up)
            failures += 1
            if work.options.strict or failures > RETRIES or not fresh:
                raise
            kept = dict.fromkeys(fresh, kept_for(error))
            work = replace(again, given_up={**again.given_up, **kept})
            at = first
    return work


def _run_one(each: Pass, work: Rewritten, checks: Checks) -> Rewritten:
    """Runs one pass and its check; after a failure again, without the nodes named."""
    left: tuple[str, ...] = ()
    if each.needs_memory:
        left = tuple(n.name for n in work.gm.graph.nodes if ON_MESH in n.meta)
    problem: Exception | None = None
    for _ in range(RETRIES + 1):
        try:
            with _timed(work.seconds, each.name):
                now = each.run(replace(work, left=frozenset(left)))
            if each.check is not None:
                with _timed(work.seconds, f"check of {each.name}"):
                    checks.always(work, now)
                    each.check(checks, work, now)
            break
        except LeaveOut:
            raise
        except Exception as error:
            if not each.without or work.options.strict:
                raise
            problem = error
            fresh = wider(error, work.gm.graph, left)
            left, now = (*left, *fresh), work
            # No node is left to spare: the graph goes without the pass.
            if not fresh:
                break
    if problem is None:
        return replace(now, left=frozenset())
    told = f"{each.without}, or some of it, after a failed check: please report: "
    told += f"{type(problem).__name__}: {problem}"
    notes = (*work.notes, printable_line(told))
    return replace(now, left=frozenset(), notes=notes)


def _as_reported(work: Rewritten) -> Rewritten:
    """The record that reports show: with the reason of each node that stays fp32."""
    untraced = {
        name: kept_for(CaptureError(f"tracing to ATen failed at {name}: {why}"))
        for name, why in work.before.meta.get(UNTRACED, {}).items()
    }
    given_up = {**work.left_as_they_are, **untraced, **work.given_up}
    return replace(work, given_up=given_up)


def _first_record(
    normalised: Normalised,
    options: PassOptions,
    low: torch.dtype,
    setting: Setting,
    seconds: dict[str, float],
) -> Rewritten:
    """The first record of a graph, made after its sub-graphs have been rewritten."""
    gm = normalised.gm
    inside = [m for m in gm.children() if isinstance(m, fx.GraphModule)]
    has_bodies = any(LOWERED_BODY in each.meta for each in inside)
    # Modules kept fp32, and rules of the user's, leave more in fp32 than autocast.
    own = (options.kept, options.rules, options.deny, options.infer, options.clear)
    as_listed = not any((*own, options.unlist))
    # The bodies of a body are looked at with the graph round it.
    if has_bodies and as_listed and LOWERED_BODY not in gm.meta:
        mark_low_outside(gm, low, setting.device_type)
    bodies: list[Rewritten] = []
    left: dict[str, str] = {}
    for name, body in list(gm.named_children()):
        if not (isinstance(body, fx.GraphModule) and body.meta.get(LOWERED_BODY)):
            continue
        # Outputs of a sub-graph stay fp32, and so do inputs until the graph is placed.
        inner = Normalised(body, (), normalised.fake_mode)
        try:
            # The facts are collected from the caller's grad mode on, and the body may
            # be called under another one.
            with torch.set_grad_enabled(body.meta[BODY_RECORDS]):
                found = rewrite_normalised(inner, options, low, setting, seconds={})
        except Exception as error:
            if options.strict:
                raise
            # The sub-graph stays fp32 as a whole, and so do the calls that take it as
            # an operand; the graph around it is still rewritten.
            body.meta[BODY_LEFT] = f"{type(error).__name__}: {error}"
            for operand in gm.graph.find_nodes(op="get_attr", target=name):
                left |= {user.name: kept_for(error) for user in operand.users}
            continue
        found.gm.meta[LOW_INPUTS] = tuple(casts_of_inputs(found.gm))
        setattr(gm, name, found.gm)
        bodies.append(found)
    return Rewritten(
        options,
        low,
        setting,
        normalised.gm,
        normalised.fake_mode,
        normalised.inputs,
        tuple(bodies),
        left_as_they_are=left,
        seconds=seconds,
    )


# -- the retreat: which nodes a pass leaves alone after a failed check -----------------

# One bad node must not take the whole graph back to fp32.  The nodes that an error
# names are left alone and the pass runs again; if an error comes back, a wider region
# is left alone, at most `RETRIES` times in all.


def wider(error: Exception, graph: fx.Graph, known: Collection[str]) -> list[str]:
    """The nodes of the smallest region round an error that adds any to `known`.

    Returns:
        Names of calls of `graph`, in graph order; empty if no region adds any.
    """
    named = error.nodes if isinstance(error, AutoampError) else ()
    start = {n for n in graph.nodes if n.name in named}
    calls = {n for n in start if n.op == "call_function"}
    # Of an input, whose precision nothing decides, the readers are put back.
    calls = calls or {m for n in start for m in n.users if m.op == "call_function"}
    for reach in REACHES:
        found = set(calls)
        for _ in range(reach):
            beside = {m for n in found for m in (*n.all_input_nodes, *n.users)}
            found |= {n for n in beside if n.op == "call_function"}
        fresh = [n.name for n in graph.nodes if n in found and n.name not in known]
        if fresh:
            return fresh
    return []


def kept_for(error: Exception) -> str:
    """The reason, for the report, why nodes stay fp32 after `error`."""
    return printable_line(f"{REPORT}: {error}")


@contextlib.contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
