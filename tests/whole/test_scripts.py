"""Whole scripts that know nothing of autoamp, in fp32 and with the automatic mode.

Each file of `tests/scripts` is run as it is, and held against the same script in fp32
and under one plain `torch.autocast` around all of it; the work done in low precision is
held against the flops that the run in fp32 needs.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import autoamp
from tests.scripts import (
    LOW,
    SCRIPTS,
    Seen,
    autocast,
    automatic,
    flops_needed,
    in_a_process,
    ours,
    plain,
    run,
)
from tests.training.steps import assert_same


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


def assert_near(name: str, precision: str, found: Seen) -> None:
    """At every step of every curve, but for steps skipped to find the loss scale."""
    for curve, exact in plain(name, left_out=found.skipped).curves.items():
        allowed = tolerance(name, curve, precision)
        assert found.curves[curve] == pytest.approx(exact, rel=0, abs=allowed), curve


pytestmark = pytest.mark.usefixtures("one_thread")

both = pytest.mark.parametrize("precision", list(LOW))
every = pytest.mark.parametrize("name", list(SCRIPTS))

QUICK_IN_BOTH = {"gpt", "accumulation", "gan", "lstm"}
QUICK_IN_FP16 = {"wgan_gp", "lbfgs", "ema", "ragged"}


def is_quick(name: str, precision: str) -> bool:
    return name in QUICK_IN_BOTH or (precision == "fp16") == (name in QUICK_IN_FP16)


QUICK = ["accumulation-bf16", "gan-fp16", "lstm-fp16"]
"""The runs that are made in the quick tests.  All tests of a run share it."""

every_in_both = pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(*run, marks=[] if is_quick(*run) else [pytest.mark.slow])
        for run in itertools.product(SCRIPTS, LOW)
    ],
)


@pytest.mark.thorough(but=QUICK)
@every_in_both
def test_it_trains_as_in_fp32(name: str, precision: str) -> None:
    losses = plain(name).curves["losses"]
    if SCRIPTS[name].learns:  # else a run that learns nothing would pass as well
        fall = abs(losses[0] - losses[-1])
        assert tolerance(name, "losses", precision) < fall / 2
    found = ours(name, precision)
    assert_near(name, precision, found)
    assert found.curves != plain(name).curves
    # A scale that is within four times of the largest meets a larger gradient later.
    assert len(found.skips) <= 2


@pytest.mark.thorough(but=QUICK)
@every_in_both
def test_the_work_is_done_in_low_precision(name: str, precision: str) -> None:
    found = ours(name, precision)
    if name == "per_sample":
        ((_, report),) = found.models
        ((_, why),) = report.skipped
        assert "under torch.autocast" in why
        assert "because of vmap" in why
        assert report.coverage.calls_aside == report.coverage.calls > 0
        return
    assert found.models
    for _, report in found.models:
        assert report.coverage is None or report.coverage.calls_aside == 0
    assert 0.95 <= found.low_flops / flops_needed(name) <= 1.05


@pytest.mark.thorough(but=QUICK)
@every_in_both
def test_it_is_all_put_back(name: str, precision: str) -> None:
    found = ours(name, precision)
    params = [p.detach() for p in found.result["params"]]
    assert {p.dtype for p in params} == {torch.float32}
    # And no values of the low precision in tensors of fp32.
    weights = [p for p in params if p.ndim > 1]
    assert [w for w in weights if torch.equal(w, w.to(LOW[precision]).float())] == []
    for model, _ in found.models:
        assert not any(map(autoamp.is_converted, model.modules()))
        assert "forward" not in vars(model)


@pytest.mark.thorough(but=QUICK)
@every_in_both
def test_nobody_is_warned(name: str, precision: str) -> None:
    found = ours(name, precision)
    assert found.warned <= plain(name).warned
    expected = SCRIPTS[name].expected
    assert [m for m in found.logged if not expected or expected not in m] == []


def test_averaged_weights_are_met_through_data() -> None:
    """Were they not, copies in low precision would go stale, and that would be seen."""
    curves = plain("ema").curves
    pairs = zip(curves["averaged"], curves["trained"], strict=True)
    most = max(abs(a - b) for a, b in pairs)
    assert most > 2 * max(tolerance("ema", "averaged", p) for p in LOW)


@both
def test_eight_threads_get_what_one_gets(precision: str) -> None:
    assert plain("threads").result["same"]
    assert ours("threads", precision).result["same"]


@pytest.mark.thorough(but=["fp16"])
@both
def test_a_script_with_autocast_of_its_own_is_left_alone(precision: str) -> None:
    names, warned = run("own_autocast", (precision,), nullcontext())
    found = automatic("own_autocast", (precision,), precision)
    assert_same(found.result, names["RESULT"])
    assert found.models == []
    assert found.warned <= warned
    assert found.logged == []


@pytest.mark.slow
@both
def test_what_inductor_compiles_is_rewritten_first(precision: str) -> None:
    warned = run("compiled", ("inductor",), nullcontext())[1]
    found = automatic("compiled", ("inductor",), precision)
    assert_near("compiled", precision, found)
    assert 0.95 <= found.low_flops / flops_needed("compiled") <= 1.05
    assert found.warned <= warned
    assert found.logged == []


# -- by the environment alone ----------------------------------------------------------


def assert_same_alone(name: str, precision: str, folder: Path) -> None:
    """It comes out as in `ours`, to the last bit."""
    found, reports = in_a_process(name, SCRIPTS[name].arguments, precision, folder)
    assert found.curves == ours(name, precision).curves
    assert found.result["dtypes"] == ["torch.float32"]
    assert found.warned == set()
    low = sum(r["coverage"]["low_flops"] for r in reports)
    assert low == ours(name, precision).low_flops


@pytest.mark.thorough
def test_the_environment_alone_does_it(tmp_path) -> None:
    assert_same_alone("loader", "bf16", tmp_path)


@pytest.mark.slow
@both
@every
def test_the_environment_alone_does_it_for_every_script(
    name: str, precision: str, tmp_path
) -> None:
    assert_same_alone(name, precision, tmp_path)


# -- a checkpoint, and another process that goes on from it ----------------------------


def resumed(precision: str, folder: Path) -> tuple[list[float], Path]:
    """The losses here and in a process that goes on from here; their checkpoint."""
    checkpoint = folder / "checkpoint.pt"
    first = automatic("resume", (str(checkpoint),), precision)
    then, (report,) = in_a_process("resume", (str(checkpoint),), precision, folder)
    for found, start in ((first, 0), (then, 10)):
        assert found.warned == set()
        assert found.result["start"] == start
    assert {p.dtype for p in first.result["params"]} == {torch.float32}
    assert then.result["dtypes"] == ["torch.float32"]
    ((_, before),) = first.models
    assert (before.coverage.share_of_flops, before.skipped) == (1.0, [])
    assert (report["coverage"]["share_of_flops"], report["skipped"]) == (1.0, [])
    return first.curves["losses"] + then.curves["losses"], checkpoint


def in_fp32(checkpoint: Path) -> list[float]:
    return list(run("resume", (str(checkpoint),), nullcontext())[0]["RESULT"]["losses"])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "precision", ["fp16", pytest.param("bf16", marks=pytest.mark.slow)]
)
def test_a_checkpoint_is_gone_on_from(precision: str, tmp_path) -> None:
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


# -- what the scripts have shown to be wrong once --------------------------------------


@pytest.fixture
def in_bf16() -> Iterator[None]:
    autoamp.enable(precision="bf16", do_no_harm=False)
    yield
    autoamp.disable()


def test_a_compiled_function_is_put_back(in_bf16: None) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ x)

    x = torch.randn(8, 8)
    compiled = torch.compile(function, backend="aot_eager")
    assert not torch.equal(compiled(x), function(x))
    autoamp.disable()
    assert torch.equal(compiled(x), function(x))


def test_calls_inside_a_users_compilation_are_counted(in_bf16: None) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    compiled = torch.compile(model, backend="aot_eager")
    compiled(torch.randn(4, 8))
    coverage = autoamp.report(model).coverage
    assert coverage.flops == 2 * 4 * 8 * 8
    assert coverage.calls == 1


def test_where_warnings_are_errors_a_model_may_follow_another(in_bf16: None) -> None:
    first, second = (nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second(first(torch.randn(4, 8)))
    coverage = autoamp.report(second).coverage
    assert coverage.calls_aside == 0


def test_flops_are_those_of_the_lengths_that_came(in_bf16: None) -> None:
    model, lengths = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), (2, 3, 1000)
    for length in lengths:
        model(torch.randn(length, 8))
    coverage = autoamp.report(model).coverage
    assert coverage.flops == 2 * 8 * 8 * sum(lengths)


def test_a_lone_layer_that_does_not_pay_is_no_news(caplog) -> None:
    autoamp.enable(precision="fp16", do_no_harm=False)
    layer = nn.Linear(4, 4)
    try:
        layer(torch.randn(2, 4))
        assert not autoamp.is_converted(layer)
    finally:
        autoamp.disable()
    assert caplog.text == ""
