"""What an assignment promises: least costs, pins, reasons, do-no-harm."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import autoamp
from autoamp.analyse.facts import FP32
from autoamp.inspect.rows import costs_of
from autoamp.options import Options
from autoamp.pipeline.run import rewrite_graph
from autoamp.place.mincut import Problem, energy
from autoamp.place.policies import POLICIES, project
from autoamp.rewrite.rewritten import Rewritten
from autoamp.rules import Rules
from tests import small_models
from tests.small_models import Of
from tests.strategies import Program, capture, choices, inputs, problems, programs


def rewritten(program: nn.Module, precision: str = "bf16", **options: Any) -> Rewritten:
    options = {"do_no_harm": True, **options}
    return small_models.rewritten(program, inputs(), precision, **options)


def check_least_cost(found: Rewritten) -> None:
    assignment = found.assignment
    assert assignment.cost == assignment.optimal_cost
    assert assignment.cost == energy(assignment.problem, assignment.low)
    assert assignment.cost <= assignment.all_high_cost
    regret = costs_of(found).regret
    assert regret.keys() == POLICIES.keys()
    assert min(regret.values()) >= 0, regret


@pytest.mark.thorough
@settings(max_examples=40)
@given(programs(), choices(), st.booleans(), st.sampled_from(["time", "memory"]))
def test_no_legal_placement_is_cheaper(
    program: Program, options: dict[str, Any], do_no_harm: bool, objective: str
) -> None:
    options = {**options, "do_no_harm": do_no_harm, "objective": objective}
    check_least_cost(rewritten(program, **options))


@settings(max_examples=100)
@given(problems(), st.sets(st.integers(0, 8)))
def test_a_projected_policy_is_legal_and_only_ever_raised(
    problem: Problem, labels: set[int]
) -> None:
    problem = dataclasses.replace(problem, at_source={})
    low = {f"v{i}" for i in labels}
    legal = project(problem, low)
    assert legal <= low
    assert energy(problem, legal) is not None
    assert project(problem, legal) == legal


@pytest.mark.parametrize("placement", ["tensorflow", "promote", "forced"])
def test_another_placement_is_applied_at_its_own_cost(placement: str) -> None:
    steps = [("linear", 0, 0), ("relu", 2, 0), ("norm", 3, 0), ("exp", 4, 0)]
    program = Program([*steps, ("linear", 5, 0)], [6])
    whole = rewritten(program, precision="bf16", placement=placement, do_no_harm=False)
    found, costs = whole.assignment, costs_of(whole)
    assert costs.ours == costs.placements[placement]
    assert found.cost == costs.ours.cost >= found.optimal_cost
    low = {found.decisions[name].op for name in found.low}
    assert "aten::linear.default" in low
    assert "aten::linear.default" not in {
        d.op for d in found.decisions.values() if not d.low
    }


def Mixed() -> Of:
    """Ops that read what a product made beside an fp32 tensor from outside."""

    def forward(m, x: Tensor, y: Tensor) -> list[Tensor]:
        low = m.fc(x)
        return [
            torch.atan2(y, low),
            y.scatter_add(0, m.index, low),
            low.sigmoid(),
            low * m.scale,
            m.norm(low),
        ]

    return Of(
        forward,
        fc=nn.Linear(4, 4),
        scale=nn.Parameter(torch.ones(())),
        norm=nn.BatchNorm1d(4),
        index=torch.zeros(4, 4).long(),
    )


def test_promote_is_as_wide_as_the_widest_operand_that_promotes() -> None:
    """A tensor of rank 0 promotes nothing, and a norm is as wide as its data."""
    options = Options(precision="bf16", placement="promote", do_no_harm=False)
    x = torch.randn(4, 4)
    found = rewrite_graph(capture(Mixed()), (x, x), options, torch.bfloat16).assignment
    wide = {d.op for d in found.decisions.values() if not d.low}
    assert wide == {"aten::atan2.default", "aten::scatter_add.default"}


def test_what_no_list_knows_is_a_wall_to_tensorflow() -> None:
    """Nothing is painted through it, though between two products it might be low."""

    class Walled(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            known = (x @ y.t()).sqrt()
            return (known @ x).sin() @ (y.t() @ x)

    for lists, low in (({}, False), ({"infer": ["sin"]}, True)):
        found = rewritten(
            Walled(),
            precision="fp16",
            rules="tensorflow",
            placement="tensorflow",
            **lists,
        ).assignment
        by_op = {d.op: d.low for d in found.decisions.values()}
        assert by_op["aten::sqrt.default"]
        assert by_op["aten::sin.default"] is low


def test_a_square_is_a_product_to_lists_that_know_no_square() -> None:
    class Squared(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = x @ y.t()
            return (x * x) @ y

    found = rewritten(Squared(), precision="fp16", rules="tensorflow", do_no_harm=False)
    assert found.classified.verdicts["mul"].reason == "Mul"
    found = rewritten(Squared(), precision="fp16", do_no_harm=False)
    squares = Rules.default("fp16").table["aten::square"]
    assert found.classified.verdicts["mul"].reason == squares.reason


def test_a_boolean_that_only_products_read_is_cast_to_low_at_once() -> None:
    """TensorFlow retargets such a cast; with another reader it stays what it was."""

    class Masked(nn.Module):
        def __init__(self, other: bool) -> None:
            super().__init__()
            self.other = other

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            mask = (x > 0).float()
            return mask @ y.t(), mask.exp() if self.other else y + 1

    for other in (False, True):
        found = rewritten(
            Masked(other), precision="fp16", rules="tensorflow", placement="tensorflow"
        ).assignment
        casts = {d.low for d in found.decisions.values() if d.op == "aten::to.dtype"}
        assert casts == {not other}


# -- do no harm ------------------------------------------------------------------------


def Wide(width: int) -> Of:
    return Of(lambda m, x: m.fc(m.fc(x).relu()), fc=nn.Linear(width, width))


def wide(width: int, **options: Any) -> Rewritten:
    gm = capture(Wide(width), 1)
    x = torch.randn(width, width)
    return rewrite_graph(gm, (x,), Options(precision="bf16", **options), torch.bfloat16)


def test_a_small_model_is_left_alone_unless_told_otherwise() -> None:
    careful = wide(4)
    assert careful.casts == ()
    assert careful.assignment.low == frozenset()
    assert careful.assignment.cost == careful.assignment.all_high_cost
    assert "gain nothing" in careful.assignment.decisions["linear"].choice
    told = wide(4, do_no_harm=False).assignment
    assert {"linear", "relu", "linear_1"} <= told.low


# -- pins and reasons ------------------------------------------------------------------


@pytest.mark.thorough
@settings(max_examples=25)
@given(programs(), choices())
def test_every_decision_is_told_and_every_pin_kept(
    program: Program, options: dict[str, Any]
) -> None:
    found = rewritten(program, **options)
    assignment = found.assignment
    assert assignment.low <= assignment.decisions.keys()
    assert FP32 not in assignment.low
    for name, decision in assignment.decisions.items():
        assert decision.reason
        assert decision.origin
        assert decision.low == (name in assignment.low)
        if found.classified.verdicts[name].pinned:
            assert not decision.low
    with pytest.raises(dataclasses.FrozenInstanceError):
        assignment.cost = 0


def test_keep_is_by_module_path() -> None:
    exported = torch.export.export(Wide(8), (torch.randn(8, 8),)).module()
    assert isinstance(exported, fx.GraphModule)
    found = rewrite_graph(
        exported,
        (torch.randn(8, 8),),
        Options(precision="bf16", do_no_harm=False, keep=("fc",)),
        torch.bfloat16,
    ).assignment
    linear = found.decisions["linear"]
    assert (linear.low, linear.reason) == (False, "kept in fp32 by keep='fc'")


@pytest.mark.parametrize(
    ("lists", "low"),
    [
        ({"deny": ["linear"]}, set()),
        ({"deny": ["relu"]}, {"linear", "linear_1"}),
        ({"deny": ["relu"], "clear": ["linear"]}, set()),
        ({"deny": ["linear"], "allow": ["relu"]}, {"relu"}),
    ],
)
def test_user_lists_move_ops(lists: dict[str, list[str]], low: set[str]) -> None:
    found = wide(8, do_no_harm=False, **lists).assignment
    assert found.low == low
    for name in ("linear", "relu"):
        op = found.decisions[name]
        if any(name in ops for ops in lists.values()):
            assert "listed by the user" in op.reason


def test_storage_that_is_written_has_one_precision() -> None:
    steps = [("linear", 0, 0), ("write_view", 2, 1), ("exp", 2, 1)]
    found = rewritten(Program(steps, [3, 4]), precision="fp16", do_no_harm=False)
    written = [
        n
        for n, f in found.facts.nodes.items()
        if f.storage in found.facts.mutated and n in found.assignment.decisions
    ]
    assert len(written) >= 3
    assert len({n in found.assignment.low for n in written}) == 1


@pytest.mark.parametrize(
    ("rows", "low"), [((1,), False), ((3,), False), ((4,), True), ((2, 2), True)]
)
def test_few_rows_gain_nothing_on_a_cpu(
    rows: tuple[int, ...], low: bool, monkeypatch
) -> None:
    """A product with a vector is limited by what torch's kernels make of it."""
    units = {torch.bfloat16: "amx_bf16"}
    monkeypatch.setattr("autoamp.compat.cpu_low_precision_units", lambda: units)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
    autoamp.convert(model, precision="bf16", strict=True)
    with torch.no_grad():
        model(torch.randn(*rows, 256))
    assert {row.is_low for row in autoamp.report(model).ops} == {low}
