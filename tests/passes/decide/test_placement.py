"""What an assignment promises: least costs, pins, reasons, do-no-harm."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import autoamp
from autoamp.passes.rules import Rules
from tests import small_models
from tests.passes.decide.door import (
    FP32,
    POLICIES,
    Problem,
    costs_of,
    energy,
    kept_bytes,
    least_cost,
    project,
)
from tests.says import says
from tests.small_models import Of
from tests.strategies import Program, choices, inputs, problems, programs


def rewritten(program: nn.Module, precision: str = "bf16", **options: Any) -> Any:
    options = {"do_no_harm": True, **options}
    return small_models.rewritten(program, inputs(), precision, **options)


@settings(max_examples=40)
@given(programs(), choices(), st.booleans(), st.sampled_from(["time", "memory"]))
def test_no_legal_placement_is_cheaper(
    program: Program, options: dict[str, Any], do_no_harm: bool, objective: str
) -> None:
    options = {**options, "do_no_harm": do_no_harm, "objective": objective}
    found = rewritten(program, **options)
    assignment = found.assignment
    fastest, least = least_cost(assignment.problem)
    kept = kept_bytes(assignment.prices.kept, fastest)
    assert assignment.optimal_cost == least
    assert assignment.cost == least or assignment.kept < kept
    assert assignment.cost == energy(assignment.problem, assignment.low)
    if objective == "time":
        assert assignment.cost <= assignment.all_high_cost
    regret = costs_of(found).regret
    assert regret.keys() == POLICIES.keys()
    assert min(regret.values()) >= 0, regret


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
    whole = rewritten(program, placement=placement, do_no_harm=False)
    found, costs = whole.assignment, costs_of(whole)
    assert costs.ours == costs.placements[placement]
    assert found.cost == costs.ours.cost >= found.optimal_cost
    linears = [d.low for d in found.decisions.values() if "linear" in d.op]
    assert linears == [True, True]


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
        assert not (found.classified.verdicts[name].pinned and decision.low)


# -- which ops of a program are low ----------------------------------------------------


def square(x: Tensor, y: Tensor) -> Tensor:
    x = x @ y.t()
    return (x * x) @ y


def chain(m: Of, x: Tensor, _: Tensor) -> Tensor:
    return m.fc(m.fc(x).relu())


def promoting(m: Of, x: Tensor, y: Tensor) -> list[Tensor]:
    """Ops that read what a product made beside an fp32 tensor from outside."""
    low = m.fc(x)
    picked = y.scatter_add(0, m.index, low)
    return [torch.atan2(y, low), picked, low.sigmoid(), low * m.scale, m.norm(low)]


def walled(m: Of, x: Tensor, y: Tensor) -> Tensor:
    known = (x @ y.t()).sqrt()
    return (known @ x).sin() @ (y.t() @ x)


def masked(other: bool) -> Any:
    def function(m: Of, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        mask = (x > 0).float()
        return mask @ y.t(), mask.exp() if other else y + 1

    return function


LIKE_TENSORFLOW = {
    "precision": "fp16",
    "rules": "tensorflow",
    "placement": "tensorflow",
}
TOLD: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    # A tensor of rank 0 promotes nothing, and a norm is as wide as its data.
    "promoted": (
        promoting,
        {"placement": "promote"},
        "linear sigmoid mul batch_norm",
        "atan2 scatter_add",
    ),
    # What no list knows: nothing is painted through it, though between two products.
    "walled": (walled, LIKE_TENSORFLOW, "sqrt", "sin"),
    "no wall": (walled, {**LIKE_TENSORFLOW, "infer": ["sin"]}, "sqrt sin", ""),
    # A boolean that products alone read is cast to low at once.
    "a mask": (masked(False), LIKE_TENSORFLOW, "to", ""),
    "a mask with another reader": (masked(True), LIKE_TENSORFLOW, "", "to"),
    "harmless": (chain, {}, "linear relu", ""),
    "harm": (chain, {"do_no_harm": True}, "", "linear relu"),
    "denied": (chain, {"deny": ["linear"]}, "", "linear relu"),
    "relu denied": (chain, {"deny": ["relu"]}, "linear", "relu"),
    "both listed": (
        chain,
        {"deny": ["relu"], "clear": ["linear"]},
        "",
        "linear relu",
    ),
    "relu allowed": (
        chain,
        {"deny": ["linear"], "allow": ["relu"]},
        "relu",
        "linear",
    ),
    "kept": (chain, {"keep": ["fc"]}, "", "linear"),
}
"""A program, options, the ops that are low wherever they stand, and those in fp32."""


@pytest.mark.parametrize("case", TOLD)
def test_ops_run_as_the_options_say(case: str) -> None:
    function, options, low, high = TOLD[case]
    model = Of(
        function,
        fc=nn.Linear(8, 8),
        scale=nn.Parameter(torch.ones(())),
        norm=nn.BatchNorm1d(8),
        index=torch.zeros(8, 8).long(),
    )
    options = {"strict": True, "precision": "bf16", "do_no_harm": False, **options}
    autoamp.convert(model, **options)
    model(torch.rand(8, 8), torch.rand(8, 8))
    ops = autoamp.report(model).ops
    for names, is_low in ((low, True), (high, False)):
        for name in names.split():
            found = [op for op in ops if op.op.startswith(f"aten::{name}.")]
            assert {op.is_low for op in found} == {is_low}, name
            listed = {*options} & {"deny", "allow", "clear", "infer"}
            if any(name in options[kind] for kind in listed):
                assert all("listed by the user" in op.reason for op in found)
            if name == "linear" and "keep" in options:
                says(found[0].reason, option="keep='fc'")
    if case == "harm":
        assert autoamp.report(model).rewritten[0].casts == ()


def test_a_square_is_a_product_to_lists_that_know_no_square() -> None:
    program = Of(lambda m, x, y: square(x, y))
    found = rewritten(program, "fp16", rules="tensorflow", do_no_harm=False)
    assert found.classified.verdicts["mul"].reason == "Mul"
    found = rewritten(program, "fp16", do_no_harm=False)
    squares = Rules.default("fp16").table["aten::square"]
    assert found.classified.verdicts["mul"].reason == squares.reason


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
