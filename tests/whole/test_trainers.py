"""Trainers and wrappers, driven by scripts that know nothing of autoamp."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests.trainers.harness import FOLDER, Ran, bound, reference, run, run_apart

BAD = 3

# script, its arguments, those that make it use autocast, models converted.  Lightning's
# validation calls the module that `training_step` calls the parts of.
TRAINERS = {
    "hf": ("hf_trainer", {}, {"mixed": "bf16"}, 1),
    "accelerate": ("accelerate_loop", {}, {"mixed": "bf16"}, 1),
    "lightning": ("lightning_fit", {}, {"mixed": "bf16-mixed"}, 1),
    "lightning-parts": ("lightning_fit", {"kind": "parts"}, {"mixed": "bf16-mixed"}, 1),
}
WRAPPERS = {
    "data_parallel": ("plain_loop", {"wrap": "data_parallel"}, {"mixed": "bf16"}, 1),
    "averaged": ("plain_loop", {"wrap": "averaged"}, {"mixed": "bf16"}, 2),
    "peft": ("peft_lora", {}, {"mixed": "bf16"}, 2),
}
COMPILED = {
    "method": ("plain_loop", {"wrap": "compile_method"}, {"mixed": "bf16"}, 1),
    "function": ("plain_loop", {"wrap": "compile"}, {"mixed": "bf16"}, 1),
    "accelerate-method": (
        "accelerate_loop",
        {"compile": "method"},
        {"mixed": "bf16"},
        1,
    ),
    "accelerate-function": (
        "accelerate_loop",
        {"compile": "function"},
        {"mixed": "bf16"},
        1,
    ),
}
QUICK = {"accelerate", "lightning", "lightning-parts", "data_parallel"}
QUICK_IN_BF16 = {"hf", "averaged", "accelerate-method", "accelerate-function"}
PRECISIONS = ("bf16", "fp16")


def cases(*tables: dict[str, Any]) -> Any:
    """Every entry in both precisions, the long ones marked slow."""
    found = []
    for name, case in [item for table in tables for item in table.items()]:
        for precision in PRECISIONS:
            quick = name in QUICK or (name in QUICK_IN_BF16 and precision == "bf16")
            marks = [] if quick else [pytest.mark.slow]
            label = f"{name}-{precision}"
            found.append(pytest.param(case, precision, marks=marks, id=label))
    return pytest.mark.parametrize(("case", "precision"), found)


def assert_as_fp32(ours: Ran, plain: Ran, autocast: Ran) -> None:
    deviation = float((ours.losses - plain.losses).abs().max())
    allowed = bound(plain.losses, autocast.losses)
    print(f"deviation {deviation:.2e}, allowed {allowed:.2e}")
    assert 0 < deviation <= allowed
    assert {p.dtype for p in ours.result["params"].values()} == {torch.float32}


def assert_converted(ours: Ran, models: int, *, some: bool = False) -> None:
    """All of every model's matrix products are low, and one line says so.

    Args:
        some: the models keep some of their modules in fp32.
    """
    assert len(ours.reports) == models
    for report in ours.reports:
        assert report.coverage.share_of_calls == 1
        share = report.coverage.low_flops / report.coverage.flops
        assert 0.5 < share < 1 if some else share == 1
    lines = [line for line in ours.lines if "the first call of" not in line[1]]
    assert [level for level, _ in lines] == [logging.INFO] * models, lines
    assert all("is converted to" in line for _, line in lines)


@pytest.mark.thorough
@cases(TRAINERS, WRAPPERS, COMPILED)
def test_a_script_trains_as_in_fp32(case: Any, precision: str) -> None:
    script, arguments, mixed, models = case
    plain = reference(script, **arguments)
    autocast = reference(script, **arguments, **mixed)
    ours = run(script, precision, **arguments)
    assert_as_fp32(ours, plain, autocast)
    assert_converted(ours, models)
    assert ours.warned <= plain.warned
    assert ours.result.get("rates") == plain.result.get("rates")


def held(rates: list[float], at: int) -> list[float]:
    """The rates of a run whose scheduler has held once: `at` repeats the rate before.

    The Trainer notes the rate that a step is taken with, the loop the next step's.
    """
    return [*rates[:at], rates[at - 1], *rates[at:-1]]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["accelerate-method", "accelerate-function"])
def test_calls_of_a_compiled_model_are_counted(name: str) -> None:
    script, arguments, _, _ = COMPILED[name]
    ours = run(script, "bf16", **arguments)
    assert ours.reports[0].coverage.calls == len(ours.result["losses"])


@pytest.mark.thorough(but=["accelerate"])
@pytest.mark.parametrize(
    "name", [pytest.param("hf", marks=pytest.mark.slow), *list(TRAINERS)[1:]]
)
def test_exactly_the_step_that_overflows_is_skipped(name: str) -> None:
    script, arguments, _, _ = TRAINERS[name]
    ours = run(script, "fp16", **arguments, bad=BAD)
    assert ours.moved == [step != BAD for step in range(10)]
    scales = [r.loss_scale for r in ours.reports if r.loss_scale is not None]
    steps = {scale.skipped_steps for scale in scales if scale.skips}
    assert steps == {1}
    # Steps are counted from 1.
    assert all(f"step {BAD + 1}" in skip for scale in scales for skip in scale.skips)
    assert ours.losses.isfinite().all()
    rates = reference(script, **arguments).result["rates"]
    # Lightning has no mark of a skipped step, and steps its scheduler in all cases.
    if script != "lightning_fit":
        rates = held(rates, BAD + (script == "hf_trainer"))
    assert ours.result["rates"] == rates
    assert ours.boundaries == ["optimizer"]
    assert "_autoamp" not in vars(ours.result["optimizer"])  # with the mode off again


@pytest.mark.thorough
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
    case: str, precision: str, tmp_path
) -> None:
    if case == "hf":
        script, half, whole = "hf_trainer", {}, {}
        checkpoint = tmp_path / "checkpoint-5"
    else:
        script, half, whole = "lightning_fit", {"epochs": 1}, {"epochs": 2}
        checkpoint = tmp_path / "last.ckpt"
    first = run(script, precision, folder=tmp_path, **half)
    resumed = run(script, precision, resume=checkpoint, **whole)
    straight = run(script, precision, **whole) if half else first
    count = len(resumed.losses)
    assert torch.equal(resumed.losses, straight.losses[-count:])
    after, before = resumed.result["params"], straight.result["params"]
    assert all(torch.equal(after[name], before[name]) for name in before)


# An encoder that is called by itself is met, and converted, before the model it is of.
GENERATE = [
    pytest.param("gpt2", 30, 1, marks=pytest.mark.slow, id="gpt2"),
    pytest.param("t5", 0, 2, id="t5-untrained"),
    pytest.param("llama", 30, 1, marks=pytest.mark.slow, id="llama"),
    pytest.param("t5", 30, 2, marks=pytest.mark.slow, id="t5"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "steps", "models"), GENERATE)
@pytest.mark.parametrize(
    "precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)]
)
def test_greedy_tokens_are_those_of_fp32_as_often_as_under_autocast(
    model: str, steps: int, models: int, precision: str
) -> None:
    arguments = {"model": model, "steps": steps}
    plain = torch.tensor(reference("hf_generate", **arguments).result["tokens"])
    autocast = reference("hf_generate", **arguments, mixed="bf16").result["tokens"]
    ours = run("hf_generate", precision, **arguments)
    tokens = torch.tensor(ours.result["tokens"])
    assert len(set(plain.flatten().tolist())) > 2  # or any would do
    assert (tokens == plain).sum() >= (torch.tensor(autocast) == plain).sum()
    # T5's class names `wo` in `_keep_in_fp32_modules`, which holds in fp16.
    assert_converted(ours, models, some=model == "t5" and precision == "fp16")


@pytest.mark.slow  # test_scripts.py has a quick one of another script
def test_environment_variables_convert_an_unchanged_script(tmp_path) -> None:
    script = str(FOLDER / "accelerate_loop.py")
    said, reports = run_apart(tmp_path, "bf16", script)
    lines = [line for line in said.splitlines() if "autoamp" in line]
    assert len(lines) == 1
    assert "Sequential is converted to bf16" in lines[0]
    assert "Warning" not in said
    [report] = reports
    assert report["coverage"]["calls"] == 20
    assert report["coverage"]["share_of_flops"] == 1
