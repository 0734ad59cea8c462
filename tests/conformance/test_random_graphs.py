"""Random graphs: the laws of the pass on graphs of up to hundreds of nodes.

Counted as `nodes rewritten` are the ATen nodes of graphs put through every pass after
tracing, each graph once.  By environment variables:

    AUTOAMP_GRAPH_NODES=20000    how many nodes (default: a million)
    AUTOAMP_FUZZ_SEED=7          other examples; `random` draws a seed, which is printed

    AUTOAMP_FUZZ_SEED=random pytest -n 2 tests/conformance/test_random_graphs.py
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import currently_in_test_context, note
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import autoamp
from autoamp import compat
from autoamp.check.verify import Verifier
from autoamp.inspect.rows import costs_of
from autoamp.op_names import base_name
from autoamp.options import Options
from autoamp.pipeline import passes
from autoamp.pipeline.run import rewrite_normalised
from autoamp.place.devices import Device, Rates
from autoamp.rewrite import casts
from autoamp.rewrite.emitted import CAST_KIND
from autoamp.rewrite.rewritten import Rewritten, Setting
from autoamp.rules import Rules
from autoamp.trace.normalise import normalise
from tests.conformance.exploring import explore
from tests.conformance.graphs import (
    ATEN,
    TRAINED,
    Built,
    Recipe,
    attributes,
    inputs,
    recipes,
)
from tests.conformance.moves import EXACT, MOVES
from tests.conformance.table import Figures
from tests.small_models import BF16, deny_everything
from tests.whole.test_laws import (
    _Anything,
    alias_relations,
    casts_of,
    same_bits,
    text_of,
)

NODES = int(os.environ.get("AUTOAMP_GRAPH_NODES", "1000000"))
SHARDS = 40
"""Tests among which the budget is divided, so that workers finish together."""

EXAMPLES = 20
STEPS = 250

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


# -- what is drawn ---------------------------------------------------------------------


@st.composite
def devices(draw: st.DrawFn) -> Device:
    """A roofline whose launches, bytes and products weigh as they like.

    The graphs are tiny: under a true one every op would cost a launch and no more.
    """
    launch = draw(st.sampled_from([0.0, 0.3, 2000.0]))
    low = draw(st.sampled_from([0.5, 1.0, 20.0]))
    rates = Rates(draw(st.sampled_from([(), ((1.0, 5.0), (4.0, 10.0 * low))])))
    return Device("drawn", 15.0, launch, 10.0, 10.0 * low, low > 1, low=rates)


SOME_OPS = ("add", "relu", "clamp", "linear", "exp", "reshape", "copy_", "softmax")


@st.composite
def choices(draw: st.DrawFn) -> dict[str, Any]:
    """Options of a rewrite."""
    lists: dict[str, Any] = {}
    for op in draw(st.lists(st.sampled_from(SOME_OPS), max_size=3, unique=True)):
        kind = draw(st.sampled_from(["allow", "deny", "infer", "clear"]))
        lists.setdefault(kind, []).append(op)
    return {
        "precision": draw(st.sampled_from(["bf16", "bf16", "fp16"])),
        "do_no_harm": draw(st.sampled_from([False, False, True])),
        "objective": draw(st.sampled_from(["time", "time", "memory"])),
        **lists,
    }


def rewritten(
    built: Built, options: dict[str, Any], device: Device, free_weights: bool
) -> Rewritten:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "device_for", lambda *_, **__: device)
        low = LOW[options["precision"]]
        return rewrite_normalised(
            built.normalised(), Options(**options), low, Setting(free_weights), {}
        )


# -- the laws --------------------------------------------------------------------------


def cost_of(found: Rewritten) -> int:
    """The price of the emitted graph, once more: by what its nodes are recorded as."""
    prices = found.assignment.prices
    before = {n.name: n for n in found.before.graph.nodes}
    total = 0
    for node in found.gm.graph.nodes:
        if node.name in prices.ops:
            total += prices.ops[node.name][node.name in found.assignment.low]
        elif CAST_KIND in node.meta:
            source = node.all_input_nodes[0]
            while source.name not in before:
                source = source.all_input_nodes[0]
            up = node.meta["val"].dtype == torch.float32
            total += (prices.up if up else prices.down)[source.name]
    return total


def check_cost(found: Rewritten) -> None:
    """What is emitted costs what was promised, and nothing is cheaper."""
    assignment = found.assignment
    assert assignment.cost == assignment.optimal_cost
    assert cost_of(found) <= assignment.cost
    assert assignment.cost <= assignment.all_high_cost
    assert min(costs_of(found).regret.values()) >= 0


WIDENING = frozenset(
    [
        "add",
        "addcmul",
        "div",
        "maximum",
        "minimum",
        "mul",
        "sub",
        "true_divide",
        "where",
    ]
)
"""Ops whose kernels widen a low operand beside an fp32 one, which is exact."""


class MixedFloats(TorchFunctionMode):
    """Counts the ATen calls that meet float operands of several dtypes, and should not.

    A norm that takes fp32 parameters beside low data mixes none: its result is as its
    data, nothing is promoted.  What is written to in place keeps its dtype, and a few
    kernels widen low operands exactly.
    """

    def __init__(self) -> None:
        super().__init__()
        self.met: Counter[tuple[str, tuple[torch.dtype, ...]]] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        floats = [
            t
            for t in pytree.tree_leaves((args, kwargs))
            if isinstance(t, Tensor) and t.is_floating_point()
        ]
        if not isinstance(func, compat.OpOverload):
            return result
        pointwise = torch.Tag.pointwise in func.tags
        if pointwise and any(t.dim() for t in floats):
            floats = [t for t in floats if t.dim()]  # numbers promote nothing
        dtypes = tuple(t.dtype for t in floats)
        if len(set(dtypes)) > 1 and func not in _CONVERTERS:
            made = pytree.tree_leaves(result)[0]
            name = func.overloadpacket.__name__
            if made.dtype == torch.float32 in dtypes and name in WIDENING:
                return result
            if pointwise and name.endswith("_") and made.dtype == dtypes[0]:
                return result
            if pointwise or made.dtype != dtypes[0] or made.dtype == torch.float32:
                self.met[str(func), dtypes] += 1
        return result


_CONVERTERS = {torch.ops.aten.copy_.default}
"""Ops whose job is to take one dtype and give another, and that have two operands."""


def run(gm: fx.GraphModule) -> tuple[tuple[Tensor, ...], list[Tensor], MixedFloats]:
    """Runs a graph on the inputs it was built with; outputs and inputs afterwards."""
    given = inputs()
    with torch.no_grad():
        for name, buffer in gm.named_buffers():
            buffer.copy_(attributes()[name])
        torch.manual_seed(3)
        with MixedFloats() as mode:
            results = gm(*given)
    return results, given, mode


def check_run(found: Rewritten, built: Built, exact: bool) -> None:
    """By a run: dtypes, writes and aliases are as before, and no op mixes dtypes."""
    mixed = run(found.before)[2].met  # the user may mix
    results, given, mode = run(found.gm)
    assert not mode.met - mixed
    assert [r.dtype for r in results] == [r.dtype for r in built.results]
    ours = alias_relations(results, tuple(given))
    assert ours == alias_relations(built.results, built.given)
    if exact:
        same_bits(results, built.results)
        same_bits(given, list(built.given))
        buffers = dict(found.gm.named_buffers())
        same_bits(buffers, {name: built.attributes[name] for name in buffers})


def check_graph(
    recipe: Recipe, options: dict[str, Any], device: Device, free: bool, exact: bool
) -> int:
    """Every law that needs no tracing; gives the number of nodes rewritten."""
    built = recipe.build(MOVES)
    if currently_in_test_context():
        note(built.gm.code)
    found = rewritten(built, options, device, free)
    check_cost(found)
    check_run(found, built, exact)
    return len(found.before.graph.nodes)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "rounding"])
@pytest.mark.parametrize("shard", range(SHARDS // 2))
def test_random_graphs(shard: int, exact: bool, figures: Figures) -> None:
    nodes = graphs = 0
    moves = EXACT if exact else MOVES

    def check(
        recipe: Recipe, options: dict[str, Any], device: Device, free: bool
    ) -> None:
        nonlocal nodes, graphs
        nodes += check_graph(recipe, options, device, free, exact)
        graphs += 1

    drawn = (recipes(moves, STEPS), choices(), devices(), st.booleans())
    batch = 0
    while nodes < NODES / SHARDS:
        batch += 1
        explore(check, f"{shard}/{exact}/{batch}", EXAMPLES, *drawn)
    figures.count("nodes rewritten", nodes)
    figures.count("graphs", graphs)


# -- with tracing: all denied, gradients, rewriting twice ------------------------------


def differentiable(built: Built) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Leaves for the trained attributes and the first input, which get gradients."""
    leaves = {
        name: value.clone().requires_grad_(name in TRAINED)
        for name, value in attributes().items()
        if name in dict(built.gm.named_buffers())
    }
    given = inputs()
    given[0].requires_grad_()
    return leaves, given


def run_backward(
    gm: fx.GraphModule, built: Built
) -> tuple[Any, dict[str, Tensor | None] | None]:
    """Outputs, and the gradients, or None where autograd refuses (writes to leaves)."""
    leaves, given = differentiable(built)
    torch.manual_seed(3)
    with compat.with_parameters(gm, leaves):
        try:
            # A leaf may not be written to; a copy of it may.
            results = gm(given[0].clone(), *given[1:])
            ends = [r.double().sum() for r in results if r.requires_grad]
            if ends:
                sum(ends).backward()
        except RuntimeError as error:
            if not any(why in str(error) for why in _REFUSALS):
                raise
            return None, None
    # A buffer that was written to is no leaf any more.
    gradients = {n: leaf.grad if leaf.is_leaf else None for n, leaf in leaves.items()}
    return results, gradients | {"x0": given[0].grad}


_REFUSALS = (
    "modified by an inplace operation",
    "a leaf Variable that requires grad",
    "is a view",
)
"""How autograd says that a program may not be differentiated, or written like that."""


def denying(gm: fx.GraphModule) -> Rules:
    """The rules of bf16 with every op denied, those in no list and `gm` has too."""
    table = Rules.default("bf16").table
    met = {base_name(n.target) for n in gm.graph.nodes if hasattr(n.target, "_schema")}
    return deny_everything([*table, *met])


def check_traced(recipe: Recipe, options: dict[str, Any], figures: Figures) -> None:
    built = recipe.build(MOVES)
    note(built.gm.code)
    expected, gradients = run_backward(built.gm, built)

    rules = denying(normalise(built.gm, inputs()).gm)
    same = autoamp.rewrite(
        built.gm, inputs(), precision="bf16", do_no_harm=False, rules=rules
    )
    assert casts_of(same) == []
    results, ours = run_backward(same, built)
    same_bits(results, expected)
    same_bits(ours, gradients)

    once = autoamp.rewrite(built.gm, inputs(), **options)
    assert text_of(autoamp.rewrite(built.gm, inputs(), **options)) == text_of(once)
    assert text_of(autoamp.rewrite(once, inputs(), **options)) == text_of(once)
    if gradients is None:
        figures.count("not differentiable")
        return
    results, ours = run_backward(once, built)
    assert ours is not None, "backward is refused, in fp32 it was not"
    for name, gradient in gradients.items():
        assert getattr(ours[name], "dtype", None) == getattr(gradient, "dtype", None)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("shard", range(6))
def test_random_graphs_traced(shard: int, figures: Figures) -> None:
    """Denied, nothing changes; rewritten again, nothing changes; `.grad` is fp32."""

    def check(recipe: Recipe, options: dict[str, Any]) -> None:
        check_traced(recipe, options, figures)
        figures.count("graphs traced and rewritten again")

    explore(check, f"traced/{shard}", EXAMPLES, recipes(MOVES, 50), choices())


# -- the checks can fail ---------------------------------------------------------------

STALE = Recipe(steps=(("read_write_read", 0, (0,)),), outputs=(0,), everything=True)
DEVICE = Device("plain", 15.0, 0.3, 10.0, 100.0, True)


def test_a_stale_cast_is_found(monkeypatch) -> None:
    """The bits tell, with autoamp's own verifier blinded."""
    check_graph(STALE, BF16, DEVICE, free=False, exact=True)
    real = casts._Emitter._in_dtype
    monkeypatch.setattr(
        casts._Emitter, "_in_dtype", lambda s, v, d, r, epoch: real(s, v, d, r, 0)
    )
    monkeypatch.setattr(Verifier, "verify", lambda *_: None)
    monkeypatch.setattr(Verifier, "recount", lambda *_: _Anything())
    built = STALE.build(MOVES)
    with pytest.raises(AssertionError):
        check_run(rewritten(built, BF16, DEVICE, False), built, exact=True)


def test_a_promotion_is_found() -> None:
    built = Recipe((("linear", 0, (0,)),), (0,), True).build(MOVES)
    found = rewritten(built, BF16, DEVICE, False)
    assert not run(found.gm)[2].met
    nodes = {n.name: n for n in found.gm.graph.nodes}
    operands = nodes["x0"], nodes["x0_bf16"]
    with found.gm.graph.inserting_before(nodes["linear"]):
        for op in (ATEN.hypot.default, ATEN.add.Tensor):
            found.gm.graph.call_function(op, operands)
    found.gm.recompile()
    met = {("aten.hypot.default", (torch.float32, torch.bfloat16)): 1}
    assert run(found.gm)[2].met == met, "and not the sum, which widens exactly"


def test_a_dearer_placement_is_found() -> None:
    built = Recipe((("linear", 0, (0,)),), (0,), True).build(MOVES)
    found = rewritten(built, BF16, DEVICE, False)
    check_cost(found)
    dear = dataclasses.replace(
        found.assignment, cost=found.assignment.all_high_cost + 1
    )
    with pytest.raises(AssertionError):
        check_cost(dataclasses.replace(found, assignment=dear))
