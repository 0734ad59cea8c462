"""`bench` answers in one sentence whether mixed precision helps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autoamp
from autoamp.tools.bench import Answer, Row
from tests.says import says

QUICK: dict[str, Any] = {
    "rounds": 5,
    "steps": 1,
    "ways": ("autoamp",),
    "inference": True,
}


def measured(model: nn.Module, x: torch.Tensor) -> Answer:
    return autoamp.bench(model, x, **QUICK).answer


def test_no_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoamp.compat.cpu_low_precision_units", dict)
    found = measured(nn.Linear(64, 64), torch.randn(64, 64))
    assert found.helps is not True
    says(found.sentence, "has no units that multiply bf16")
    says(found.sentence, "cuda:sm_80")


def test_noise_is_no_gain_where_nothing_runs_low(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("autoamp.compat.cpu_low_precision_units", dict)
    monkeypatch.setattr("autoamp.tools.bench.surely_less", lambda *_: True)
    found = measured(nn.Linear(64, 64), torch.randn(64, 64))
    assert found.helps is None
    assert found.sentence.startswith("no: this device")


@pytest.mark.usefixtures("bf16_units")
def test_already_half(monkeypatch: pytest.MonkeyPatch) -> None:
    # A busy machine may measure a gain where there is none.
    monkeypatch.setattr("autoamp.tools.bench.surely_less", lambda *_: False)
    model, x = nn.Linear(64, 64).bfloat16(), torch.randn(8, 64).bfloat16()
    found = autoamp.bench(model, x, **QUICK)
    says(found.answer.sentence, "weights are bf16 already")
    assert found.answer.helps is not True
    assert found.rows[0].way == "as it is"


def with_times(ratio: float, **given: Any) -> autoamp.Bench:
    """What `bench` would hold where autoamp takes `ratio` of fp32's time."""
    times = tuple(0.010 + 1e-5 * i for i in range(10))
    base = Row("fp32", "fp32", batch=8, flops=10**9, low_flops=0, times=times)
    base = replace(base, seconds=0.01, ratio=1.0, ratio_sigma=0.0)
    ours = replace(
        base,
        way="autoamp",
        kind="autoamp",
        seconds=0.01 * ratio,
        ratio=ratio,
        ratio_sigma=0.01,
        low_flops=10**9,
        times=tuple(ratio * each for each in times),
    )
    return autoamp.Bench(
        label="Net",
        device="NVIDIA A100",
        torch="2.13.0",
        precision="fp16",
        work="training",
        loss_from="",
        rows=(base, ours),
        rounds=10,
        interleaved=True,
        memory_how="",
        **given,
    )


@pytest.mark.parametrize(
    ("ratio", "helps", "start", "end"),
    [(0.71, True, "yes", ", and is 1.41 times as fast"), (1.2, False, "no", "")],
)
def test_the_answer_is_one_figure(
    ratio: float, helps: bool, start: str, end: str
) -> None:
    found = with_times(ratio).answer
    assert found.helps is helps
    figure = f"with autoamp a training step takes {ratio:.2f} of fp32's time (± 0.01)"
    assert found.sentence == f"{start}: {figure}{end}"


def test_times_that_are_alike_are_no_gain() -> None:
    bench = with_times(1.0)
    found = bench.answer
    assert found.helps is None
    assert found.sentence.startswith("no gain was measured: with autoamp")
    missing = replace(bench, rows=bench.rows[:1]).answer
    assert missing == Answer(None, "unknown: fp32 and autoamp were not both measured")


def test_a_reason_is_given_where_nothing_is_gained() -> None:
    assert "units" in with_times(1.2, no_gain="it has no units").answer.sentence
    assert "units" not in with_times(0.5, no_gain="it has no units").answer.sentence
