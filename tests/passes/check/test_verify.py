"""The recount is the certificate, and planted faults are found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autoamp.errors import VerificationError
from autoamp.passes.functions import low_weight
from tests import small_models
from tests.passes.check.door import (
    FORMATS,
    Rewritten,
    Verifier,
    check_strides,
    checks,
    clean_up,
    passes,
)
from tests.quick import explored
from tests.says import says
from tests.small_models import Of, node
from tests.strategies import Program, choices, inputs, programs

ROWS, WIDTH = 4, 8
ATEN = torch.ops.aten
LOW = torch.bfloat16


class Model(nn.Module):
    """One of everything that the faults below need."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        first = self.fc(x)  # linear
        sums = first + self.other(x)  # linear_1, add
        denied = first.exp()  # exp
        scores = sums @ first.t()  # t, matmul
        flat = y.view(-1)
        before = self.other(y)  # linear_2
        flat[0:3].zero_()
        after = self.other(y)  # linear_3
        with torch.no_grad():
            quiet = self.fc(x)  # linear_4
        return denied, scores.relu(), before * 2, after, quiet


def rewritten(**changed: Any) -> Rewritten:
    given: dict[str, Any] = {"deny": ("exp",), **changed}
    return small_models.rewritten(Model(), inputs(grad=False), "bf16", **given)


def verify(found: Rewritten) -> None:
    found.gm.graph.lint()
    pinned = [n for n, v in found.classified.verdicts.items() if v.pinned]
    Verifier(found.before).verify(found.gm, pinned)


def recount(found: Rewritten, gm: fx.GraphModule) -> int:
    prices = found.assignment.prices
    return Verifier(found.before).recount(gm, prices.ops, prices.down, prices.up)


def cast_before(at: fx.Node, value: fx.Node, dtype: torch.dtype, name: str) -> fx.Node:
    """A correct cast of `value`, inserted before `at`."""
    with at.graph.inserting_before(at):
        new = at.graph.create_node(
            "call_function", ATEN._to_copy.default, (value,), {"dtype": dtype}, name
        )
    new.meta = {"val": value.meta["val"].to(dtype), "autoamp_cast": "down"}
    return new


# -- faults that take a whole graph; test_verify_rules.py has each rule ----------------


def stale_view_of_a_cast(found: Rewritten) -> None:
    cast, at = node(found, "linear_2").args[0], node(found, "zero_")
    with found.gm.graph.inserting_before(at):
        view = found.gm.graph.call_function(ATEN.alias.default, (cast,))
    view.meta = dict(cast.meta)
    node(found, "linear_3").update_arg(0, view)


def other_operand(found: Rewritten) -> None:
    """Another value of the same size and dtype."""
    sums = node(found, "add")
    sums.update_arg(0, sums.args[1])


def use_of_another_copy(found: Rewritten) -> None:
    """A weight whose gradient would be that of another one's copy."""
    at = node(found, "linear_1")
    weight = node(found, "model_other_weight")
    with found.gm.graph.inserting_before(at):
        copy = found.gm.graph.call_function(
            ATEN._to_copy.default, (node(found, "model_fc_weight"),), {"dtype": LOW}
        )
        use = found.gm.graph.call_function(low_weight, (weight, copy))
    copy.meta = use.meta = dict(at.args[1].meta)
    at.update_arg(1, use)


def added_call(found: Rewritten) -> None:
    at = node(found, "relu")
    with found.gm.graph.inserting_before(at):
        more = found.gm.graph.call_function(ATEN.neg.default, (at.args[0],))
    more.meta = dict(at.args[0].meta)
    at.update_arg(0, more)


def write_through_a_view_of_a_cast(found: Rewritten) -> None:
    cast, at = node(found, "linear_2").args[0], node(found, "zero_")
    with found.gm.graph.inserting_before(at):
        view = found.gm.graph.call_function(ATEN.alias.default, (cast,))
        write = found.gm.graph.call_function(ATEN.neg_.default, (view,))
    view.meta, write.meta = dict(cast.meta), dict(cast.meta)


FAULTS: dict[Callable[[Rewritten], None], list[str]] = {
    stale_view_of_a_cast: ["linear_3", "views x1_bf16", "written"],
    other_operand: ["add ", "reads linear_1, linear_1", "linear, linear_1"],
    use_of_another_copy: ["low_weight", "gradient"],
    added_call: ["neg", "added"],
    write_through_a_view_of_a_cast: ["neg_", "views x1_bf16", "a cast"],
}


def test_the_untampered_graph_passes() -> None:
    found = rewritten()
    verify(found)
    assert {"linear", "matmul", "add", "linear_3"} <= found.assignment.low
    assert "exp" not in found.assignment.low


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_planted_fault_is_found(fault: Callable[[Rewritten], None]) -> None:
    found = rewritten()
    fault(found)
    with pytest.raises(VerificationError) as raised:
        verify(found)
    says(raised, *FAULTS[fault])


# -- the recount -----------------------------------------------------------------------


@explored(40, 500, lambda most: (programs(most=most), choices()))
def test_the_emitted_graph_costs_what_was_promised(
    program: Program, options: dict[str, Any]
) -> None:
    seen: list[tuple[int, int]] = []

    def counted(gm: fx.GraphModule) -> fx.GraphModule:
        prices, verifier = spied["prices"], spied["verifier"]
        before = verifier.recount(gm, prices.ops, prices.down, prices.up)
        cleaned = clean_up(gm)
        after = verifier.recount(cleaned, prices.ops, prices.down, prices.up)
        seen.append((before, after))
        return cleaned

    spied: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        real_price, real_verifier = passes.price_graph, checks.Verifier

        def price(*args: Any, **kwargs: Any) -> Any:
            spied["prices"] = real_price(*args, **kwargs)
            return spied["prices"]

        def verifier(original: fx.GraphModule) -> Verifier:
            spied["verifier"] = real_verifier(original)
            return spied["verifier"]

        patch.setattr(passes, "price_graph", price)
        patch.setattr(checks, "Verifier", verifier)
        patch.setattr(passes, "clean_up", counted)
        found = small_models.rewritten(program, inputs(), **options)
    ((before, after),) = seen
    assert before == found.assignment.cost
    assert after <= before


def test_one_cast_more_or_less_is_counted() -> None:
    found = rewritten()
    promised = recount(found, found.gm)
    at = node(found, "linear")
    x = at.args[0].args[0]
    extra = cast_before(at, x, LOW, "planted")
    at.update_arg(0, extra)
    assert recount(found, found.gm) == promised + found.assignment.prices.down["x0"]
    fewer = rewritten()
    at = node(fewer, "linear_3")
    at.update_arg(0, node(fewer, "linear_2").args[0])
    assert (
        recount(fewer, clean_up(fewer.gm))
        == promised - found.assignment.prices.down["x1"]
    )


def test_a_product_that_nothing_but_a_cast_reads_has_its_price_in_fp32(
    monkeypatch,
) -> None:
    real = passes.price_graph

    def price(*args: Any, **told: Any) -> Any:
        wide = {"linear": 1, "linear_1": 2}
        return dataclasses.replace(real(*args, **told), wide=wide)

    def function(m: Of, x: Tensor) -> tuple[Tensor, ...]:
        return m.fc(x).exp(), m.fc(x).exp(), m.fc(x)

    monkeypatch.setattr(passes, "price_graph", price)
    model = Of(function, fc=nn.Linear(WIDTH, WIDTH))
    x = [torch.zeros(ROWS, WIDTH)]
    found = small_models.rewritten(model, x, "bf16", deny=("exp",))
    assert {"linear", "linear_1", "linear_2"} <= found.assignment.low
    prices = found.assignment.prices

    def counted() -> int:
        every = prices.ops, prices.down, prices.up, prices.wide
        return Verifier(found.before).recount(found.gm, *every)

    assert counted() == found.assignment.cost
    assert counted() == recount(found, found.gm) + 1 + 2 - 2 * prices.up["linear"]
    low = node(found, "linear")
    with found.gm.graph.inserting_after(low):
        another = found.gm.graph.call_function(ATEN.relu.default, (low,))
    another.meta = dict(low.meta)
    assert counted() == found.assignment.cost + prices.up["linear"] - 1


def test_a_wrong_promise_is_refused(monkeypatch) -> None:
    real = passes.assign

    def boast(*args: Any, **given: Any) -> Any:
        assignment = real(*args, **given)
        return dataclasses.replace(assignment, cost=assignment.cost - 1)

    monkeypatch.setattr(passes, "assign", boast)
    with pytest.raises(VerificationError) as raised:
        rewritten(strict=True)
    says(raised, "promised")


def test_a_dropped_cast_is_refused(monkeypatch) -> None:
    real = passes.insert_casts

    def careless(*args: Any) -> Any:
        gm, casts = real(*args)
        cast = next(n for n in gm.graph.nodes if n.name == casts[0].name)
        cast.replace_all_uses_with(cast.args[0])
        gm.graph.erase_node(cast)
        return gm, casts

    monkeypatch.setattr(passes, "insert_casts", careless)
    with pytest.raises(VerificationError):
        rewritten(strict=True)


def test_a_view_that_another_layout_makes_a_copy_is_refused() -> None:
    class Read(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            rows = ATEN.reshape.default(
                ATEN.permute.default(x, [3, 0, 1, 2]), [5, 2, 12]
            )
            return ATEN.layer_norm.default(rows, [12])

    gm = fx.symbolic_trace(Read())
    values: dict[fx.Node, Tensor] = {}
    for each in gm.graph.nodes:
        if each.op == "placeholder":
            values[each] = torch.randn(2, 3, 4, 5)
        elif each.op != "output":
            values[each] = each.target(*fx.map_arg(each.args, values.__getitem__))
        each.meta["val"] = values.get(each)
    check_strides(gm, [], FORMATS)
    with pytest.raises(VerificationError) as raised:
        check_strides(gm, ["x"], FORMATS)
    says(raised, op="reshape")
