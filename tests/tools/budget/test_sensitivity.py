"""What a rounding is predicted to do is what the rounding does, op by op."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoamp.training.options import Options
from tests.tools.budget.door import (
    Budget,
    Calibration,
    Scene,
    Squares,
    errors_of,
    examined,
)

BF16, FP16 = torch.bfloat16, torch.float16

Loss = Callable[[Any], Tensor]


def mean_square(output: Tensor) -> Tensor:
    return (output - 0.3).square().mean()


def drawn(*parts: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    for part in parts:
        for parameter in part.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.2)
    return nn.Sequential(*parts)


class Region(nn.Module):
    """A checkpointed region between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        def region(y: Tensor) -> Tensor:
            return torch.tanh(self.first(y))

        return self.last(checkpoint(region, x, use_reentrant=False))


class Branch(nn.Module):
    """A graph break between two layers, and one layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.last(torch.tanh(self.last(hidden)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).view(4, 6, 3, 8).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        found = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o(found.transpose(1, 2).reshape(4, 6, 24))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linears": (
        lambda: drawn(nn.Linear(24, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8)),
        (16, 24),
    ),
    "convolutions": (
        lambda: drawn(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 4, 3)
        ),
        (4, 3, 10, 10),
    ),
    "a checkpointed region": (lambda: drawn(Region()), (16, 24)),
    "a graph break": (lambda: drawn(Branch()), (16, 24)),
    "attention": (lambda: drawn(Attention()), (4, 6, 24)),
}


class Study:
    """The predictions for one model, and the means to check each."""

    def __init__(self, bench: Calibration, budget: Budget) -> None:
        self.bench, self.budget = bench, budget
        found = {measure: Squares(bench.engine.record.low) for measure in budget.limits}
        runs = bench.counted()
        bench.learn(found, seed=3)
        records = [(p.rewritten, runs[p]) for p in runs if p.rewritten is not None]
        self.scene = Scene(records, found, bench.engine.options)
        self.exact = bench.exact()
        bench.find_scale(bench.placed)

    def predicted(self, labels: dict[str, frozenset[str]]) -> dict[str, float]:
        return {m: math.sqrt(s) for m, s in self.scene.squares(labels).items()}

    def true(self, labels: dict[str, frozenset[str]]) -> dict[str, float]:
        found = self.bench.placed(self.scene.chosen(labels))
        return errors_of(self.budget, found, self.exact)


def studied(
    model: nn.Module, x: Tensor, low: torch.dtype, check: Callable[[Study], None]
) -> None:
    budget = Budget(outputs=1.0, gradients=1.0 if model.training else None)
    options = Options(precision=low, do_no_harm=False)
    with examined(model, options, low) as (twin, engine):
        bench = Calibration(
            twin, engine, ((x,), {}), mean_square, trains=model.training
        )
        check(Study(bench, budget))


def alone(study: Study) -> list[dict[str, frozenset[str]]]:
    """Placements in which one op, that is allowed low, is low by itself."""
    found = []
    for part in study.scene.parts:
        for name in part.keys:
            if name in part.problem.at_sink or name not in part.problem.unary:
                continue
            if part.record.classified.is_allowed(name):
                found.append({**study.scene.nothing, part.name: frozenset({name})})
    return found


@pytest.mark.parametrize(
    "low", [BF16, pytest.param(FP16, marks=pytest.mark.slow)], ids=["bf16", "fp16"]
)
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_each_op_by_itself(name: str, trains: bool, low: torch.dtype) -> None:
    build, shape = MODELS[name]

    def check(study: Study) -> None:
        ways = alone(study)
        assert len(ways) >= 2
        for labels in ways:
            predicted, true = study.predicted(labels), study.true(labels)
            for measure, error in true.items():
                assert 0.5 * error <= predicted[measure] <= 2 * error, (labels, measure)

    studied(build().train(trains), torch.randn(shape), low, check)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_all_ops_together(name: str) -> None:
    build, shape = MODELS[name]

    def check(study: Study) -> None:
        labels = study.scene.everything
        predicted, true = study.predicted(dict(labels)), study.true(dict(labels))
        for measure, error in true.items():
            assert 0.5 * error <= predicted[measure] <= 2 * error

    studied(build().train(), torch.randn(shape), BF16, check)


def test_ops_that_round_nothing_add_nothing() -> None:
    """A ReLU, a view and a maximum of rounded numbers are rounded already."""

    class Moves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 16), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).relu().view(-1, 8, 2).amax(-1))

    def check(study: Study) -> None:
        (part,) = study.scene.parts
        ops = {n: k.op for n, k in part.keys.items()}
        quiet = [n for n, op in ops.items() if op in {"aten::relu", "aten::view"}]
        assert len(quiet) == 2
        for name in quiet:
            assert part.own[name].get("outputs", 0.0) == 0.0
        assert part.own["linear"]["outputs"] > 0

    studied(Moves().eval(), torch.randn(8, 16), BF16, check)


def test_a_number_that_leaves_the_range_keeps_its_op_in_fp32() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.large(x * 1e4) * 1e-4)

    torch.manual_seed(0)
    model = Large().eval()
    nn.init.normal_(model.large.weight, std=10.0)

    def check(study: Study) -> None:
        (part,) = study.scene.parts
        large = next(n for n, k in part.keys.items() if k.module == "large")
        assert "leave the range" in part.problem.at_sink[large]
        assert large not in study.scene.everything[part.name]

    studied(model, torch.randn(8, 16), FP16, check)


def test_a_mask_of_the_least_number_is_no_error() -> None:
    """Rounded to bf16 it is an infinity, but no gradient flows to it."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.o = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.q(x) @ x.transpose(-1, -2)
            mask = torch.zeros(8, 8).masked_fill(
                torch.ones(8, 8).triu(1).bool(), torch.finfo(torch.float32).min
            )
            return self.o((scores + mask).softmax(-1) @ x)

    def check(study: Study) -> None:
        error = study.predicted(dict(study.scene.everything))["outputs"]
        assert 0 < error < 0.1

    studied(Masked().train(), torch.randn(2, 8, 16), BF16, check)


def test_the_model_is_not_touched() -> None:
    build, shape = MODELS["convolutions"]
    model = build().train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    drawn_before = torch.get_rng_state()
    studied(model, torch.ones(shape), BF16, lambda _: None)
    assert torch.equal(torch.get_rng_state(), drawn_before)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is None for p in model.parameters())
