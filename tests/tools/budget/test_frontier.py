"""The frontier beside a greedy search, which measures every placement that it tries."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from autoamp.training.options import Options
from tests.tools.budget.door import (
    Calibration,
    Found,
    Heard,
    Scene,
    Squares,
    examined,
    relative_error,
)

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


def greedy(scene: Scene, bench: Calibration, exact: Heard) -> Curve:
    """Flips the op to fp32 that lessens the measured error most, and repeats."""
    low = scene.at(0.0)
    curve = [(low.nanoseconds, error_of(scene, bench, exact, low))]
    kept: dict[str, list[str]] = {part.name: [] for part in scene.parts}
    while True:
        tries = []
        for part in scene.parts:
            ops = filter(part.record.classified.is_allowed, low.labels[part.name])
            for name in ops:
                there = {**kept, part.name: [*kept[part.name], name]}
                found = scene.at(0.0, there)
                tries.append((error_of(scene, bench, exact, found), there, found))
        if not tries:
            return curve
        error, kept, low = min(tries, key=lambda each: each[0])
        curve.append((low.nanoseconds, error))


def error_of(scene: Scene, bench: Calibration, exact: Heard, found: Found) -> float:
    placed = bench.placed(scene.chosen(found.labels))
    return relative_error(placed.output, exact.output)


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
        found = {"outputs": Squares(BF16)}
        bench.learn(found)
        records = [(p.rewritten, runs[p]) for p in runs if p.rewritten is not None]
        scene = Scene(records, found, options)
        exact = bench.exact()
        steps = greedy(scene, bench, exact)
        corners = scene.frontier({"outputs": 1e-3})
        points = [*corners]
        for pair in pairwise(corners):
            points += scene.between(*pair)
        curve = [(p.nanoseconds, error_of(scene, bench, exact, p)) for p in points]
    assert len(steps) >= 6
    assert len(points) >= 5
    for time, error in steps:
        # The measured error of one draw of data differs from the predicted one.
        assert time_within(curve, 1.1 * error) <= time
