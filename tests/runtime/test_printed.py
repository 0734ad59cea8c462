"""`print(model)` says that a model is converted, and nothing else of it differs."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import autoamp
from tests.small_models import converted

X = torch.ones(4, 8)


class Named(nn.Module):
    """Tells of itself in several lines, and calls its layer in two methods."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def extra_repr(self) -> str:
        return "width=8\ndepth=1"

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x)


MAKES = [Named, lambda: nn.Linear(8, 8), lambda: nn.Sequential(nn.Linear(8, 8))]


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_a_converted_model_says_so_until_it_is_reverted(make, low: str) -> None:
    model = make()
    plain, keys = repr(model), list(model.state_dict())
    converted(model, precision=low)
    for shown in (repr(model), repr(copy.deepcopy(model))):
        assert shown.count("autoamp") == 1
        assert f"converted by autoamp: {low}" in shown
        assert all(line.strip(" ()") in shown for line in plain.splitlines())
    assert list(model.state_dict()) == keys
    assert repr(pickle.loads(pickle.dumps(model))) == plain
    assert repr(copy.copy(model)) == plain
    assert repr(autoamp.revert(model)) == plain
    assert "extra_repr" not in vars(model)


def test_parts_that_are_called_by_themselves_stay_silent() -> None:
    model = converted(Named())
    model(X), model.layer(X)
    assert repr(model).count("autoamp") == 1
    assert "autoamp" not in repr(model.layer)


def test_a_model_whose_forward_was_replaced_is_converted_no_more() -> None:
    model = converted(Named())
    model.forward = model.layer.forward
    assert "autoamp" not in repr(model)


def test_an_instance_that_tells_of_itself_keeps_its_own_line() -> None:
    model = nn.Linear(8, 8)
    model.extra_repr = lambda: "mine"
    assert repr(converted(model)) == "Linear(mine)"
    assert repr(autoamp.revert(model)) == "Linear(mine)"


def test_one_set_on_a_converted_model_stays() -> None:
    model = converted(nn.Linear(8, 8))
    model.extra_repr = lambda: "mine"
    assert repr(model) == repr(autoamp.revert(model)) == "Linear(mine)"


def test_a_model_that_is_not_converted_is_printed_as_before() -> None:
    model = nn.Linear(8, 8).double()
    assert "autoamp" not in repr(autoamp.convert(model))
