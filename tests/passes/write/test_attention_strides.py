"""Attention lies as the model's, whichever kernel torch takes for a mask.

Torch computes attention with a mask that requires grad by its written-out ops, and any
other by a fused kernel, whose result lies otherwise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import autoamp
from tests.metrics import relative_error
from tests.says import says
from tests.small_models import converted

Mask = Callable[[nn.Parameter, Tensor], Tensor | None]

MASKS: dict[str, Mask] = {
    "the parameter": lambda bias, x: bias,
    "rows of a table": lambda bias, x: bias[:, :, torch.arange(15, -1, -1)],
    "a product": lambda bias, x: bias * 2 + x.mean(),
    "zeros like a product": lambda bias, x: torch.zeros_like(bias * 2),
    "detached": lambda bias, x: bias.detach() * 2,
    "hidden": lambda bias, x: bias > 0,
    "none": lambda bias, x: None,
}
AFTER: dict[str, Callable[[Tensor], Tensor]] = {
    "returned": lambda y: y,
    "doubled": lambda y: y * 2,
    "transposed": lambda y: y.transpose(1, 2),
    "viewed": lambda y: y.view(*y.shape[:2], -1) if y.is_contiguous() else y,
    "heads": lambda y: y.transpose(1, 2).reshape(len(y), 16, -1),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout_p": 0.1},
    "scaled": {"scale": 0.5},
    "groups": {"enable_gqa": True},
}


def checkpointed(function: Callable[..., Tensor], *given: Tensor) -> Tensor:
    found: Tensor = checkpoint(function, *given, use_reentrant=False)
    return found


def without_gradients(function: Callable[..., Tensor], *given: Tensor) -> Tensor:
    with torch.no_grad():
        return function(*given)


class Attending(nn.Module):
    def __init__(self, mask: str, after: str, options: str = "plain") -> None:
        super().__init__()
        self.heads = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.query, self.key, self.value = self.heads
        self.bias = nn.Parameter(torch.randn(1, 4, 16, 16))
        self.mask, self.after, self.options = mask, after, options
        self.within: Callable[..., Tensor] = lambda function, x: function(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.within(self.attend, x)

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = (
            head(x).unflatten(-1, (4, 8)).transpose(1, 2) for head in self.heads
        )
        if self.options == "groups":
            key, value = key[:, :2], value[:, :2]
        mask = MASKS[self.mask](self.bias, x)
        found = functional.scaled_dot_product_attention(
            query, key, value, mask, **OPTIONS[self.options]
        )
        return AFTER[self.after](found)


def attend(model: Attending, x: Tensor, precision: str) -> Any:
    """Runs the model in fp32 and converted, and compares the layouts of the results."""
    torch.manual_seed(0)
    expected = model(x)
    # A failed check is an error here, and the region does not stay in fp32 silently.
    amp = converted(copy.deepcopy(model), precision=precision)
    torch.manual_seed(0)
    found = amp(x)
    pairs = zip(found.shape, found.stride(), expected.stride(), strict=True)
    assert [pair for pair in pairs if pair[0] != 1 and pair[1] != pair[2]] == []
    assert relative_error(found, expected) < 0.05
    if found.requires_grad:
        found.sum().backward()
        assert not amp.query.weight.requires_grad or amp.query.weight.grad is not None
    return amp


def model_of(mask: str, after: str, options: str = "plain") -> tuple[Attending, Tensor]:
    torch.manual_seed(0)
    return Attending(mask, after, options), torch.randn(2, 16, 32)


def is_low(amp: Any) -> bool:
    return "runs in fp32" not in autoamp.report(amp).why("scaled_dot_product_attention")


@pytest.mark.parametrize("after", ["returned", "viewed"])
@pytest.mark.parametrize("mask", MASKS)
def test_in_training(mask: str, after: str) -> None:
    assert is_low(attend(*model_of(mask, after), "bf16"))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("after", AFTER)
def test_of_a_learned_mask(after: str, precision: str) -> None:
    assert is_low(attend(*model_of("the parameter", after), precision))


@pytest.mark.parametrize("options", OPTIONS)
def test_with_options(options: str) -> None:
    attend(*model_of("the parameter", "returned", options), "bf16")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("mask", ["the parameter", "a product"])
def test_in_inference(mask: str, after: str, precision: str) -> None:
    """Without gradients a cast is no learned mask, and torch takes the fused kernel."""
    model, x = model_of(mask, after)
    with torch.no_grad() if precision == "bf16" else torch.inference_mode():
        amp = attend(model, x, precision)
    # The written-out ops stay where a result shows how they lie.
    assert is_low(amp) == (mask != "the parameter" or after == "heads")
    if not is_low(amp):
        why = autoamp.report(amp).why("scaled_dot_product_attention")
        says(why, "mask", "layout")


@pytest.mark.parametrize("mask", ["the parameter", "a product"])
def test_of_frozen_data(mask: str) -> None:
    """A gradient flows into the mask alone."""
    model, x = model_of(mask, "returned")
    for head in model.heads:
        head.requires_grad_(False)
    attend(model, x, "bf16")


@pytest.mark.parametrize("mask", ["the parameter", "a product"])
def test_of_a_batch_of_one(mask: str) -> None:
    model, x = model_of(mask, "viewed")
    attend(model, x[:1], "bf16")


@pytest.mark.parametrize("inside", [checkpointed, without_gradients])
def test_in_a_region(inside: Callable[..., Tensor]) -> None:
    model, x = model_of("the parameter", "returned")
    model.within = inside
    attend(model, x, "bf16")
