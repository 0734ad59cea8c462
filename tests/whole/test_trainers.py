"""Trainers and wrappers, driven by scripts that know nothing of autoamp."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scripts import Seen, bound, reference, run

BAD = 3

Case = tuple[str, dict[str, str], str, int]
"""A script, its arguments, the value of `mixed` with which it uses autocast, and how
many models are converted."""

TRAINERS: dict[str, Case] = {
    "hf": ("hf_trainer", {}, "bf16", 1),
    "accelerate": ("accelerate_loop", {}, "bf16", 1),
    # Its validation calls the module that `training_step` calls the parts of.
    "lightning": ("lightning_fit", {}, "bf16-mixed", 1),
    "lightning-parts": ("lightning_fit", {"kind": "parts"}, "bf16-mixed", 1),
}
WRAPPERS: dict[str, Case] = {
    "data_parallel": ("plain_loop", {"wrap": "data_parallel"}, "bf16", 1),
    "averaged": ("plain_loop", {"wrap": "averaged"}, "bf16", 2),
    "peft": ("peft_lora", {}, "bf16", 2),
    "method": ("plain_loop", {"wrap": "compile_method"}, "bf16", 1),
    "function": ("plain_loop", {"wrap": "compile"}, "bf16", 1),
    "accelerate-method": ("accelerate_loop", {"compile": "method"}, "bf16", 1),
    "accelerate-function": ("accelerate_loop", {"compile": "function"}, "bf16", 1),
}
ALL = TRAINERS | WRAPPERS
IN_CI = {f"{name}-bf16" for name in (*TRAINERS, *WRAPPERS)} - {"peft-bf16"}
IN_CI |= {"accelerate-fp16", "lightning-fp16", "data_parallel-fp16"}
IN_CI -= {"method-bf16", "function-bf16"}  # of which there are accelerate's

cases = [(name, precision) for name in ALL for precision in ("bf16", "fp16")]


def converted(ours: Seen, models: int, *, some: bool = False) -> None:
    """All of every model's matrix products are low, and one line says so.

    Args:
        some: the models keep some of their modules in fp32.
    """
    coverages = [report["coverage"] for report in ours.reports]
    assert len(coverages) == models
    for coverage in coverages:
        assert coverage["share_of_calls"] == 1
        share = coverage["share_of_flops"]
        assert 0.5 < share < 1 if some else share == 1
    lines = [line for line in ours.said if "the first call of" not in line[1]]
    assert [level for level, _ in lines] == [logging.INFO] * models, lines
    assert all("is converted to" in line for _, line in lines)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(*each, marks=[] if "-".join(each) in IN_CI else pytest.mark.slow)
        for each in cases
    ],
)
def test_a_script_trains_as_in_fp32(name: str, precision: str) -> None:
    script, arguments, mixed, models = ALL[name]
    plain = reference(script, **arguments)
    autocast = reference(script, **arguments, mixed=mixed)
    ours = run(script, precision=precision, **arguments)
    deviation = float((ours.losses - plain.losses).abs().max())
    assert 0 < deviation <= bound(plain.losses, autocast.losses)
    assert {p.dtype for p in ours.result["params"].values()} == {torch.float32}
    converted(ours, models)
    assert ours.warned <= plain.warned
    assert ours.result.get("rates") == plain.result.get("rates")
    if name.startswith("accelerate-"):  # calls of a compiled model are counted
        assert ours.reports[0]["coverage"]["calls"] == len(ours.losses)


def held(rates: list[float], at: int) -> list[float]:
    """The rates of a run whose scheduler has held once: `at` repeats the rate before.

    The Trainer notes the rate that a step is taken with, the loop the next step's.
    """
    return [*rates[:at], rates[at - 1], *rates[at:-1]]


@pytest.mark.parametrize(
    "name", [pytest.param("hf", marks=pytest.mark.slow), *list(TRAINERS)[1:]]
)
def test_exactly_the_step_that_overflows_is_skipped(name: str) -> None:
    script, arguments, _, _ = TRAINERS[name]
    ours = run(script, precision="fp16", **arguments, bad=BAD)
    assert ours.moved == [step != BAD for step in range(10)]
    scales = [each for r in ours.reports if (each := r["loss_scale"]) and each["skips"]]
    assert {scale["skipped_steps"] for scale in scales} == {1}
    assert ours.skipped == {BAD}
    assert ours.losses.isfinite().all()
    rates = reference(script, **arguments).result["rates"]
    # Lightning has no mark of a skipped step, and steps its scheduler in all cases.
    if script != "lightning_fit":
        rates = held(rates, BAD + (script == "hf_trainer"))
    assert ours.result["rates"] == rates
    assert ours.boundaries == ["optimizer"]
    assert "_autoamp" not in vars(ours.result["optimizer"])  # with the mode off again


@pytest.mark.parametrize(
    ("case", "precision"),
    [
        pytest.param("lightning", "bf16", marks=pytest.mark.slow),
        pytest.param("lightning", "fp16"),
        pytest.param("hf", "bf16", marks=pytest.mark.slow),
        pytest.param("hf", "fp16", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_resumed_is_the_same_to_the_bit(
    case: str, precision: str, tmp_path: Path
) -> None:
    half: dict[str, Any] = {}
    whole: dict[str, Any] = {}
    script, checkpoint = "hf_trainer", tmp_path / "checkpoint-5"
    if case == "lightning":
        script, half, whole = "lightning_fit", {"epochs": 1}, {"epochs": 2}
        checkpoint = tmp_path / "last.ckpt"
    first = run(script, precision=precision, folder=tmp_path, **half)
    resumed = run(script, precision=precision, resume=checkpoint, **whole)
    straight = run(script, precision=precision, **whole) if half else first
    assert torch.equal(resumed.losses, straight.losses[-len(resumed.losses) :])
    after, before = resumed.result["params"], straight.result["params"]
    assert all(torch.equal(after[name], before[name]) for name in before)


# An encoder that is called by itself is met, and converted, before the model it is of.
# The encoder, which `generate` calls by itself, is a part of the model that has it.
GENERATE = [
    pytest.param("gpt2", 30, 1, marks=pytest.mark.slow, id="gpt2"),
    pytest.param("t5", 0, 1, id="t5-untrained"),
    pytest.param("llama", 30, 1, marks=pytest.mark.slow, id="llama"),
    pytest.param("t5", 30, 1, marks=pytest.mark.slow, id="t5"),
]


@pytest.mark.parametrize(("model", "steps", "models"), GENERATE)
@pytest.mark.parametrize(
    "precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)]
)
def test_greedy_tokens_are_those_of_fp32_as_often_as_under_autocast(
    model: str, steps: int, models: int, precision: str
) -> None:
    arguments = {"model": model, "steps": steps}
    plain, autocast = (
        torch.tensor(reference("hf_generate", **arguments, **more).result["tokens"])
        for more in ({}, {"mixed": "bf16"})
    )
    ours = run("hf_generate", precision=precision, **arguments)
    tokens = torch.tensor(ours.result["tokens"])
    assert len(set(plain.flatten().tolist())) > 2  # or any would do
    assert (tokens == plain).sum() >= (autocast == plain).sum()
    # T5's class names `wo` in `_keep_in_fp32_modules`, which holds in fp16.
    converted(ours, models, some=model == "t5" and precision == "fp16")
