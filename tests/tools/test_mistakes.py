"""What a question cannot use is refused at once, in a sentence that names the cure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoamp
from tests.says import says
from tests.small_models import BF16

X = torch.ones(4, 8)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def bench(**options: Any) -> Any:
    return autoamp.bench(model(), X, **BF16, **options)


def compare(**options: Any) -> Any:
    return autoamp.compare(model(), X, **BF16, **options)


def find_overflow(**options: Any) -> Any:
    return autoamp.find_overflow(model(), X, **options)


def adamw() -> torch.optim.Optimizer:
    return torch.optim.AdamW(model().parameters())


def nothing(gm: Any, inputs: Any) -> Any:
    """A back end that forgets to return the graph."""


MISTAKES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "a loss of two": (
        lambda: compare(loss_fn=F.cross_entropy),
        ("loss_fn", "output alone", "'target'", "lambda output"),
    ),
    "a loss module": (
        lambda: bench(loss_fn=nn.CrossEntropyLoss()),
        ("loss_fn", "output alone", "'target'", "lambda output"),
    ),
    "a loss of two, overflow": (
        lambda: find_overflow(loss_fn=lambda a, b: a),
        ("loss_fn", "output alone", "'b'", "lambda output"),
    ),
    "no loss": (lambda: compare(loss_fn=3), ("loss_fn=3", "not a function")),
    "tolerance": (lambda: compare(tolerance="1e-3"), ("tolerance='1e-3'", "positive")),
    "optimizer": (
        lambda: bench(optimizer=adamw()),
        ("optimizer=", "torch.optim.AdamW", "made already"),
    ),
    "data": (lambda: bench(data=3), ("data=3", "batches")),
    "rounds": (lambda: bench(rounds=1.5), ("rounds=1.5", "whole number")),
    "rounds as text": (lambda: bench(rounds="3"), ("rounds='3'", "whole number")),
    "an option": (
        lambda: autoamp.convert(model(), precison="bf16"),  # type: ignore[call-arg]
        ("'precison'", "did you mean precision?"),
    ),
    "a layer as a container": (
        lambda: autoamp.convert(model(), keep=["2.*"], **BF16),
        ("keep='2.*'", "did you mean '2'?"),
    ),
    "a missing argument": (
        lambda: autoamp.export(nn.Bilinear(8, 8, 8), (X,), **BF16),
        ("Bilinear.forward()", "'input2'", "args"),
    ),
    "an argument too many": (
        lambda: autoamp.export(nn.Linear(8, 8), (X, X), **BF16),
        ("Linear.forward()", "too many"),
    ),
    "a back end of nothing": (
        lambda: autoamp.convert(
            model(), backend=nothing, strict=True, do_no_harm=False, precision="bf16"
        )(X),
        ("nothing", "None", "function"),
    ),
    "hot as text": (
        lambda: autoamp.enable(hot="no"),  # type: ignore[arg-type]
        ("hot='no'", "True or False"),
    ),
    "a GPU": (
        lambda: autoamp.explain(model(), X, device="gpu"),
        ("device='gpu'", "'cuda'"),
    ),
    "keywords": (
        lambda: autoamp.explain(model(), X, kwargs=X),  # type: ignore[arg-type]
        ("kwargs= is a Tensor",),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused(name: str) -> None:
    mistake, needed = MISTAKES[name]
    with pytest.raises(autoamp.OptionError) as raised:
        mistake()
    says(raised, *needed)


def test_rules_of_another_precision_are_refused_before_a_call() -> None:
    for ask in (
        lambda: autoamp.convert(model(), rules="fp16", **BF16),
        lambda: autoamp.explain(model(), X, rules="fp16", **BF16),
    ):
        with pytest.raises(autoamp.RulesError) as raised:
            ask()
        says(raised, "fp16 is written for float16", "or no rules")


@pytest.mark.parametrize("table", [{"gelu": "deny"}, {"gelu": None}, ["gelu"], None])
def test_a_table_of_no_rules(table: Any) -> None:
    with pytest.raises(autoamp.RulesError) as raised:
        autoamp.Rules("mine", table)
    says(raised, "'mine'", "no rule", "Rules.load", option="deny")


def test_a_report_of_no_module() -> None:
    with pytest.raises(autoamp.UnsupportedModelError) as raised:
        autoamp.report(adamw())  # type: ignore[arg-type]
    says(raised, "report()", "torch.nn.Module", "AdamW")


def test_a_folder_is_no_exported_program(tmp_path: Path) -> None:
    with pytest.raises(autoamp.OptionError) as raised:
        autoamp.load(tmp_path)
    says(raised, tmp_path.name, "directory")


@pytest.mark.parametrize("whole", [False, True])
def test_a_state_dict_is_no_exported_program(
    tmp_path: Path, whole: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.pt2"
    torch.save(model() if whole else model().state_dict(), path)
    with pytest.raises(autoamp.OptionError) as raised:
        autoamp.load(path)
    says(raised, path.name, "no exported program", "torch.load")
    assert capfd.readouterr().err == ""
