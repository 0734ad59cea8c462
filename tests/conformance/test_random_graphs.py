"""Random graphs: the laws of the pass on graphs of up to hundreds of nodes.

The emitted graph costs what was promised, and nothing is cheaper; dtypes, writes and
aliases are as before; no op mixes dtypes; what any dtype holds exactly keeps its bits.

Counted as `nodes rewritten` are the ATen nodes of graphs put through every pass after
tracing, each graph once.  By environment variables:

    AUTOAMP_GRAPH_NODES=20000    how many nodes (default: a million)
    AUTOAMP_FUZZ_SEED=7          other examples; `random` draws a seed, which is printed

    AUTOAMP_FUZZ_SEED=random pytest -n 2 tests/conformance/test_random_graphs.py
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import currently_in_test_context, note
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.passes import list as passes
from autoamp.passes.decide.cost import Prices, price_graph
from autoamp.passes.decide.devices import Device, Rates
from autoamp.passes.graph_record import Rewritten, Setting
from autoamp.passes.report_rows import costs_of
from autoamp.passes.run import rewrite_normalised
from autoamp.passes.write.emitted import CAST_KIND
from autoamp.training.options import Options
from tests.conformance.exploring import explore
from tests.conformance.graphs import ATEN, Built, Recipe, attributes, inputs, recipes
from tests.conformance.moves import MOVES, WHOLE
from tests.conformance.table import Figures
from tests.small_models import BF16
from tests.whole.test_laws import alias_relations, same_bits

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
    def price(*args: Any, **told: Any) -> Prices:
        found = price_graph(*args, **told)
        # As if any op could write its result in fp32: the law of prices is the same.
        wide = {value: up // 2 for value, up in found.up.items()}
        return replace(found, wide=wide if device.launch_ns else {})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "device_for", lambda *_, **__: device)
        patch.setattr(passes, "price_graph", price)
        low = LOW[options["precision"]]
        return rewrite_normalised(
            built.normalised(), Options(**options), low, Setting(free_weights), {}
        )


# -- the laws --------------------------------------------------------------------------


def cost_of(found: Rewritten) -> int:
    """The price of the emitted graph, once more: by what its nodes are recorded as."""
    prices = found.assignment.prices
    before = {n.name: n for n in found.before.graph.nodes}
    groups = found.assignment.problem.groups
    wide = {g.key[0]: g.made for g in groups if g.made is not None}
    total = 0
    for node in found.gm.graph.nodes:
        if node.name in prices.ops:
            total += prices.ops[node.name][node.name in found.assignment.low]
        elif CAST_KIND in node.meta:
            source = node.all_input_nodes[0]
            alone = len(source.users) == 1
            while source.name not in before:
                source = source.all_input_nodes[0]
            table = prices.down
            if node.meta["val"].dtype == torch.float32:
                table = wide if alone and source.name in wide else prices.up
            total += table[source.name]
    return total


def check_cost(found: Rewritten) -> None:
    """What is emitted costs what was promised, and nothing is cheaper."""
    assignment = found.assignment
    assert assignment.cost == assignment.optimal_cost
    assert cost_of(found) <= assignment.cost
    assert assignment.cost <= assignment.all_high_cost
    assert min(costs_of(found).regret.values()) >= 0


WIDENING = {"add", "addcmul", "div", "true_divide", "maximum", "minimum", "mul"}
WIDENING |= {"sub", "where"}
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


@pytest.mark.hypothesis
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "rounding"])
@pytest.mark.parametrize("shard", range(SHARDS // 2))
def test_random_graphs(shard: int, exact: bool, figures: Figures) -> None:
    nodes = graphs = 0
    moves = WHOLE if exact else MOVES

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


# -- the checks can fail ---------------------------------------------------------------

DEVICE = Device("plain", 15.0, 0.3, 10.0, 100.0, True)


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
