"""The memory of a training step that `explain` says is what the step then holds."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp.messages import bytes_text
from autoamp.passes.check.saved_bytes import bytes_held, saved_bytes, storage_key
from autoamp.reports.figures import StepMemory
from tests.models import BY_NAME, Case
from tests.quick import some_slow

SEVEN = ("gpt2", "llama", "bert", "t5", "vit", "resnet", "convnext")
IN_CI = ("llama-fp16", "bert-bf16", "resnet-fp16", "convnext-bf16")
IN_CI += ("checkpoint-bf16", "checkpoint-fp16")
LOW: dict[str, Any] = {"do_no_harm": False}


def explained(model: nn.Module, case: Case, **options: Any) -> StepMemory:
    args, kwargs = case.inputs(0)
    memory = autoamp.explain(model, *args, kwargs=kwargs, **options).memory
    assert memory is not None
    return memory


def counted(case: Case, **options: Any) -> dict[str, int]:
    """What a converted model and its AdamW hold in a training step."""
    model, (args, kwargs) = case.model(), case.inputs(0)
    optimizer = torch.optim.AdamW(model.parameters())
    autoamp.convert(model, optimizer, **options)
    case.loss(model(*args, **kwargs)).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    weights = [*model.parameters()]
    saved = saved_bytes(lambda: model(*args, **kwargs), weights)
    copies = autoamp.report(model).cast_counts.kept_bytes
    optimizer.step()
    held = {storage_key(t): bytes_held(t) for t in (*weights, *model.buffers())}
    states = [t for state in optimizer.state.values() for t in state.values()]
    return {
        "weights": sum(held.values()),
        "gradients": sum(map(bytes_held, gradients)),
        "state": sum(bytes_held(t) for t in states if t.dim()),  # no count of steps
        "copies": copies,
        "kept": saved.total - saved.weight_copies,
    }


@pytest.mark.parametrize(
    ("name", "precision"),
    some_slow(
        product([*SEVEN, "checkpoint"], ["bf16", "fp16"]),
        lambda case: "-".join(case) not in IN_CI,
    ),
)
def test_it_is_what_the_step_holds(name: str, precision: str) -> None:
    """CI has a decoder, an encoder and convolutions, and a small model in both dtypes.

    Both precisions have numbers of two bytes, and differ in the scaled edge of a graph
    alone, which is the same for each model.
    """
    case, options = BY_NAME[name], {"precision": precision, **LOW}
    said, real = explained(case.model(), case, **options), counted(case, **options)
    assert said.is_counted
    assert said.weights == real["weights"]
    assert said.gradients == real["gradients"]
    assert said.states["Adam"] == real["state"]
    assert said.copies == real["copies"]
    # A copy with the channels last counts as kept in `saved_bytes`.
    assert said.kept == pytest.approx(real["kept"], rel=0.1)
    assert said.total("Adam") == pytest.approx(sum(real.values()), rel=0.1)


def test_a_model_without_data_needs_as_much() -> None:
    case = BY_NAME["gpt2"]
    here = explained(case.model(), case, precision="bf16", **LOW)
    empty = case.model().to("meta")
    empty.tie_weights()  # `to` gives a tied weight a memory for each of its places
    assert explained(empty, case, precision="bf16", **LOW) == here


class Two(nn.Module):
    """A frozen layer, and one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8, bias=False).requires_grad_(requires_grad=False)
        self.trained = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.trained(self.frozen(x).relu())


def test_only_what_is_trained_has_a_gradient_and_a_state() -> None:
    report = autoamp.explain(Two(), torch.randn(16, 8), precision="bf16", **LOW)
    memory = report.memory
    assert memory is not None
    # 64 numbers in the frozen weight, 32 in the other.
    assert (memory.weights, memory.copies, memory.gradients) == (4 * 96, 2 * 96, 4 * 32)
    assert memory.states == {"Adam": 8 * 32, "SGD with momentum": 4 * 32, "SGD": 0}
    # The bf16 input of the second layer, which is the output of the ReLU.
    assert memory.kept == 2 * 16 * 8
    assert memory.total("SGD") == 4 * 96 + 2 * 96 + 4 * 32 + 2 * 16 * 8
    said = " ".join(str(report).split())
    assert f"step with Adam: {bytes_text(memory.total('Adam'))} = " in said
    assert f"{bytes_text(memory.weights)} (weights) + " in said
    assert f"{bytes_text(memory.total('SGD'))} with SGD." in said


def test_a_model_in_eval_mode_has_no_training_step() -> None:
    report = autoamp.explain(Two().eval(), torch.randn(16, 8), precision="bf16", **LOW)
    assert report.memory is None
    assert "Memory of a training step" not in str(report)
