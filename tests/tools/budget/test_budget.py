"""`convert(budget=...)`: errors are within it, and bad input changes nothing."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp import Budget, BudgetError, OptionError
from tests.says import says
from tests.small_models import BF16
from tests.tools.budget.door import parsed, relative_error


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Net(nn.Module):
    """Layers whose roundings weigh differently: `loud` reaches the output enlarged."""

    def __init__(self) -> None:
        super().__init__()
        self.calm, self.middle, self.loud = (nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.1 * torch.tanh(self.calm(x))
        x = x + 0.3 * torch.tanh(self.middle(x))
        return self.head(3 * torch.tanh(self.loud(x)))


def batches(count: int = 3) -> list[Tensor]:
    return [torch.randn(16, 32) for _ in range(count)]


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def step(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
    model.zero_grad()
    output = model(x)
    if not model.training:
        return output.detach(), [], square(output).detach()
    loss = square(output)
    loss.backward()
    return output.detach(), [p.grad for p in model.parameters()], loss.detach()


def true_errors(model: nn.Module, exact: nn.Module, x: Tensor) -> dict[str, float]:
    """The errors by plain calls, outside of autoamp's own measuring."""
    ours, theirs = step(model, x), step(exact, x)
    return {
        "outputs": relative_error([ours[0]], [theirs[0]]),
        "gradients": relative_error(ours[1], theirs[1]),
        "loss": abs(float(ours[2] - theirs[2])) / abs(float(theirs[2])),
    }


# -- the budget is kept ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "limits"),
    [
        (Budget(outputs="0.1%"), {"outputs": 1e-3}),
        (Budget(outputs=3e-3, gradients=3e-3), {"outputs": 3e-3, "gradients": 3e-3}),
        (Budget(loss="0.02%", loss_fn=square), {"loss": 2e-4}),
    ],
)
def test_errors_are_within_the_budget(budget: Budget, limits: dict[str, float]) -> None:
    model, data = Net().train(), batches(4)
    exact = copy.deepcopy(model)
    if budget.loss_fn is None:
        budget = replace(budget, loss_fn=square)
    autoamp.convert(model, **BF16, budget=budget, calibrate_on=data)
    for x in data:
        found = true_errors(model, exact, x)
        for measure, limit in limits.items():
            assert found[measure] <= limit
    report = autoamp.report(model)
    assert report.frontier is not None
    assert report.frontier.limits == limits
    assert report.frontier.chosen > 0
    assert any(op.is_low for op in report.ops)
    assert not all(op.is_low for op in report.ops)
    for number, check in enumerate(report.frontier.checks):
        found = true_errors(model, exact, data[number])
        for measure in limits:
            assert check.errors[measure] == pytest.approx(found[measure], rel=0.05)
    assert [c.held_out for c in report.frontier.checks] == [False] * 3 + [True]


def test_a_smaller_budget_costs_time_and_error_falls() -> None:
    model, data = Net().eval(), batches()
    times, errors = [], []
    for factor in ("1.2 autocast", "0.5 autocast", "0.2 autocast", "0.01 autocast"):
        twin = copy.deepcopy(model)
        autoamp.convert(twin, **BF16, budget=factor, calibrate_on=data)
        twin(data[0])
        found = autoamp.report(twin).frontier
        assert found is not None
        times.append(found.point.nanoseconds)
        errors.append(found.measured("outputs"))
        assert errors[-1] <= found.limits["outputs"]
    assert times == sorted(times)
    assert errors == sorted(errors, reverse=True)
    assert len(set(times)) >= 3
    assert errors[-1] == 0.0, "no op is exact enough for a hundredth"


def test_a_budget_that_nothing_meets_but_fp32_gives_the_bits_of_fp32() -> None:
    model, data = Net().eval(), batches()
    exact = copy.deepcopy(model)
    autoamp.convert(model, **BF16, budget=1e-9, calibrate_on=data)
    assert torch.equal(model(data[0]), exact(data[0]))
    row = next(op for op in autoamp.report(model).ops if op.module == "calm")
    assert "the budget for error leaves it fp32" in row.reason


def test_what_is_loudest_goes_to_fp32_first() -> None:
    model, data = Net().eval(), batches()
    autoamp.convert(model, **BF16, budget="0.4 autocast", calibrate_on=data)
    model(data[0])
    low = {op.module for op in autoamp.report(model).ops if op.is_low}
    assert "calm" in low
    assert "loud" not in low


def test_a_large_budget_goes_below_the_ceiling_and_says_so() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x + self.first(x)) + x

    data = batches()
    plain, wide = Sums().eval(), Sums().eval()
    autoamp.convert(plain, **BF16, budget="autocast", calibrate_on=data)
    autoamp.convert(wide, **BF16, budget="9 autocast", calibrate_on=data)
    for model in (plain, wide):
        model(data[0])
    below = [autoamp.report(m).frontier.below_ceiling for m in (plain, wide)]  # type: ignore[union-attr]
    assert not below[0]
    found = autoamp.report(wide).frontier
    assert found is not None
    assert found.point.low <= found.marks[-1].low, "more ops low than may be"
    assert any("add" in each for each in below[1])
    says(str(autoamp.report(wide)), "type promotion")
    ops = autoamp.report(wide).ops
    assert "bf16" in [op.precision for op in ops if op.op.startswith("aten::add")]


def test_a_metric_of_one_output_and_of_two() -> None:
    model, data = Net().eval(), batches()

    def drift(out: Tensor) -> Tensor:
        return out.log_softmax(-1)

    def divergence(out: Tensor, exact: Tensor) -> float:
        ours, theirs = out.log_softmax(-1), exact.log_softmax(-1)
        found = (theirs.exp() * (theirs - ours)).sum(-1).mean()
        return float(found.abs())

    def switched(out: Tensor) -> float:
        return float(out.argmax(-1).float().mean())

    exact = copy.deepcopy(model)
    for metric, limit in ((drift, 1e-3), (divergence, 1e-7), (switched, 0.01)):
        twin = copy.deepcopy(model)
        budget = Budget(metric=metric, at_most=limit)
        autoamp.convert(twin, **BF16, budget=budget, calibrate_on=data)
        found = autoamp.report(twin)
        for x in data:
            ours, theirs = twin(x).detach(), exact(x).detach()
            if metric is divergence:
                error = divergence(ours, theirs)
            else:
                a, b = (torch.as_tensor(metric(t)).double() for t in (ours, theirs))  # type: ignore[call-arg,operator]
                error = float((a - b).square().mean().sqrt())
            assert error <= limit, metric
        found = autoamp.report(twin)
        assert any(op.is_low for op in found.ops), metric


def test_fp16_trains_with_a_budget() -> None:
    model, data = Net().train(), batches()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    autoamp.convert(
        model,
        optimizer,
        precision="fp16",
        do_no_harm=False,
        budget=Budget(gradients="0.5 autocast", loss_fn=square),
        calibrate_on=data,
    )
    first = last = 0.0
    for number in range(20):
        loss = square(model(data[0]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last = loss.item()
        first = first if number else last
    assert last < 0.5 * first
    assert autoamp.report(model).frontier is not None


# -- what belongs to a conversion ------------------------------------------------------


def test_the_placement_stays_with_the_model() -> None:
    model, data = Net().eval(), batches()
    autoamp.convert(model, **BF16, budget="0.4 autocast", calibrate_on=data)
    results = model(data[0])
    twin = copy.deepcopy(model)
    assert torch.equal(twin(data[0]), results)
    error = autoamp.compare(model, data[0]).errors.output
    assert error <= autoamp.report(model).frontier.limits["outputs"]  # type: ignore[union-attr]
    with torch.no_grad():
        model(data[0])  # another capture has the same precision at the same ops
    by_graph = [
        {op.module: op.precision for op in autoamp.report(model).ops if op.graph == g}
        for g in (0, 1)
    ]
    assert by_graph[0] == by_graph[1]
    autoamp.convert(autoamp.revert(model), **BF16)
    model(data[0])
    assert autoamp.report(model).frontier is None


def test_an_op_that_no_batch_ran_stays_fp32() -> None:
    class Either(Net):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(32, 8)

        def forward(self, x: Tensor, which: bool = True) -> Tensor:
            return super().forward(x) if which else self.other(x)

    model, data = Either().eval(), batches()
    autoamp.convert(model, **BF16, budget="3 autocast", calibrate_on=data)
    model(data[0])
    exact = copy.deepcopy(autoamp.revert(copy.deepcopy(model)))
    assert torch.equal(model(data[0], which=False), exact(data[0], which=False))
    row = next(op for op in autoamp.report(model).ops if op.module == "other")
    assert "no batch of calibrate_on= ran it" in row.reason


def test_the_report_shows_it() -> None:
    model, data = Net().eval(), batches()
    autoamp.convert(model, **BF16, budget="0.4 autocast", calibrate_on=data)
    model(data[0])
    report = autoamp.report(model)
    says(str(report), "budget for error")
    saved = json.loads(report.to_json())["budget"]
    assert saved["chosen"] == report.frontier.chosen  # type: ignore[union-attr]
    assert {m["name"] for m in saved["marks"]} == {"fp32", "torch.autocast", "all low"}
    page = report.to_html()
    assert '"budget"' in page
    said = report.why(next(op.name for op in report.ops if op.module == "loud"))
    assert "% of the squared error allowed" in said
    assert "<- chosen" in str(report.frontier)
    plain = autoamp.explain(Net().eval(), data[0], **BF16)
    assert plain.frontier is None
    assert json.loads(plain.to_json())["budget"] is None


def test_the_frontier_is_a_frontier() -> None:
    model, data = Net().train(), batches()
    budget = Budget(outputs="autocast", gradients="autocast", loss_fn=square)
    autoamp.convert(model, **BF16, budget=budget, calibrate_on=data)
    model(data[0])
    found = autoamp.report(model).frontier
    assert found is not None
    times = [p.nanoseconds for p in found.points]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == len(times) >= 4
    shares = [
        sum((p.errors.get(m, 0.0) / x) ** 2 for m, x in found.limits.items())
        for p in found.points
    ]
    assert shares == sorted(shares)
    assert found.points[0].low == 0


# -- bad input -------------------------------------------------------------------------


NOISE = itertools.count()


class Drifting(Net):
    """Counts its calls where no module can be put back."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.noise()

    @torch._dynamo.disable
    def noise(self) -> float:
        return 1 + 0.1 * next(NOISE)


def no_metric(out: Tensor) -> Any:
    return "good"


def nan_metric(out: Tensor) -> Tensor:
    return out.sum() * math.nan


def broken_metric(out: Tensor) -> Tensor:
    raise KeyError("logits")


def metric(function: Callable[..., Any]) -> dict[str, Any]:
    return {"budget": Budget(metric=function, at_most=1)}


ROWS = torch.ones(2, 32)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"budget": "0.1%", "calibrate_on": None}, "calibrate_on"),
    ({"budget": None}, "budget"),
    *(({"budget": each}, "budget") for each in ("a little", True, [0.1], 3 + 4j)),
    *(({"budget": each}, "positive") for each in ("0", -1, math.nan)),
    ({"calibrate_on": []}, "no batch"),
    ({"calibrate_on": torch.ones(3, 32)}, "list of batches"),
    ({"calibrate_on": [torch.ones(2, 5)]}, "calibrate_on[0]"),
    ({"calibrate_on": [ROWS, torch.ones(2, 5)]}, "calibrate_on[1]"),
    ({"calibrate_on": [{"y": ROWS}]}, "[0]"),
    ({"placement": "forced"}, "placement='forced'"),
    ({"objective": "memory"}, "objective='memory'"),
    ({"budget": Budget(gradients=0.1)}, "training mode"),
    (metric(no_metric), "number"),
    (metric(nan_metric), "NaN"),
    (metric(broken_metric), "KeyError"),
]
"""Options beside a budget of 1 % and three batches, and what is said of them."""


@pytest.mark.parametrize(("options", "said"), WRONG)
def test_bad_input_changes_nothing(options: dict[str, Any], said: str) -> None:
    model = Net().eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    given = {"budget": "1%", "calibrate_on": batches(), **options}
    with pytest.raises(OptionError) as raised:
        autoamp.convert(model, **BF16, **given)
    says(raised, said)
    assert not autoamp.is_converted(model)
    assert "forward" not in vars(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_model_that_fp32_does_not_repeat() -> None:
    model = Drifting().eval()
    with pytest.raises(BudgetError):
        autoamp.convert(model, **BF16, budget=0.01, calibrate_on=batches())
    assert not autoamp.is_converted(model)


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"outputs": "-1%"},
        {"metric": square},
        {"at_most": 1},
        {"metric": 3, "at_most": 1},
        {"outputs": 1, "loss_fn": "mse"},
    ],
)
def test_a_budget_that_is_none(limits: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        Budget(**limits)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (0.25, (0.25, False)),
        ("0.1%", (0.001, False)),
        (" 2 % ", (0.02, False)),
        ("1e-3", (0.001, False)),
        ("autocast", (1.0, True)),
        ("0.3 autocast", (0.3, True)),
        ("0.3x autocast", (0.3, True)),
        ("2 * autocast's", (2.0, True)),
    ],
)
def test_limits_as_people_write_them(given: Any, wanted: tuple[float, bool]) -> None:
    assert parsed(given, "budget") == pytest.approx(wanted)


# -- models that are hard to differentiate ---------------------------------------------


class Asks(Net):
    """Asks whether its tensors have gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(32, 32).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.frozen(x)
        torch._dynamo.graph_break()
        hidden.requires_grad = True  # torch allows it of leaves alone
        return super().forward(hidden)


class Counts(Net):
    """Has an op that cannot be differentiated by an operand."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0 * torch.histc(x.detach(), bins=32)[:8]


@pytest.mark.parametrize("kind", [Asks, Counts])
def test_models_that_are_hard_to_differentiate(kind: type[Net]) -> None:
    model, data = kind().train(), batches()
    budget = Budget(outputs="0.7 autocast", loss_fn=square)
    autoamp.convert(model, **BF16, budget=budget, calibrate_on=data)
    model(data[0])
    ops = autoamp.report(model).ops
    assert any(op.is_low for op in ops)
    for op in ops:
        if op.module == "frozen":
            assert op.precision == "fp32"
            says(op.reason, "no derivative")


def test_each_conversion_reports_its_own_budget() -> None:
    """Both choose to run all ops low, and the errors of their batches differ."""
    data, found = batches(), []
    for budget, scale in (("90%", 1), ("80%", 3)):
        model = Net().eval()
        given = [scale * x for x in data]
        autoamp.convert(model, **BF16, budget=budget, calibrate_on=given)
        model(data[0])
        report = autoamp.report(model)
        assert report.frontier is not None
        found.append((report, report.frontier))
    (first, one), (second, other) = found
    assert [op.precision for op in first.ops] == [op.precision for op in second.ops]
    assert (one.budget, other.budget) == ("outputs 90%", "outputs 80%")
    assert one.checks != other.checks
