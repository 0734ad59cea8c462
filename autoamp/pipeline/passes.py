"""The list of passes, in the order in which they run.

A captured graph goes in; the graph that is run comes out.  The passes that *see* find
out what the graph computes, the passes that *decide* choose a precision for every
op, the passes that *write* put casts into the graph, and the passes that *prepare* make
the graph ready for its caller and its back end.  After each pass that edits the graph
its check runs (`checks.py`), by code that shares nothing with the pass.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.classify import classify
from autoamp.analyse.facts import collect_facts
from autoamp.check import changes
from autoamp.kernels.attention import attention_at, leave_out
from autoamp.kernels.functions.attention import attention, traced_attention
from autoamp.kernels.fuse import fuse
from autoamp.kernels.norms import norm_at, softmax_at
from autoamp.kernels.rotary import with_rotary
from autoamp.kernels.table import ATTENTION_BACKWARD, CHANNELS_LAST, ROTARY, TOGETHER
from autoamp.pass_options import PassOptions
from autoamp.pipeline.checks import Checks, differs_only
from autoamp.pipeline.retreat import LeaveOut
from autoamp.pipeline.work import Work
from autoamp.place.assign import assign
from autoamp.place.cost import PriceModel, as_authors_ask, price_graph
from autoamp.place.devices import main_device
from autoamp.place.layouts import FORMATS, choose_layouts, convolved
from autoamp.rewrite.bindings import with_bindings
from autoamp.rewrite.casts import insert_casts
from autoamp.rewrite.copied import clean_up, with_targets
from autoamp.rewrite.edge.scale_edge import scale_edge
from autoamp.rewrite.for_compilers import for_compilers
from autoamp.rewrite.hoist_weight_casts import folded_in, hoist_weight_casts
from autoamp.rewrite.layouts import lay_out
from autoamp.rewrite.meshes import (
    with_calls_once,
    with_low_gathers,
    with_mesh_calls,
)
from autoamp.rewrite.together import with_uses_together
from autoamp.rewrite.unbind import with_unbind


class Phase(enum.IntEnum):
    """The four parts of the list."""

    SEE = 1
    DECIDE = 2
    WRITE = 3
    PREPARE = 4


class Retreat(enum.Enum):
    """What happens where a pass or its check fails.

    Attributes:
        RAISE: the graph stays fp32.
        REPLAN: the nodes that the error names stay fp32; the passes that decide and
            write run again.
        SPARE: the pass runs again and leaves the nodes that the error names as they
            are; in the end the pass is left out.
    """

    RAISE = "raise"
    REPLAN = "replan"
    SPARE = "spare"


@dataclass(frozen=True)
class Pass:
    """One entry of the list.

    Attributes:
        name: the name, as in times and notes.
        phase: the part of the list.
        run: makes a new `Work` of a `Work`, which stays as it is.
        guarantees: what holds after the pass, in one line.
        check: raises where the pass broke its word; given the checks of this run, and
            the work before and after.  A pass that edits no graph has none.
        retreat: what happens where the pass or its check fails.
        without: the report's words about a graph that goes without the pass.
        needs_memory: whether the pass puts functions in that read the memory of their
            operands, and so leaves all calls on DTensors.
    """

    name: str
    phase: Phase
    run: Callable[[Work], Work]
    guarantees: str
    check: Callable[[Checks, Work, Work], None] | None = None
    retreat: Retreat = Retreat.RAISE
    without: str = ""
    needs_memory: bool = False


# -- the passes ----------------------------------------------------------------------


def _kernels(work: Work) -> Work:
    plan = work.plan
    left_out = leave_out(work.device, plan.options, own_ops=plan.setting.own_ops)
    found = fuse(
        work.normalised,
        plan.options,
        plan.low,
        work.device_type,
        left_out,
        work.left,
    )
    if found is None:
        return work
    return replace(work, gm=found.gm, fused=True)


def _calls_once(work: Work) -> Work:
    return replace(work, gm=with_calls_once(work.gm, work.left))


def _facts(work: Work) -> Work:
    facts = collect_facts(work.gm, work.plan.low, work.device_type)
    facts = replace(facts, own_kernels=work.plan.setting.own_kernels)
    return replace(work, facts=facts, before=work.gm)


def _classify(work: Work) -> Work:
    options, low = work.options, work.plan.low
    assert work.facts is not None
    rules = options.resolve_rules(low)
    classified = classify(
        work.gm,
        work.facts,
        rules,
        low,
        (*options.kept, *rules.keep),
        kept=options.kept,
        given_up=work.given_up,
        ceiling=options.placement != "tensorflow" and not _is_below(options),
        to_the_letter=options.is_tensorflows,
    )
    return replace(work, classified=classified)


def _is_below(options: PassOptions) -> bool:
    """Whether a budget for error lets ops be low that type promotion leaves fp32."""
    return options.chosen is not None and options.chosen.below_ceiling


def _price(work: Work) -> Work:
    setting = work.plan.setting
    assert work.classified is not None
    price: PriceModel = setting.price or partial(price_graph, device=work.device)
    prices = price(
        work.gm,
        work.classified,
        objective=work.options.objective,
        do_no_harm=work.options.do_no_harm,
        free_weights=setting.free_weights,
    )
    return replace(work, prices=as_authors_ask(prices, work.classified))


def _place(work: Work) -> Work:
    assert work.classified is not None
    assert work.prices is not None
    options = work.options
    found = assign(work.classified, work.prices, options.placement, options.chosen)
    if work.fused and not found.low:
        raise LeaveOut("kernels", "nothing runs low, so that all numbers stay")
    return replace(work, assignment=found)


def _casts(work: Work) -> Work:
    assert work.classified is not None
    assert work.assignment is not None
    assert work.fake_mode is not None
    after, casts = insert_casts(
        work.gm, work.classified, work.assignment, work.plan.low, work.fake_mode
    )
    return replace(work, gm=after, casts=tuple(casts))


def _clean_up(work: Work) -> Work:
    return replace(work, gm=clean_up(work.gm))


def _hoist(work: Work) -> Work:
    assert work.rewritten is not None
    hoisted = hoist_weight_casts(work.rewritten, work.left)
    return replace(work, gm=hoisted.gm, weights=tuple(hoisted.weights))


def _gathers(work: Work) -> Work:
    if not _is_eager(work.options):
        return work
    return replace(work, gm=with_low_gathers(work.gm, work.plan.low, work.left))


def _edge(work: Work) -> Work:
    if not work.plan.scaled:
        return work
    assert work.rewritten is not None
    gm, edge = scale_edge(work.gm, work.rewritten)
    return replace(work, gm=gm, edge=edge)


def _attention(work: Work) -> Work:
    if not _may_replace(work, ATTENTION_BACKWARD):
        return work
    own = attention if _is_eager(work.options) else traced_attention
    if not takes_our_ops(work.options):
        return work
    choose = partial(attention_at, own=own)
    return replace(work, gm=_with_targets(work, choose))


def _softmax(work: Work) -> Work:
    if not _may_replace(work):
        return work
    return replace(work, gm=_with_targets(work, softmax_at))


def _norms(work: Work) -> Work:
    if not _may_replace(work) or not _is_eager(work.options):
        return work
    return replace(work, gm=_with_targets(work, norm_at))


def _rotary(work: Work) -> Work:
    if not _may_replace(work, ROTARY) or not _is_eager(work.options):
        return work
    return replace(work, gm=with_rotary(work.gm, work.left))


def _unbind(work: Work) -> Work:
    if not _may_replace(work) or not _is_eager(work.options):
        return work
    assert work.facts is not None
    return replace(work, gm=with_unbind(work.gm, work.facts, work.left))


def _layouts(work: Work) -> Work:
    if not _may_replace(work, CHANNELS_LAST):
        return work
    copies = copies_of(work)
    if _is_eager(work.options):
        assert work.facts is not None
        weights = [*copies, *folded_in(work.gm)]
        layouts = choose_layouts(
            work.gm.graph, weights, work.device, work.facts.nodes, work.left
        )
        if layouts is None:
            return work
        gm, laid = lay_out(work.gm, layouts), layouts.weights
    else:
        # Inductor lays the operands of convolutions on CPUs with the channels last.
        # The strides of a depthwise weight fit both layouts: inductor leaves such an
        # input, and torch then computes that convolution with the channels first.
        on_cpu = main_device(work.gm).type == "cpu" and compat.inductor_permutes()
        if not (on_cpu and compat.is_inductor(work.options.backend)):
            return work
        gm, laid = work.gm, convolved(work.gm.graph, copies)
        if not laid:
            return work
    formats = tuple(
        FORMATS[c.meta["val"].dim()] if c in laid else torch.preserve_format
        for c in copies
    )
    return replace(work, gm=gm, layouts=formats)


def _together(work: Work) -> Work:
    if not _may_replace(work, TOGETHER) or not _is_eager(work.options):
        return work
    if not work.device.starts_kernels:
        return work
    return replace(work, gm=with_uses_together(work.gm, work.left))


def _meshes(work: Work) -> Work:
    return replace(work, gm=with_mesh_calls(work.gm))


def _bindings(work: Work) -> Work:
    if not _is_eager(work.options) or not work.plan.setting.makes_code:
        return work
    return replace(work, code=with_bindings(work.gm, work.left))


def _compilers(work: Work) -> Work:
    if _is_eager(work.options):
        return work
    inductor = compat.is_inductor(work.options.backend)
    return replace(work, code=for_compilers(work.gm, work.left, inductor=inductor))


PASSES: tuple[Pass, ...] = (
    Pass(
        *("kernels", Phase.SEE, _kernels),
        "each chain that torch has a kernel for is one call of the kernel",
        Checks.replaced,
        Retreat.SPARE,
        "chains of calls stay as they are written",
        needs_memory=True,
    ),
    Pass(
        *("calls once", Phase.SEE, _calls_once),
        "a value is handed to the mesh once, however many readers it has there",
        differs_only(changes.MADE_ONCE),
        Retreat.SPARE,
        "values are handed to the mesh for each reader",
    ),
    Pass(
        *("facts", Phase.SEE, _facts),
        "dtypes, aliases, writes, regions and modules of every node are known",
    ),
    Pass(
        *("classify", Phase.DECIDE, _classify),
        "every op has a category with a reason, or is pinned to fp32 with a reason",
        retreat=Retreat.REPLAN,
    ),
    Pass(
        *("price", Phase.DECIDE, _price),
        "every op has a price in each precision, and every cast has one",
        retreat=Retreat.REPLAN,
    ),
    Pass(
        *("place", Phase.DECIDE, _place),
        "no other placement that the rules allow costs less",
        retreat=Retreat.REPLAN,
    ),
    Pass(
        *("casts", Phase.WRITE, _casts),
        "every op reads the precision decided, and casts cost what was planned",
        Checks.recounted,
        Retreat.REPLAN,
    ),
    Pass(
        *("clean up", Phase.WRITE, _clean_up),
        "the graph is the same program but for casts, and no node does nothing",
        Checks.same_program,
        Retreat.REPLAN,
    ),
    Pass(
        *("hoist", Phase.PREPARE, _hoist),
        "low copies of weights are inputs, and their gradients are summed in fp32",
        Checks.hoisted,
        Retreat.SPARE,
        "its weights are cast at every call",
    ),
    Pass(
        *("gathers", Phase.PREPARE, _gathers),
        "DTensors that are read low are gathered low; their gradients sum up in fp32",
        differs_only(changes.GATHERS),
        Retreat.SPARE,
        "DTensors are gathered in fp32 and cast then",
    ),
    Pass(
        *("edge", Phase.PREPARE, _edge),
        "each gradient is scaled once on its way in, and unscaled once on its way out",
        Checks.edge,
        Retreat.REPLAN,
    ),
    Pass(
        *("attention", Phase.PREPARE, _attention),
        "attention in 16 bits on CPUs has a backward that computes in fp32",
        Checks.replaced,
        Retreat.SPARE,
        "its attention has torch's backward",
        needs_memory=True,
    ),
    Pass(
        *("softmax", Phase.PREPARE, _softmax),
        "a softmax that stands for a chain has gradients as true as the chain's",
        Checks.replaced,
        Retreat.SPARE,
        "its softmax has torch's backward",
        needs_memory=True,
    ),
    Pass(
        *("norms", Phase.PREPARE, _norms),
        "low norms on CPUs compute in fp32, and sum their gradients in fp32",
        Checks.replaced,
        Retreat.SPARE,
        "its norms are torch's",
        needs_memory=True,
    ),
    Pass(
        *("rotary", Phase.PREPARE, _rotary),
        "a rotary embedding is one call",
        Checks.replaced,
        Retreat.SPARE,
        "its rotary embeddings stay as they are written",
        needs_memory=True,
    ),
    Pass(
        *("unbind", Phase.PREPARE, _unbind),
        "selects that together show a whole tensor have one gradient",
        Checks.replaced,
        Retreat.SPARE,
        "each of its selects has a gradient as large as the whole tensor",
        needs_memory=True,
    ),
    Pass(
        *("layouts", Phase.PREPARE, _layouts),
        "convolutions read channels last where that is faster; results lie as before",
        Checks.laid_out,
        Retreat.SPARE,
        "its convolutions read the layout they are given",
        needs_memory=True,
    ),
    Pass(
        *("together", Phase.PREPARE, _together),
        "on GPUs the gradients of several weights are cast by one kernel",
        differs_only(changes.TOGETHER),
        Retreat.SPARE,
        "the gradient of each of its weights is cast by itself",
        needs_memory=True,
    ),
    Pass(
        *("meshes", Phase.PREPARE, _meshes),
        "a graph that computes on DTensors makes the model's own calls on the mesh",
        Checks.on_meshes,
        Retreat.REPLAN,
    ),
    Pass(
        *("bindings", Phase.PREPARE, _bindings),
        "the code that runs calls torch's functions, which call the graph's ops",
        Checks.bound,
        Retreat.SPARE,
        "its code calls each op by the dispatcher",
    ),
    Pass(
        *("for compilers", Phase.PREPARE, _compilers),
        "a compiler gets a graph that AOT autograd can trace and differentiate",
        Checks.for_compilers,
        Retreat.SPARE,
        "the compiler gets the graph in another form",
    ),
)
"""Every pass, in the order in which they run.  `normalise` and the rewriting of bodies
come before the list, since each makes the graphs that the list runs on."""


def copies_of(work: Work) -> list[fx.Node]:
    """The inputs of the graph that are low copies of weights."""
    assert work.before is not None
    given = len(work.before.graph.find_nodes(op="placeholder"))
    inputs = work.gm.graph.find_nodes(op="placeholder")
    return inputs[given : given + len(work.weights)]


def takes_our_ops(options: PassOptions) -> bool:
    """Whether ops that are not torch's may be called: of compilers inductor can."""
    return _is_eager(options) or compat.is_inductor(options.backend)


def _is_eager(options: PassOptions) -> bool:
    return options.backend == "eager"


def _may_replace(work: Work, kernel: str | None = None) -> bool:
    """Whether functions of autoamp's may come into a graph, of a kernel that is on."""
    assert work.rewritten is not None
    if not work.options.fuse or not work.rewritten.sums.low:
        return False
    return kernel not in work.options.kernels_off


def _with_targets(work: Work, choose: Callable[[fx.Node], Any]) -> fx.GraphModule:
    def chosen(node: fx.Node) -> Any:
        return node.target if node.name in work.left else choose(node)

    return with_targets(work.gm, chosen)
