"""An option given in the place of something else is answered with what to write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp.options import OPTION_NAMES

X = torch.randn(2, 4)
QUESTIONS = ("explain", "compare", "find_overflow", "tune")


class TakesAPrecision(nn.Linear):
    def forward(self, x: Tensor, precision: str = "") -> Tensor:
        assert precision == "bf16"
        return super().forward(x)


class TakesAnything(nn.Linear):
    def forward(self, x: Tensor, **given: Any) -> Tensor:
        assert given == {"precision": "bf16"}
        return super().forward(x)


@pytest.mark.thorough(
    but=[
        "explain-allow-False",
        "explain-record-True",
        "compare-loss_scale-False",
        "find_overflow-guard-True",
        "tune-deny-False",
        "tune-weight_copies-True",
    ]
)
@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("option", sorted(OPTION_NAMES))
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_says_where_options_go(
    question: str, option: str, converted: bool
) -> None:
    model = nn.Linear(4, 4)
    if converted:
        autoamp.convert(model, precision="bf16", do_no_harm=False)
    with pytest.raises(autoamp.OptionError) as caught:
        getattr(autoamp, question)(model, X, **{option: "bf16"})
    assert f"write options={{\"{option}\": 'bf16'}}" in str(caught.value)
    assert str(caught.value).startswith(f"{question}() passes {option} on to Linear")


@pytest.mark.thorough(but=["False-TakesAPrecision", "True-TakesAnything"])
@pytest.mark.parametrize("kind", [TakesAPrecision, TakesAnything])
@pytest.mark.parametrize("converted", [False, True])
def test_a_keyword_of_the_models_own_goes_to_the_model(
    kind: type[nn.Linear], converted: bool
) -> None:
    model = kind(4, 4)
    if converted:
        autoamp.convert(model, precision="bf16", do_no_harm=False)
    autoamp.explain(model, X, precision="bf16")
    autoamp.find_overflow(model, X, precision="bf16")


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("bf16", 'precision="bf16"'),
        (torch.float16, "precision=torch.float16"),
        ({"precision": "bf16"}, "**options"),
        (("linear",), 'precision="bf16"'),
    ],
)
def test_what_is_no_optimizer_is_answered_with_what_to_write(
    given: Any, written: str
) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(autoamp.OptionError) as caught:
        autoamp.convert(model, given)
    assert str(caught.value).endswith(f"are keywords: convert(model, {written})")
    assert not autoamp.is_converted(model)
