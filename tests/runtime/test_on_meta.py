"""Weights that are on the meta device when a model is converted, or between calls."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp.training.sentinels import COPIES
from tests.says import says
from tests.small_models import BF16, WIDTH


def model(device: str = "cpu") -> nn.Sequential:
    with torch.device(device):
        return nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)
        )


def batch() -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


class LoadsAtCalls:
    """Keeps a layer's weights, and lends them to the layer for the time of a call."""

    def __init__(self, layer: nn.Module) -> None:
        self.kept = {n: p.detach().clone() for n, p in layer.named_parameters()}
        layer.to("meta")

    def lend(self, layer: nn.Module, *_: Any) -> None:
        for name, value in self.kept.items():
            setattr(layer, name, nn.Parameter(value))

    def take(self, layer: nn.Module, *_: Any) -> None:
        for name, value in self.kept.items():
            setattr(layer, name, nn.Parameter(value.to("meta")))


def by_hooks(layer: nn.Module) -> None:
    loads = LoadsAtCalls(layer)
    layer.register_forward_pre_hook(loads.lend)
    layer.register_forward_hook(loads.take)


def by_accelerate(layer: nn.Module) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.cpu_offload(layer, execution_device="cpu")


WAYS = [by_hooks, by_accelerate]


@pytest.mark.parametrize("first", [True, False], ids=["offloaded first", "converted"])
@pytest.mark.parametrize("offload", WAYS)
def test_weights_that_are_loaded_at_each_call(
    offload: Callable[[nn.Module], None], first: bool
) -> None:
    plain = model()
    offloaded = copy.deepcopy(plain)
    steps: list[Callable[[], Any]] = [
        lambda: [offload(layer) for layer in (offloaded[0], offloaded[2])],
        lambda: autoamp.convert(offloaded, **BF16),
    ]
    for step in steps if first else steps[::-1]:
        step()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = plain(batch()).float()
    with torch.no_grad():
        assert torch.equal(offloaded(batch()), wanted)
        assert all(weight.is_meta for weight in offloaded.parameters())
        before = _copies()
        for _ in range(4):
            assert torch.equal(offloaded(batch()), wanted)
        assert _copies() == before, "copies pile up"


def _copies() -> int:
    gc.collect()
    return sum(map(len, COPIES.values()))


def test_the_copies_of_weights_made_for_one_call_go_with_them() -> None:
    converted = autoamp.convert(model(), **BF16)
    kept = {n: p.detach() for n, p in converted.named_parameters()}

    def call() -> None:
        views = {name: value.view_as(value) for name, value in kept.items()}
        torch.func.functional_call(converted, views, batch())

    call()
    before = _copies()
    for _ in range(4):
        call()
    assert _copies() == before


@pytest.mark.parametrize("assign", [True, False])
def test_weights_that_are_loaded_after_convert(assign: bool) -> None:
    converted, plain = autoamp.convert(model("meta"), **BF16), model()
    with pytest.raises(RuntimeError, match="meta"):  # the error of the model's own code
        converted(batch())
    if not assign:
        converted.to_empty(device="cpu")
    converted.load_state_dict(plain.state_dict(), assign=assign)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = plain(batch()).float()
    found = converted(batch())
    assert torch.equal(found, wanted)
    found.sum().backward()
    assert all(p.grad is not None for p in converted.parameters())


ASKED: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "compare": lambda m, x: autoamp.compare(m, x, **BF16),
    "find_overflow": lambda m, x: autoamp.find_overflow(m, x, **BF16),
    "bench": lambda m, x: autoamp.bench(m, x, **BF16),
    "export": lambda m, x: autoamp.export(m, (x,), target="pt2", **BF16),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_question_about_numbers_needs_numbers(name: str) -> None:
    asked = model()
    asked[2].to("meta")
    with pytest.raises(autoamp.UnsupportedModelError) as raised:
        ASKED[name](asked, batch())
    says(raised, "2.weight of Sequential", "meta device", "load the model's weights")


def test_a_question_about_weights_that_are_loaded_at_each_call() -> None:
    asked, plain = model().eval(), model().eval()
    plain.load_state_dict(asked.state_dict())
    for layer in (asked[0], asked[2]):
        by_hooks(layer)
    wanted, found = (autoamp.compare(m, batch(), **BF16) for m in (plain, asked))
    assert found.errors == wanted.errors
    assert found.errors.output > 0
    ops = autoamp.explain(asked, batch(), **BF16).ops
    assert [row.module for row in ops if row.precision == "bf16"] == ["0", "2"]
