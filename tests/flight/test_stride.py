"""How far apart steps are noted, and what a recorder still sees between them."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch

import autoamp
from autoamp.flight import folder, recorder, stride
from autoamp.flight.stride import MOST, Stride
from tests.flight.test_loops import deaths_of, net, steps_of, train
from tests.small_models import BF16


def run(chosen: Stride, steps: int, whole: float, noted: float, light: float) -> int:
    """Steps of known length; how many of them were noted."""
    now, count = 0.0, 0
    for step in range(1, steps + 1):
        notes = chosen.notes(step)
        chosen.own = noted if notes else light
        now += whole + chosen.own
        chosen.stepped(now, noted=notes)
        count += notes
    return count


@pytest.mark.parametrize(
    ("whole", "noted", "light", "every"),
    [
        (100e-3, 300e-6, 30e-6, 1),  # 0.3 %
        (10e-3, 300e-6, 30e-6, 2),  # 3 %
        (2e-3, 300e-6, 30e-6, 32),
        (1e-3, 300e-6, 30e-6, MOST),  # 3 % without any record
    ],
)
def test_the_distance_keeps_the_share(
    whole: float, noted: float, light: float, every: int
) -> None:
    chosen = Stride()
    count = run(chosen, 2000, whole, noted, light)
    assert chosen.every == every
    if every < MOST:
        cost = count * noted + (2000 - count) * light
        assert cost <= 1.1 * stride.SHARE * 2000 * whole


def test_a_training_that_gets_slower_is_noted_more_often() -> None:
    chosen = Stride()
    run(chosen, 500, 2e-3, 300e-6, 30e-6)
    assert chosen.every > 8
    run(chosen, 3000, 1.0, 300e-6, 30e-6)
    assert chosen.every == 1


def test_one_slow_step_changes_nothing() -> None:
    chosen = Stride()
    run(chosen, 50, 100e-3, 300e-6, 30e-6)
    run(chosen, 1, 1e-3, 50e-3, 50e-3)
    run(chosen, 50, 100e-3, 300e-6, 30e-6)
    assert chosen.every == 1


class Apart(Stride):
    """Notes every eighth step, whatever was measured."""

    def __init__(self, *, fixed: bool = False) -> None:
        super().__init__(fixed=True)
        self.every = 8


@pytest.fixture
def apart(monkeypatch) -> None:
    monkeypatch.delenv(recorder.EVERY)
    monkeypatch.setattr(recorder, "Stride", Apart)


@pytest.mark.usefixtures("apart")
def test_a_reader_knows_how_far_apart_records_are(tmp_path: Path) -> None:
    train(autoamp.convert(net(), **BF16, record=tmp_path), 20)
    (found,) = folder.rings(tmp_path)
    assert [(r["step"], r["every"]) for r in steps_of(found)] == [
        (1, 8),
        (8, 8),
        (16, 8),
    ]
    assert all(r["result"] > 0 and r["loss"] > 0 for r in steps_of(found))


@pytest.mark.usefixtures("apart")
def test_a_death_between_records_is_saved(tmp_path: Path) -> None:
    random.seed(5)
    train(autoamp.convert(net(), **BF16, record=tmp_path), 7, bad=4)
    (found,) = folder.rings(tmp_path)
    assert [(r["step"], r["taken"]) for r in steps_of(found)] == [(1, True), (5, False)]
    (death,) = deaths_of(tmp_path)
    assert (death["cause"], death["step"]) == ("loss", 5)
    (call,) = death["calls"]
    assert call["python_rng_of"] == "death"
    assert call["python_rng"][1] == [*random.getstate()[1]]


@pytest.mark.usefixtures("apart")
def test_three_skips_between_records_are_a_death(tmp_path: Path) -> None:
    model = autoamp.convert(net(), **BF16, record=tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(6):
        optimizer.zero_grad()
        out = model(torch.ones(2, 8))
        if step >= 2:
            out.register_hook(lambda grad: grad * math.inf)
        out.sum().backward()
        optimizer.step()
    (death,) = deaths_of(tmp_path)
    assert (death["cause"], death["step"]) == ("skips", 5)


def test_many_calls_without_a_step_are_not_kept(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(recorder, "_MOST_CALLS", 4)
    model = autoamp.convert(net(), **BF16, record=tmp_path)
    for _ in range(9):
        model(torch.ones(2, 8)).sum().backward()
    assert len(model._autoamp.call.told.calls) == 4
