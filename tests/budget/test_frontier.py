"""The frontier beside a greedy search, which measures every placement that it tries."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from autoamp.ask.examine import examined
from autoamp.budget.budget import Budget
from autoamp.budget.search import Labels, Scene, Search, scene_of
from autoamp.budget.sensitivity import Rounding, Squares
from autoamp.budget.trial import Calibration, Judge
from autoamp.options import Options

BF16 = torch.bfloat16

Curve = list[tuple[float, float]]
"""Predicted nanoseconds and measured error, placement by placement."""


class Layers(nn.Module):
    """Residual layers whose roundings weigh differently."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.scales = torch.rand(6).tolist()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in self.scales)
        self.head = nn.Linear(48, 8)

    def forward(self, x: Tensor) -> Tensor:
        for scale, layer in zip(self.scales, self.layers, strict=True):
            x = x + scale * torch.tanh(layer(x))
        return self.head(x)


def greedy(scene: Scene, judge: Judge, exact: object) -> Curve:
    """Flips the op to fp32 that lessens the measured error most, and repeats."""
    low: Labels = scene.solved({})
    curve = [(scene.nanoseconds(low), error_of(scene, judge, exact, low))]
    while True:
        tries = []
        for part in scene.parts:
            allowed = filter(part.record.classified.is_allowed, low[part.name])
            for name in allowed:
                kept = {n for n in part.keys if n not in low[part.name]} & set(
                    part.problem.unary
                )
                there = part.solved({}, [*kept, name])
                labels = {**low, part.name: there}
                tries.append((error_of(scene, judge, exact, labels), labels))
        if not tries:
            return curve
        error, low = min(tries, key=lambda each: each[0])
        curve.append((scene.nanoseconds(low), error))


def error_of(scene: Scene, judge: Judge, exact: object, labels: Labels) -> float:
    found = judge.placed(scene.chosen(labels))
    return judge.errors(found, exact)["outputs"]  # type: ignore[arg-type]


def time_within(curve: Curve, error: float) -> float:
    """The least time of a placement whose error is at most `error`."""
    return min(time for time, its in curve if its <= error)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_no_greedy_placement_is_faster_at_equal_error(seed: int) -> None:
    model, x = Layers(seed).eval(), torch.randn(64, 48)
    options = Options(precision="bf16", do_no_harm=False)
    with examined(copy.deepcopy(model), options, BF16) as (twin, engine):
        bench = Calibration(twin, engine, ((x,), {}), None, trains=False)
        runs = bench.counted()
        found = {"outputs": Squares()}
        bench.learn(Rounding(BF16, found), None, seed=0)
        records = [(p.rewritten, runs[p]) for p in runs if p.rewritten is not None]
        scene = scene_of(records, found, options)
        judge = Judge(bench, Budget(outputs=1.0), ["outputs"])
        exact = judge.exact()
        steps = greedy(scene, judge, exact)
        points = Search(scene, {"outputs": 1e-3}).frontier()
        curve = [
            (p.nanoseconds, error_of(scene, judge, exact, p.labels)) for p in points
        ]
    assert len(steps) >= 6
    assert len(points) >= 5
    for time, error in steps:
        # The measured error of one draw of data differs from the predicted one.
        assert time_within(curve, 1.1 * error) <= time
