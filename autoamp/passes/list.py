"""The passes, in the order in which they run: the whole of mixed precision on a graph.

A captured graph goes in, and the graph that is run comes out.

 1. The graph is brought to one ATen op per node, above autograd and autocast
    (`normalise`).  The bodies of loops, branches and checkpoints go through the list
    first, each by itself.
 2. A chain of calls for which torch has one kernel becomes that kernel (`kernels`); a
    DTensor is handed over once for all its readers (`calls once`).
 3. The facts of each value are collected: its dtype, its storage, the ops that write to
    it, whether a gradient flows through it, the module and line of its op (`facts`).
 4. The rules give each op a category: allow, deny, infer or clear.  An op is pinned to
    fp32 where its author, the user or its numbers ask for that, and where type
    promotion under `torch.autocast` would leave it in fp32: no value is rounded that
    autocast does not round (`classify`).
 5. Each op has a price in fp32 and in the compute dtype, and each cast has one: the
    time that it takes on this device.  What autograd keeps of it has one in bytes
    (`price`).
 6. The placement is the minimum cut between "low" and "fp32": of those that the rules
    allow and that keep no more for the backward than autocast, none takes less time.
    Where all fp32 takes less, bytes yield to time (`place`).
 7. Casts are inserted where a low value meets an fp32 op or the other way round, one
    for all readers of a value, and what they cost is counted again from the emitted
    graph (`casts`); nodes that do nothing go (`clean up`).
 8. A cast of a weight becomes an input of the graph, since one copy serves until the
    optimizer's next step (`hoist`); DTensors are gathered in the compute dtype
    (`gathers`).
 9. In fp16 the gradients that enter the graph are multiplied by the loss scale, and
    those that leave it are divided by it and watched for infinities (`edge`).
10. Calls are replaced by functions that compute the same, more exactly or faster, and
    convolutions read the layout that is fastest; where bytes are the objective, cheap
    values are not kept for the backward (`attention` to `made again`).
11. The graph is given back as its caller needs it: with the model's calls on DTensors
    (`meshes`), and as code for eager PyTorch (`bindings`) or for a compiler (`for
    compilers`).

The passes that *see* (2, 3) and *decide* (4 to 6) put no cast into the graph; those
that *write* (7) do; those that *prepare* (8 to 11) make the graph ready for its caller.
A pass says how it changes rounding, and most passes leave every number as it is.  After
each pass that edits the graph two checks run, by code that shares nothing with the
pass: the pass's own (`checks.py`), and what no pass may do (`invariants.py`).

The categories are those of TensorFlow's `auto_mixed_precision.cc`; the cut (5, 6)
stands where that pass paints its graph from op to op.
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
from autoamp.passes.check import allowed_changes
from autoamp.passes.check.checks import Checks, differs_only
from autoamp.passes.decide.assign import assign
from autoamp.passes.decide.classify import classify
from autoamp.passes.decide.cost import as_authors_ask, price_graph
from autoamp.passes.decide.devices import Device, main_device
from autoamp.passes.functions.attention import attention, attention_at, traced_attention
from autoamp.passes.functions.depthwise import depthwise_at
from autoamp.passes.functions.index_add import index_add_at
from autoamp.passes.functions.norms import norm_at
from autoamp.passes.graph_record import Rewritten
from autoamp.passes.kernels.chains import softmax_at
from autoamp.passes.kernels.find_rotary import with_rotary
from autoamp.passes.kernels.fuse import fuse
from autoamp.passes.kernels.table import (
    ACCUMULATORS,
    ATTENTION_BACKWARD,
    CHANNELS_LAST,
    ROTARY,
    TOGETHER,
)
from autoamp.passes.options import PassOptions
from autoamp.passes.see.facts import collect_facts
from autoamp.passes.see.kept_by_calls import kept_by_calls
from autoamp.passes.speeds.speeds import device_for
from autoamp.passes.write.bindings import with_bindings
from autoamp.passes.write.body_inputs import with_low_inputs
from autoamp.passes.write.casts import insert_casts
from autoamp.passes.write.copied import clean_up, with_targets
from autoamp.passes.write.dtensor_calls import (
    with_calls_once,
    with_low_gathers,
    with_mesh_calls,
)
from autoamp.passes.write.for_compilers import for_compilers
from autoamp.passes.write.fp32_sums import with_sums, with_weight_gradients
from autoamp.passes.write.grouped_weight_casts import with_uses_together
from autoamp.passes.write.hoist_weight_casts import folded_in, hoist_weight_casts
from autoamp.passes.write.layouts import FORMATS, choose_layouts, convolved, lay_out
from autoamp.passes.write.made_again import with_values_made_again
from autoamp.passes.write.scale_edge import scale_edge
from autoamp.passes.write.unbind import with_unbind


class Phase(enum.IntEnum):
    """The four parts of the list."""

    SEE = 1
    DECIDE = 2
    WRITE = 3
    PREPARE = 4


@dataclass(frozen=True)
class Pass:
    """One entry of the list.

    Attributes:
        run: makes a new record of a record, which stays as it is; its docstring says
            what holds after the pass.
        phase: the part of the list.
        check: raises where the guarantee in the docstring of `run` does not hold; given
            the checks of this run, and the records before and after.  A pass that edits
            no graph has none.
        rounding: how the pass changes the rounding of numbers; "" where every number
            that the graph computes stays as it is.
        without: the report's words about a graph that goes without the pass.  Where the
            pass or its check fails, the pass runs again and leaves the nodes that the
            error names as they are; in the end it is left out.  A graph cannot go
            without a pass that has no such words: there the nodes stay fp32, and the
            passes that decide and write run again.
        needs_memory: whether the pass puts functions in that read the memory of their
            operands, and so leaves all calls on DTensors.
    """

    run: Callable[[Rewritten], Rewritten]
    phase: Phase
    check: Callable[[Checks, Rewritten, Rewritten], None] | None = None
    rounding: str = ""
    without: str = ""
    needs_memory: bool = False

    @property
    def name(self) -> str:
        """The name, as in times and notes."""
        return self.run.__name__.strip("_").replace("_", " ")


class LeaveOut(Exception):  # noqa: N818 - no error: an instruction
    """A pass of the list is to be left out; the passes from there on run again."""

    def __init__(self, name: str, why: str) -> None:
        """Args: `name` of the pass, and the reason."""
        super().__init__(f"{name}: {why}")
        self.name = name


# -- the passes ----------------------------------------------------------------------


def _kernels(work: Rewritten) -> Rewritten:
    """Each chain that torch has a kernel for is one call of the kernel."""
    on = work.setting.device_type
    found = fuse(work.normalised, work.options, work.low, on, work.left)
    return work if found is None else replace(work, gm=found.gm, fused=True)


def _calls_once(work: Rewritten) -> Rewritten:
    """A value is handed to the mesh once, however many readers it has there."""
    return replace(work, gm=with_calls_once(work.gm, work.left))


def _facts(work: Rewritten) -> Rewritten:
    """Dtypes, aliases, writes, modules and what is kept of every node are known."""
    facts = collect_facts(work.gm, work.low, work.setting.device_type)
    kept = kept_by_calls(work.gm, facts)
    facts = replace(facts, own_kernels=work.setting.own_kernels, kept=kept)
    return replace(work, facts=facts, before=work.gm)


def _classify(work: Rewritten) -> Rewritten:
    """Every op has a category with a reason, or is pinned to fp32 with a reason."""
    options, low = work.options, work.low
    rules = options.resolve_rules(low)
    classified = classify(
        work.gm,
        work.facts,
        rules,
        low,
        (*options.kept, *rules.keep),
        kept=options.kept,
        given_up=work.given_up,
        ceiling=options.placement != "tensorflow",
        to_the_letter=options.is_tensorflows,
    )
    return replace(work, classified=classified, facts=classified.facts)


def _price(work: Rewritten) -> Rewritten:
    """Every op has a price in each precision, and every cast has one."""
    prices = price_graph(
        work.gm,
        work.classified,
        device_of(work),
        do_no_harm=work.options.do_no_harm,
        free_weights=work.setting.free_weights,
    )
    if not (_is_eager(work.options) and _is_on(work.options, ACCUMULATORS)):
        prices = replace(prices, wide={})
    return replace(work, prices=as_authors_ask(prices, work.classified))


def _place(work: Rewritten) -> Rewritten:
    """No legal placement that keeps as little for the backward takes less time."""
    options = work.options
    bodies = [body.assignment for body in work.bodies]
    found = assign(
        work.classified,
        work.prices,
        options.placement,
        options.objective,
        gained=sum(body.all_high_cost - body.cost for body in bodies),
    )
    if work.fused and not found.low:
        # A kernel rounds otherwise than the calls it stands for, and a graph without
        # low ops gives the bits of fp32.
        raise LeaveOut("kernels", "nothing runs low, so that all numbers stay")
    return replace(work, assignment=found)


def _casts(work: Rewritten) -> Rewritten:
    """Every op reads the precision decided, and casts cost what was planned."""
    after, casts = insert_casts(
        work.gm, work.classified, work.assignment, work.low, work.fake_mode
    )
    return replace(work, gm=after, casts=tuple(casts))


def _clean_up(work: Rewritten) -> Rewritten:
    """The graph is the same program but for casts, and no node does nothing."""
    return replace(work, gm=clean_up(work.gm))


def _low_inputs(work: Rewritten) -> Rewritten:
    """A body copies nothing of an input that it is given low."""
    return with_low_inputs(work, work.left) if work.bodies else work


def _hoist(work: Rewritten) -> Rewritten:
    """Low copies of weights are inputs, and their gradients are summed in fp32."""
    hoisted = hoist_weight_casts(work, work.left)
    return replace(work, gm=hoisted.gm, weights=tuple(hoisted.weights))


def _gathers(work: Rewritten) -> Rewritten:
    """DTensors that are read low are gathered low; their gradients sum up in fp32."""
    if not _is_eager(work.options):
        return work
    return replace(work, gm=with_low_gathers(work.gm, work.low, work.left))


def _edge(work: Rewritten) -> Rewritten:
    """Each gradient is scaled once on its way in, and unscaled once on its way out."""
    if not work.setting.scaled:
        return work
    gm, edge = scale_edge(work.gm, work)
    return replace(work, gm=gm, edge=edge)


def _attention(work: Rewritten) -> Rewritten:
    """Attention in 16 bits on CPUs has a backward that computes in fp32."""
    if not _may_replace(work, ATTENTION_BACKWARD) or not takes_our_ops(work.options):
        return work
    own = attention if _is_eager(work.options) else traced_attention
    return _with_targets(work, partial(attention_at, own=own))


def _softmax(work: Rewritten) -> Rewritten:
    """A softmax that stands for a chain has gradients as true as the chain's."""
    return _with_targets(work, softmax_at) if _may_replace(work) else work


def _norms(work: Rewritten) -> Rewritten:
    """Low norms on CPUs compute in fp32, and sum their gradients in fp32."""
    return _with_targets(work, norm_at) if _may_replace_eagerly(work) else work


def _rotary(work: Rewritten) -> Rewritten:
    """A rotary embedding is one call."""
    if not _may_replace_eagerly(work, ROTARY):
        return work
    return replace(work, gm=with_rotary(work.gm, work.left))


def _unbind(work: Rewritten) -> Rewritten:
    """Selects that together show a whole tensor have one gradient."""
    if not _may_replace_eagerly(work):
        return work
    return replace(work, gm=with_unbind(work.gm, work.facts, work.left))


def _layouts(work: Rewritten) -> Rewritten:
    """Convolutions read channels last where that is faster; results lie as before."""
    if not _may_replace(work, CHANNELS_LAST):
        return work
    copies = copies_of(work)
    if _is_eager(work.options):
        weights = [*copies, *folded_in(work.gm)]
        layouts = choose_layouts(
            work.gm.graph, weights, device_of(work), work.facts, work.left
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


def _depthwise(work: Rewritten) -> Rewritten:
    """Wide depthwise filters on CPUs have gradients by a kernel for depthwise ones."""
    here = device_of(work)
    # The kernels of a CPU without units for bf16 are others.
    if not (here.type == "cpu" and here.channels_last and _may_replace_eagerly(work)):
        return work
    return _with_targets(work, depthwise_at)


def _sums(work: Rewritten) -> Rewritten:
    """Low products that are read in fp32 keep their fp32 sums."""
    if not _keeps_sums(work):
        return work
    assert work.rewritten is not None
    # A name that a body has as well counts as one through which a gradient flows.
    flowing = {
        name
        for each in work.rewritten.with_bodies()
        for name, fact in each.facts.nodes.items()
        if fact.requires_grad
    }
    return replace(work, gm=with_sums(work.gm, device_of(work), flowing, work.left))


def _weight_gradients(work: Rewritten) -> Rewritten:
    """Gradients of weights come from products in fp32."""
    if not _keeps_sums(work):
        return work
    gm = with_weight_gradients(work.gm, device_of(work), work.left)
    return replace(work, gm=gm)


def _keeps_sums(work: Rewritten) -> bool:
    return _may_replace_eagerly(work, ACCUMULATORS) and device_of(work).keeps_sums


def _together(work: Rewritten) -> Rewritten:
    """On GPUs the gradients of several weights are cast by one kernel."""
    if not _may_replace_eagerly(work, TOGETHER) or not device_of(work).starts_kernels:
        return work
    return replace(work, gm=with_uses_together(work.gm, work.left))


def _index_adds(work: Rewritten) -> Rewritten:
    """An `index_add` keeps nothing of what it adds for the backward."""
    return _with_targets(work, index_add_at) if _may_replace_eagerly(work) else work


def _made_again(work: Rewritten) -> Rewritten:
    """Where bytes are the objective, cheap values are made again and not kept."""
    if work.options.objective != "memory" or not _may_replace_eagerly(work):
        return work
    gm = with_values_made_again(work.gm, work.before, work.facts, work.left)
    return replace(work, gm=gm)


def _meshes(work: Rewritten) -> Rewritten:
    """A graph that computes on DTensors makes the model's own calls on the mesh."""
    return replace(work, gm=with_mesh_calls(work.gm))


def _bindings(work: Rewritten) -> Rewritten:
    """The code that runs calls torch's functions, which call the graph's ops."""
    if not _is_eager(work.options) or not work.setting.makes_code:
        return work
    return replace(work, code=with_bindings(work.gm, work.left))


def _for_compilers(work: Rewritten) -> Rewritten:
    """A compiler gets a graph that AOT autograd can trace and differentiate."""
    if _is_eager(work.options):
        return work
    inductor = compat.is_inductor(work.options.backend)
    return replace(work, code=for_compilers(work.gm, work.left, inductor=inductor))


_SEE, _DECIDE, _WRITE, _PREPARE = Phase

PASSES = (
    Pass(
        # Before the facts: a chain then has one category and one price, as one op.
        _kernels,
        _SEE,
        Checks.replaced,
        rounding="a kernel rounds once, where each call it replaces rounded",
        without="chains of calls stay as they are written",
        needs_memory=True,
    ),
    Pass(
        _calls_once,
        _SEE,
        differs_only(allowed_changes.MADE_ONCE),
        without="values are handed to the mesh for each reader",
    ),
    # Every later pass of this part reads these facts, so no call may change from here
    # to `casts`.
    Pass(_facts, _SEE),
    Pass(_classify, _DECIDE),
    Pass(_price, _DECIDE),
    Pass(_place, _DECIDE),
    Pass(
        _casts,
        _WRITE,
        Checks.recounted,
        rounding="what low ops read and give is rounded to the compute dtype",
    ),
    Pass(_clean_up, _WRITE, Checks.same_program),
    Pass(
        _low_inputs,
        _WRITE,
        differs_only(allowed_changes.LOW_INPUTS),
        without="its checkpoints keep their inputs in fp32",
    ),
    Pass(
        _hoist,
        _PREPARE,
        Checks.hoisted,
        without="its weights are cast at every call",
    ),
    Pass(
        _gathers,
        _PREPARE,
        differs_only(allowed_changes.GATHERS),
        without="DTensors are gathered in fp32 and cast then",
    ),
    Pass(
        _edge,
        _PREPARE,
        Checks.edge,
        rounding="a loss scale that is no power of two rounds gradients",
    ),
    Pass(
        _attention,
        _PREPARE,
        Checks.replaced,
        rounding="the backward computes in fp32 inside",
        without="its attention has torch's backward",
        needs_memory=True,
    ),
    Pass(
        _softmax,
        _PREPARE,
        Checks.replaced,
        rounding="the backward computes in fp32 inside",
        without="its softmax has torch's backward",
        needs_memory=True,
    ),
    Pass(
        _norms,
        _PREPARE,
        Checks.replaced,
        rounding="norms compute in fp32 inside, and sum their gradients in fp32",
        without="its norms are torch's",
        needs_memory=True,
    ),
    Pass(
        _rotary,
        _PREPARE,
        Checks.replaced,
        rounding="the embedding computes in fp32 inside",
        without="its rotary embeddings stay as they are written",
        needs_memory=True,
    ),
    Pass(
        _unbind,
        _PREPARE,
        Checks.replaced,
        without="each of its selects has a gradient as large as the whole tensor",
        needs_memory=True,
    ),
    Pass(
        _layouts,
        _PREPARE,
        Checks.laid_out,
        rounding="kernels for another layout may sum in another order",
        without="its convolutions read the layout they are given",
        needs_memory=True,
    ),
    Pass(
        # After `layouts`, which knows torch's convolutions.
        _depthwise,
        _PREPARE,
        Checks.replaced,
        rounding="kernels for other layouts may sum in another order",
        without="its depthwise convolutions have torch's backward",
        needs_memory=True,
    ),
    Pass(
        _sums,
        _PREPARE,
        Checks.replaced,
        rounding="sums that are read in fp32 are not rounded",
        without="its products round their sums, which casts widen",
        needs_memory=True,
    ),
    Pass(
        # Before `together`, which casts the gradients of the weights that are left.
        _weight_gradients,
        _PREPARE,
        Checks.replaced,
        rounding="gradients of weights are sums in fp32, never rounded",
        without="the gradient of each of its weights is rounded and cast",
        needs_memory=True,
    ),
    Pass(
        _together,
        _PREPARE,
        differs_only(allowed_changes.TOGETHER),
        without="the gradient of each of its weights is cast by itself",
        needs_memory=True,
    ),
    Pass(
        # `made again` alone, behind it, asks what a call writes to.
        _index_adds,
        _PREPARE,
        Checks.replaced,
        without="what its index_add adds is kept for the backward",
        needs_memory=True,
    ),
    Pass(
        # After all passes that know ops by their targets.
        _made_again,
        _PREPARE,
        differs_only(allowed_changes.MADE_AGAIN),
        without="its backward makes nothing again, and keeps more",
        needs_memory=True,
    ),
    # Up to here the graph computes on whole tensors, as every pass above assumes.
    Pass(_meshes, _PREPARE, Checks.on_meshes),
    Pass(
        _bindings,
        _PREPARE,
        Checks.bound,
        without="its code calls each op by the dispatcher",
    ),
    Pass(
        _for_compilers,
        _PREPARE,
        Checks.for_compilers,
        rounding="a compiler may keep in fp32 what eager PyTorch rounds",
        without="the compiler gets the graph in another form",
    ),
)
"""Every pass, in the order in which they run.  `normalise` and the rewriting of bodies
come before the list, since each makes the graphs that the list runs on."""


def device_of(work: Rewritten) -> Device:
    """The device that the graph is to run on."""
    return work.setting.device or device_for(
        main_device(work.gm), work.low, calibrate=work.options.calibrate
    )


def copies_of(work: Rewritten) -> list[fx.Node]:
    """The inputs of the graph that are low copies of weights."""
    given = len(work.before.graph.find_nodes(op="placeholder"))
    inputs = work.gm.graph.find_nodes(op="placeholder")
    return inputs[given : given + len(work.weights)]


def takes_our_ops(options: PassOptions) -> bool:
    """Whether ops that are not torch's may be called: of compilers inductor can."""
    return _is_eager(options) or compat.is_inductor(options.backend)


def _is_eager(options: PassOptions) -> bool:
    return options.backend == "eager"


def _may_replace(work: Rewritten, kernel: str | None = None) -> bool:
    """Whether functions of autoamp's may come into a graph, of a kernel that is on."""
    assert work.rewritten is not None
    # A graph in which nothing is low gives the numbers of fp32 to the bit.
    return work.rewritten.sums.low > 0 and _is_on(work.options, kernel)


def _is_on(options: PassOptions, kernel: str | None) -> bool:
    return options.fuse is not False and kernel not in options.kernels_off


def _may_replace_eagerly(work: Rewritten, kernel: str | None = None) -> bool:
    return _is_eager(work.options) and _may_replace(work, kernel)


def _with_targets(work: Rewritten, choose: Callable[[fx.Node], Any]) -> Rewritten:
    def chosen(node: fx.Node) -> Any:
        return node.target if node.name in work.left else choose(node)

    return replace(work, gm=with_targets(work.gm, chosen))
