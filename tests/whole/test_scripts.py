"""Whole scripts that know nothing of autoamp, in fp32 and with the automatic mode.

Each file of `tests/scripts` is run as it is, and held against the same script in fp32
and under one plain `torch.autocast` around all of it; the work done in low precision is
held against the flops that the run in fp32 needs.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import autoamp
from tests.says import says
from tests.scripts import (
    LOW,
    SCRIPTS,
    Seen,
    autocast,
    flops_needed,
    in_a_process,
    ours,
    plain,
    run,
)
from tests.training.steps import assert_same

pytestmark = pytest.mark.usefixtures("one_thread")


def tolerance(name: str, curve: str, precision: str) -> float:
    """How far a curve may be from the one in fp32.

    Each layer rounds its input and its output, by half an eps at most, forward and
    backward: 4 * depth roundings, independent of each other, whose sum has a standard
    deviation below sqrt(4 * depth) * eps / 2.  Three of those are allowed.  That is the
    relative error of a result or of a gradient, to first order that of a loss and of
    how far it has fallen, both at most as large as the greatest value of the curve.

    Or three times the most that autocast was off at any step.  It too is only one draw
    of these roundings.  It is in bf16, fp16 needing a loss scale; to first order an
    error is proportional to eps.
    """
    # Nothing scales a loss under vmap: gradients have the range of bf16 there.
    low = torch.bfloat16 if name == "per_sample" else LOW[precision]
    eps = torch.finfo(low).eps
    exact, rough = plain(name).curves[curve], autocast(name).curves[curve]
    allowed = 3 * math.sqrt(SCRIPTS[name].depth) * eps * max(map(abs, exact))
    off = max(abs(a - b) for a, b in zip(rough, exact, strict=True))
    return max(allowed, 3 * off * eps / torch.finfo(torch.bfloat16).eps)


both = pytest.mark.parametrize("precision", list(LOW))
QUICK = ["accumulation-bf16", "gan-fp16", "offloaded-bf16"]
IN_CI = {"gpt-bf16", "wgan_gp-fp16", "lbfgs-fp16", "ema-fp16", "ragged-fp16"}
IN_CI |= {"per_sample-bf16", "threads-bf16", "compiled-bf16", "loader-bf16"}
IN_CI |= {"soft_prompt-bf16", "in_backward-fp16", "lstm-fp16", *QUICK}


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(*each, marks=[] if "-".join(each) in IN_CI else pytest.mark.slow)
        for each in itertools.product(SCRIPTS, LOW)
    ],
)
def test_a_script_trains_in_low_precision_as_in_fp32(name: str, precision: str) -> None:
    found = ours(name, precision)
    _learns(name, precision, found)
    _runs_low(name, found)
    _is_put_back(found, precision)
    # Nobody is warned who was not without us.
    assert found.warned <= plain(name).warned
    expected = SCRIPTS[name].expected
    assert [m for m in found.logged if not expected or expected not in m] == []


def _learns(name: str, precision: str, found: Seen) -> None:
    """At every step of every curve, but for steps skipped to find the loss scale."""
    losses = plain(name).curves["losses"]
    if SCRIPTS[name].learns:  # else a run that learns nothing would pass as well
        fall = abs(losses[0] - losses[-1])
        assert tolerance(name, "losses", precision) < fall / 2
    for curve, exact in plain(name, left_out=found.skipped).curves.items():
        allowed = tolerance(name, curve, precision)
        assert found.curves[curve] == pytest.approx(exact, rel=0, abs=allowed), curve
    assert found.curves != plain(name).curves
    # A scale that is within four times of the largest meets a larger gradient later.
    assert len(found.skips) <= 2


def _runs_low(name: str, found: Seen) -> None:
    coverages = [report["coverage"] for report in found.reports]
    if name == "per_sample":
        assert not coverages
        says(found.logged, "torch.autocast", "vmap")
        return
    assert found.models
    assert not any(coverage["calls_aside"] for coverage in coverages if coverage)
    assert 0.95 <= found.low_flops / flops_needed(name) <= 1.05


def _is_put_back(found: Seen, precision: str) -> None:
    params = [p.detach() for p in found.result["params"]]
    assert {p.dtype for p in params} == {torch.float32}
    # And no values of the low precision in tensors of fp32.
    weights = [p for p in params if p.ndim > 1]
    assert [w for w in weights if torch.equal(w, w.to(LOW[precision]).float())] == []
    for model in found.models:
        assert not any(map(autoamp.is_converted, model.modules()))
        assert "forward" not in vars(model)


def test_averaged_weights_are_met_through_data() -> None:
    """Were they not, copies in low precision would go stale, and that would be seen."""
    curves = plain("ema").curves
    pairs = zip(curves["averaged"], curves["trained"], strict=True)
    most = max(abs(a - b) for a, b in pairs)
    assert most > 2 * max(tolerance("ema", "averaged", p) for p in LOW)


def test_eight_threads_get_what_one_gets() -> None:
    assert plain("threads").result["same"]
    assert ours("threads", "bf16").result["same"]


@both
def test_a_script_with_autocast_of_its_own_is_left_alone(precision: str) -> None:
    expected = run("own_autocast", precision)
    found = run("own_autocast", precision, precision=precision)
    assert_same(found.result, expected.result)
    assert found.models == []
    assert found.warned <= expected.warned
    assert found.logged == []


@pytest.mark.slow
@both
def test_what_inductor_compiles_is_rewritten_first(precision: str) -> None:
    expected = run("compiled", "inductor")
    found = run("compiled", "inductor", precision=precision)
    _learns("compiled", precision, found)
    _runs_low("compiled", found)
    assert found.warned <= expected.warned
    assert found.logged == []


def test_flops_are_those_of_the_lengths_that_came(automatic: None) -> None:
    model, lengths = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), (2, 3, 1000)
    for length in lengths:
        model(torch.randn(length, 8))
    assert autoamp.report(model).coverage.flops == 2 * 8 * 8 * sum(lengths)


# -- by the environment alone ----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(
            *each, marks=[] if each == ("loader", "bf16") else pytest.mark.slow
        )
        for each in itertools.product(SCRIPTS, LOW)
    ],
)
def test_the_environment_alone_does_it(
    name: str, precision: str, tmp_path: Path
) -> None:
    """It comes out as in `ours`, to the last bit."""
    found = in_a_process(name, SCRIPTS[name].arguments, precision, tmp_path)
    assert found.curves == ours(name, precision).curves
    assert found.result["dtypes"] == ["torch.float32"]
    assert found.warned == set()
    assert found.low_flops == ours(name, precision).low_flops


# -- a checkpoint, and another process that goes on from it ----------------------------


def resumed(precision: str, folder: Path) -> tuple[list[float], Path]:
    """The losses here and in a process that goes on from here; their checkpoint."""
    checkpoint = folder / "checkpoint.pt"
    first = run("resume", str(checkpoint), precision=precision)
    then = in_a_process("resume", (str(checkpoint),), precision, folder)
    for found, start in ((first, 0), (then, 10)):
        assert found.warned == set()
        assert found.result["start"] == start
        (report,) = found.reports
        assert report["coverage"]["share_of_flops"] == 1
        assert report["skipped"] == []
    assert {p.dtype for p in first.result["params"]} == {torch.float32}
    assert then.result["dtypes"] == ["torch.float32"]
    return first.curves["losses"] + then.curves["losses"], checkpoint


def in_fp32(checkpoint: Path) -> list[float]:
    return run("resume", str(checkpoint)).curves["losses"]


@pytest.mark.parametrize(
    "precision", ["fp16", pytest.param("bf16", marks=pytest.mark.slow)]
)
def test_a_checkpoint_is_gone_on_from(precision: str, tmp_path: Path) -> None:
    losses, checkpoint = resumed(precision, tmp_path)
    exact = [x for _ in range(3) for x in in_fp32(tmp_path / "exact.pt")]
    # As in `tolerance`, for two layers.
    allowed = 3 * math.sqrt(2) * torch.finfo(LOW[precision]).eps * max(exact)
    assert losses == pytest.approx(exact[:20], rel=0, abs=allowed)
    assert losses != exact[:20]
    # Begun anew instead, the second ten would be the first of these, at other batches.
    assert max(exact[:3]) - max(exact[10:13]) > 2 * allowed
    saved = torch.load(checkpoint, weights_only=True)
    assert {w.dtype for w in saved["model"].values()} == {torch.float32}
    assert {int(s["step"]) for s in saved["optimizer"]["state"].values()} == {20}
    # Plain torch goes on from it as well.
    assert in_fp32(checkpoint) == pytest.approx(exact[20:], rel=0, abs=allowed)
