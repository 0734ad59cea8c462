"""The automatic mode beside autocast that is entered inside the module it took."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autoamp
from tests.says import says

pytestmark = pytest.mark.usefixtures("off_again")
WIDTH = 16


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Contrastive(nn.Module):
    """A loss that owns its model, as sentence-transformers has them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        one, other = (functional.normalize(self.model(each)) for each in (x, y))
        return functional.cross_entropy(20.0 * one @ other.T, torch.arange(len(one)))


class Breaks(Contrastive):
    """Its graph is broken between the model and the similarity."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        one, other = self.model(x), self.model(y)
        torch._dynamo.graph_break()
        return functional.cross_entropy(one @ other.T, torch.arange(len(one)))


class Within(Contrastive):
    """Its own code enters autocast."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            one, other = self.model(x), self.model(y)
        return functional.cross_entropy(
            one.float() @ other.float().T, torch.arange(len(one))
        )


def by_the_trainer(model: nn.Module) -> nn.Module:
    """`model` with a `forward` under autocast, as accelerate's `prepare` has it."""
    wrapped = torch.autocast("cpu", torch.bfloat16)(type(model).forward)

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return wrapped(self, x).float()

    model.forward = types.MethodType(forward, model)
    return model


MADE: dict[str, Callable[[], nn.Module]] = {
    "a loss round the trainer's model": lambda: Contrastive(by_the_trainer(Encoder())),
    "a graph break": lambda: Breaks(by_the_trainer(Encoder())),
    "a block in the code": lambda: Within(Encoder()),
    "the trainer's model alone": lambda: by_the_trainer(Encoder()),
}


def batches() -> list[Tensor]:
    drawn = torch.Generator().manual_seed(0)
    return [torch.randn(8, WIDTH, generator=drawn) for _ in range(2)]


def gradients(model: nn.Module, calls: int = 3) -> list[list[Tensor]]:
    found = []
    args = batches()[: 1 if not isinstance(model, Contrastive) else 2]
    for _ in range(calls):
        model.zero_grad()
        model(*args).sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    return found


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", MADE)
def test_calls_run_as_they_are_written(
    name: str, precision: Any, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    plain = MADE[name]()
    taken = copy.deepcopy(plain)
    wanted = gradients(plain)
    autoamp.enable(precision=precision, do_no_harm=False, loss_scale="off")
    with caplog.at_level("INFO", logger="autoamp"):
        found = gradients(taken)
    # A call in which graphs came before the region has run them low.
    first = 1 if name == "a graph break" else 0
    for ours, theirs in zip(found[first:], wanted[first:], strict=True):
        assert all(map(torch.equal, ours, theirs))
    lines = [r.getMessage() for r in caplog.records if r.levelname != "DEBUG"]
    (line,) = (each for each in lines if "the first call of" not in each)
    says(line, type(taken).__name__, "autocast")
    reasons = [why for _, why in autoamp.report(taken).skipped]
    assert any("is entered inside it" in why for why in reasons)


class Off(Contrastive):
    """Only switches autocast off, as many models do round numbers that need fp32."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        one, other = self.model(x), self.model(y)
        with torch.autocast("cpu", enabled=False):
            similar = one.float() @ other.float().T
        return functional.cross_entropy(similar, torch.arange(len(one)))


class Elsewhere(Contrastive):
    """Enters autocast of a device that none of its tensors is on."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("xpu", torch.bfloat16):
            return super().forward(x, y)


class Wide(Contrastive):
    """Computes its similarity in a region that asks for fp32."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        one, other = self.model(x), self.model(y)
        with torch.autocast("cpu", torch.float32):
            similar = one.float() @ other.float().T
        return functional.cross_entropy(similar, torch.arange(len(one)))


@pytest.mark.filterwarnings("ignore:.*[Aa]utocast")
@pytest.mark.parametrize("kind", [Off, Elsewhere, Wide])
def test_regions_that_choose_nothing_are_no_choice(kind: type[Contrastive]) -> None:
    model = kind(Encoder())
    autoamp.enable(precision="bf16", do_no_harm=False)
    gradients(model)
    assert any(op.precision == "bf16" for op in autoamp.report(model).ops)


def test_a_model_that_was_named_is_converted() -> None:
    model = autoamp.convert(Within(Encoder()), precision="bf16", do_no_harm=False)
    gradients(model)
    assert any(op.precision == "bf16" for op in autoamp.report(model).ops)
