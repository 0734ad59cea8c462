"""`bench` answers with the reason that holds, on ten prepared cases and their like."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp.passes.decide.devices import named_device
from autoamp.tools.bench_answer import Answer, Evidence, Row, evidence_from
from tests.says import says

QUICK: dict[str, Any] = {"rounds": 5, "steps": 1, "ways": ("autoamp",)}
BF16 = torch.bfloat16


def layers(width: int = 16, depth: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    every = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
    return nn.Sequential(*every)


def measured(model: nn.Module, *args: Tensor, **given: Any) -> Answer:
    return autoamp.bench(model, *args, **{**QUICK, **given}).answer


# -- measured here ---------------------------------------------------------------------


@pytest.mark.usefixtures("bf16_units")
def test_input_bound() -> None:
    class Slow:
        def __iter__(self) -> Iterator[Tensor]:
            for _ in range(3):
                time.sleep(0.1)  # several times a step, also on a busy machine
                yield torch.randn(4, 16)

    found = measured(layers(), torch.randn(4, 16), data=Slow())
    says(found.sentence, "of a step in fp32 is the wait for data")
    says(found.sentence, "num_workers")
    assert found.helps is not True


@pytest.mark.usefixtures("bf16_units")
def test_tiny_model() -> None:
    found = measured(layers(), torch.randn(2, 16), inference=True)
    assert found.helps is not True
    says(found.sentence, "its matrices are too small")


@pytest.mark.usefixtures("bf16_units")
def test_launch_bound() -> None:
    found = measured(layers(8, depth=60), torch.randn(2, 8), inference=True)
    assert found.helps is not True
    says(found.sentence, "time to start its 120 ops")


def test_no_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoamp.compat.cpu_low_precision_units", dict)
    found = measured(layers(64), torch.randn(64, 64), inference=True)
    assert found.helps is not True
    says(found.sentence, "has no units that multiply bf16")
    says(found.sentence, "cuda:sm_80")


def test_noise_is_no_gain_where_nothing_runs_low(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("autoamp.compat.cpu_low_precision_units", dict)
    monkeypatch.setattr("autoamp.tools.bench_answer.surely_less", lambda *_: True)
    found = measured(layers(64), torch.randn(64, 64), inference=True)
    assert found.helps is None
    assert found.sentence.startswith("no: this device")


@pytest.mark.usefixtures("bf16_units")
def test_already_half() -> None:
    model, x = layers(64).to(BF16), torch.randn(8, 64, dtype=BF16)
    found = autoamp.bench(model, x, inference=True, **QUICK)
    says(found.answer.sentence, "weights are bf16 already")
    assert found.answer.helps is not True
    assert found.rows[0].way == "as it is"


@pytest.mark.usefixtures("bf16_units")
@pytest.mark.parametrize("rules", [{"keep": ["0", "1"]}, {"deny": ["linear", "relu"]}])
def test_all_fp32_rules(rules: dict[str, list[str]]) -> None:
    found = measured(layers(64), torch.randn(64, 64), inference=True, **rules)
    assert found.helps is not True
    says(found.sentence, "rules keep 100% of the predicted time in fp32")


# -- as a GPU would measure it ---------------------------------------------------------


def on_a_gpu(model: nn.Module, x: Tensor, ratio: float, **rows: Any) -> autoamp.Bench:
    """What `bench` would hold on a GPU where autoamp takes `ratio` of fp32's time.

    The evidence is that of the model's own report for an A100; the times are given.
    """
    report = autoamp.explain(model, x, device="cuda:sm_80")
    evidence = evidence_from(report, named_device("cuda:sm_80", torch.float16))
    return with_times(evidence, ratio, **rows)


def with_times(evidence: Evidence | None, ratio: float, **rows: Any) -> autoamp.Bench:
    flops, low = 10**9, 10**9 if evidence is None or evidence.low_ops else 0
    base = Row("fp32", "fp32", batch=8, flops=flops, low_flops=0, moved=100, **rows)
    times = tuple(0.010 + 1e-5 * i for i in range(10))
    base = replace(base, seconds=0.01, ratio=1.0, ratio_sigma=0.0, times=times)
    ours = replace(
        base,
        way="autoamp",
        kind="autoamp",
        seconds=0.01 * ratio,
        ratio=ratio,
        ratio_sigma=0.01,
        low_flops=low,
        moved=55,
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
        energy_how="",
        evidence=evidence,
    )


def test_memory_bound() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            for _ in range(6):
                x = (x * 2 + x).relu()
            return x

    found = on_a_gpu(Sums(), torch.randn(100_000, 16), 0.6).answer
    assert found.helps is True
    says(found.sentence, "most of its time goes to moving memory")
    says(found.sentence, "0.55 of fp32's bytes")
    missed = on_a_gpu(Sums(), torch.randn(100_000, 16), 1.2).answer
    assert missed.helps is False
    assert "--compile" in missed.sentence


def test_compute_bound() -> None:
    found = on_a_gpu(layers(1024), torch.randn(4096, 1024), 0.3).answer
    assert found.helps is True
    says(found.sentence, "arithmetic of matrix products")
    says(found.sentence, "100% of their flops run in fp16")


def test_odd_dimensions() -> None:
    found = on_a_gpu(layers(1001), torch.randn(4096, 1001), 0.8).answer
    assert found.helps is True
    says(found.sentence, "Pad 1,001 in")
    says(found.sentence, "to 1,008")


def test_everything_good() -> None:
    found = on_a_gpu(layers(1024), torch.randn(4096, 1024), 0.3).answer
    assert found.sentence.startswith(
        "yes: with autoamp a training step takes 0.30 of fp32's time"
    )
    for word in ("Pad", "rules", "small", "wait", "units", "already"):
        assert word not in found.sentence


# -- which reason goes first -----------------------------------------------------------


def test_a_batch_that_pays_is_computed_from_two_batches() -> None:
    bench = with_times(Evidence(True, "A100", float_ops=9), 1.0)
    base, ours = bench.rows
    # fp32 lasts 9 ms and 0.125 ms a sample, autoamp 9.6 ms and 0.05 ms a sample.
    base = replace(base, growth=1.1)
    ours = replace(ours, growth=0.0104 / min(ours.times))
    found = replace(bench, rows=(base, ours)).answer
    # 9.6 + 0.05 b <= 0.9 (9 + 0.125 b) from b = 24 on; batches are doubled from 8.
    says(found.sentence, "90% of a step in fp32 is the same for twice the batch")
    says(found.sentence, "from batch 32 on it should pay")


def test_a_step_that_never_pays_says_so() -> None:
    bench = with_times(Evidence(True, "A100", float_ops=9), 1.0)
    rows = tuple(replace(row, growth=0.011 / min(row.times)) for row in bench.rows)
    found = replace(bench, rows=rows).answer
    says(found.sentence, "a larger batch would not help")


def test_a_step_that_grows_with_the_batch_is_not_called_small() -> None:
    bench = with_times(Evidence(True, "A100", float_ops=9), 1.0)
    rows = tuple(replace(row, growth=0.0195 / min(row.times)) for row in bench.rows)
    assert "too small" not in replace(bench, rows=rows).answer.sentence


def test_a_wrong_prediction_leads_to_calibrate() -> None:
    evidence = Evidence(True, "A100", float_ops=9, low_ops=9, speed_up=2.5)
    found = with_times(evidence, 1.2).answer
    assert found.helps is False
    says(found.sentence, "by prediction it should be 2.50 times as fast")
    says(found.sentence, "autoamp calibrate")


def test_no_reason_is_better_than_a_wrong_one() -> None:
    found = with_times(None, 0.5).answer
    assert found.sentence == (
        "yes: with autoamp a training step takes 0.50 of fp32's time (± 0.01)"
    )
