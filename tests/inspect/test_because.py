"""The report's paragraph on why its predicted speed-up is what it is."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from torch import nn

import autoamp
from autoamp.inspect.figures import Bounds, Headline, Misfit, OpTime
from autoamp.inspect.findings import because_of
from autoamp.place.cost import Parts
from autoamp.place.devices import roofline
from autoamp.saved.rows import OpRow

V100 = "cuda:sm_70"
HEADLINE = Headline(1, 1, 1.0, True, True, "V100", 1.0, 1.0, 1.0, 0.0, 0, 0, 0)


def op(high: Parts, placed: Parts, *, name: str = "a", low: bool = True) -> OpTime:
    where = {"reason": "a test", "module": name, "source": "", "flops": 100}
    precision = "bf16" if low else "fp32"
    return OpTime(
        OpRow(0, "", name, "aten::linear", precision, **where), high, placed, 0.0
    )


def because(*ops: OpTime, casts: float = 0.0, misfits: tuple[Misfit, ...] = ()) -> str:
    return because_of(
        Bounds(roofline("sm_70", torch.float16), ops, casts), HEADLINE, misfits
    )


def explained(model: nn.Module, *shape: int) -> autoamp.Report:
    with torch.device("meta"):
        return autoamp.explain(model.to("meta"), torch.empty(shape), device=V100)


FAST = Parts(0, 1, 10)
CASES = {
    "A larger batch": [op(Parts(90, 1, 10), Parts(90, 1, 5))],
    "A compiler": [op(Parts(1, 90, 10), Parts(1, 45, 5))],
    "Dropping": [op(FAST, FAST, low=False), op(FAST, Parts(0, 1, 2), name="b")],
    "Only less arithmetic": [op(FAST, Parts(0, 1, 5))],
}


@pytest.mark.parametrize("change", CASES)
def test_the_change_concerns_the_largest_part_of_what_is_left(change: str) -> None:
    assert f" {change} " in because(*CASES[change])


def test_casts_are_named_where_they_take_most() -> None:
    assert " Fewer casts would help" in because(op(FAST, FAST), casts=1e-6)


def test_reading_weights_asks_for_a_larger_batch_and_no_compiler() -> None:
    weights = dataclasses.replace(CASES["A compiler"][0], by_weights=0.9)
    assert "because reading weights take 45 ns of the 46 ns" in because(weights)


def test_padding_is_named_where_most_of_the_arithmetic_is_in_odd_sizes() -> None:
    ops = [op(FAST, Parts(0, 1, 5)), op(FAST, Parts(0, 1, 5), name="b")]
    few = (Misfit(0, "", "a", "head", 1, 10, 16),)
    many = (*few, Misfit(0, "", "b", "body", 1, 12, 16))
    assert "Only less arithmetic" in because(*ops, misfits=few)
    assert "pad the size 10 of head to 16" in because(*ops, misfits=many)


def test_the_speed_up_of_a_larger_batch_is_that_of_the_parts() -> None:
    text = because(op(Parts(90, 1, 10), Parts(90, 1, 2)))
    assert f"a speed-up of {170 / 106:.2f} is predicted" in text
    assert f"instead of {100 / 92:.2f}" in text


def test_the_largest_op_is_named_with_its_kernel_and_its_module() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 11))
    report = explained(model, 64, 8, 64, 64)
    flops = [9 * 62**2, 121 * 52**2]
    share = flops[1] / sum(flops)
    assert "the convolution of 11 x 11 in module 1: " in report.because
    assert f"and {share:.0%} of the arithmetic" in report.because
    assert report.because in re.sub(r"\s+", " ", report.full())
    assert report.because.count(". ") == 3  # four sentences


def test_the_figures_are_those_of_the_headline() -> None:
    report = explained(nn.Sequential(nn.Linear(64, 64), nn.Softmax(-1)), 512, 64)
    bounds, headline = report.bounds, report.headline
    assert bounds is not None
    for placed, told in ((False, headline.seconds_fp32), (True, headline.seconds)):
        assert bounds.seconds(placed=placed) == pytest.approx(told, rel=1e-3)


def test_where_no_time_is_predicted_the_reason_is_given() -> None:
    x, model = torch.randn(4, 8), nn.Linear(8, 8)
    by_memory = {"precision": "fp16", "objective": "memory"}
    report = autoamp.explain(model, x, device=V100, options=by_memory)
    assert report.because.endswith("the placement was chosen for memory.")
    forced = {"precision": "bf16", "do_no_harm": False}
    report = autoamp.explain(model, x, device="cpu:plain", options=forced)
    assert "no faster than fp32 on this device" in report.because
    report = autoamp.explain(nn.Flatten(), torch.ones(4, 8).long(), device=V100)
    assert report.because == "No time is predicted, because no float op was captured."
    report = autoamp.explain(nn.Tanh(), x, device=V100, options={"deny": ["tanh"]})
    assert "every op stays in fp32" in report.because
