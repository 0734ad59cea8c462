"""The training curves come out and fall; their figures are not judged here."""

from __future__ import annotations

import json
import math

import pytest
import torch

from benchmarks import curves
from benchmarks.curves import Chars, Digits

pytestmark = pytest.mark.usefixtures("one_thread")

MODES = {mode.name: mode for mode in curves.MODES}


@pytest.mark.slow
def test_the_command_writes_a_table_and_curves_that_fall(tmp_path, capsys) -> None:
    arguments = ["--quick", "--seeds", "1", "--processes", "1"]
    arguments += ["--modes", "autoamp bf16"]
    assert curves.main([*arguments, "--out", str(tmp_path)]) == 0
    text = (tmp_path / "curves-quick.md").read_text()
    assert text in capsys.readouterr().out
    found = json.loads((tmp_path / "curves-quick.json").read_text())["results"]
    names = [(result["task"], result["mode"]) for result in found]
    assert names == [
        (task, mode)
        for task in ("digits", "chars")
        for mode in ("fp32", "autoamp bf16")
    ]
    for result in found:
        assert f"| {result['mode']} |" in " ".join(text.split())
        (run,) = result["runs"]
        assert run["curve"][-1] < 0.9 * run["curve"][0]
        assert run["skipped_steps"] == []
    assert found[0]["runs"][0]["curve"] != found[1]["runs"][0]["curve"]


def test_modes_start_alike_and_runs_repeat() -> None:
    task = Digits(10)
    first, again = (curves.train(task, MODES["fp32"], 3) for _ in range(2))
    nudged = curves.train(task, MODES["fp32 nudged"], 3)
    other = curves.train(task, MODES["fp32"], 4)
    assert first == again
    assert nudged["curve"] == pytest.approx(first["curve"], abs=1e-3)
    assert other["curve"] != pytest.approx(first["curve"], abs=1e-3)
    weights = [task.start(3, nudge)[0].weight for nudge in (0.0, 1e-6)]
    assert not torch.equal(*weights)


def test_a_skipped_step_is_counted(monkeypatch) -> None:
    task = Digits(10)
    model = task.start(0)
    stepper = curves.Stepper(task, MODES["autocast fp16"], model)
    before = model[0].weight.detach().clone()
    inputs, targets = next(task.batches(torch.Generator()))
    loss = curves.mean_loss(model(inputs), targets)
    assert stepper.step(loss * math.inf)
    assert torch.equal(model[0].weight, before)
    assert stepper.loss_scale() == 32768
    assert not stepper.step(curves.mean_loss(model(inputs), targets))
    assert not torch.equal(model[0].weight, before)


def runs(*metrics: float) -> list[dict[str, object]]:
    """What `train` returns, as far as it is judged."""
    rest = {"metric_in_fp32": 0.0, "curve": [1.0], "skipped_steps": []}
    return [{"metric": metric, **rest} for metric in metrics]


def test_the_difference_is_paired_and_has_a_standard_error() -> None:
    digits = curves.summary(Digits(1), runs(97.0, 99.0), runs(96.0, 96.0))
    assert digits["difference_mean"] == 2.0
    assert digits["difference_standard_error"] == pytest.approx(1.0)
    chars = curves.summary(Chars(1), runs(2.02, 1.0), runs(2.0, 1.0))
    assert chars["difference_mean"] == pytest.approx(0.5)
    assert chars["difference_standard_error"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("metrics", "within", "text"),
    [
        ((97.2, 96.2), True, "+0.20 ± 0.00 points, within 0.5"),
        ((98.0, 95.8), True, "within 0.5, by less than two standard errors"),
        ((97.7, 96.7), False, "NOT within 0.5"),
        ((math.nan, 96.0), False, "NOT within 0.5"),
    ],
)
def test_the_verdict(metrics: tuple[float, ...], within: bool, text: str) -> None:
    task = Digits(1)
    found = curves.summary(task, runs(*metrics), runs(97.0, 96.0))
    verdict, line = curves.verdict(task, MODES["autoamp bf16"], found)
    assert verdict is within
    assert text in line


def test_a_failing_run_is_told() -> None:
    task = Digits(1)
    failed = [*runs(97.0), {"failed": "RuntimeError: no such thing"}]
    found = curves.summary(task, failed, runs(97.0, 96.0))
    mode = MODES["autoamp fp16"]
    assert "failed" in curves.row(task, mode, found)
    assert len(curves.row(task, mode, found)) == len(curves.HEADER)
    assert curves.verdict(task, mode, found) == (
        False,
        "digits, autoamp fp16: failed, RuntimeError: no such thing",
    )


def test_the_learning_rate_rises_and_falls_to_nothing() -> None:
    task = Chars(1000)
    rates = [task.rate(step) for step in range(1001)]
    assert max(rates) == rates[task.warmup] == 1
    assert rates[0] == 1 / task.warmup
    assert rates[1000] == 0


def test_an_unknown_mode_is_an_error(capsys) -> None:
    with pytest.raises(SystemExit):
        curves.main(["--modes", "fp33"])
    assert "fp33" in capsys.readouterr().err
