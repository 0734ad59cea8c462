"""An option given in the place of something else is answered with what to write."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp.options import OPTION_NAMES
from tests.small_models import BF16

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


def models(kind: type[nn.Linear]) -> list[nn.Linear]:
    return [kind(4, 4), autoamp.convert(kind(4, 4), **BF16)]


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_says_where_options_go(question: str) -> None:
    for option, model in itertools.product(OPTION_NAMES, models(nn.Linear)):
        with pytest.raises(autoamp.OptionError) as caught:
            getattr(autoamp, question)(model, X, **{option: "bf16"})
        assert f"write options={{\"{option}\": 'bf16'}}" in str(caught.value)
        assert str(caught.value).startswith(f"{question}() passes {option} on to ")


@pytest.mark.thorough(but=["TakesAPrecision"])
@pytest.mark.parametrize("kind", [TakesAPrecision, TakesAnything])
def test_a_keyword_of_the_models_own_goes_to_the_model(kind: type[nn.Linear]) -> None:
    for model in models(kind):
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
