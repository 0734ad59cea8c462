"""`find_overflow` blames the planted line, proposes a rule that cures, changes nothing.

Each fault's line ends in a comment `# fault: NAME`, by which the test finds the line.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoamp
from tests.says import says
from tests.small_models import WIDTH, Between


def line_of(name: str) -> int:
    """The line of this file that ends in the marker of a fault."""
    lines = Path(__file__).read_text().splitlines()
    (found,) = [
        n for n, line in enumerate(lines, 1) if line.endswith(f"# fault: {name}")
    ]
    return found


class Attention(Between):
    def middle(self, x: Tensor) -> Tensor:
        logits = (400 * x) @ (400 * x).transpose(-1, -2)  # fault: attention
        return torch.softmax(logits / 1e4, -1) @ x


class Variance(Between):
    def middle(self, x: Tensor) -> Tensor:
        return (900 * x).var(-1, keepdim=True) * torch.ones_like(x)  # fault: variance


class Exponential(Between):
    def middle(self, x: Tensor) -> Tensor:
        return torch.exp(x * 0 + 12)  # fault: exponential


class Division(Between):
    def middle(self, x: Tensor) -> Tensor:
        return x / (0 * x + 1e-6)  # fault: division


class BadWeight(Between):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.scaled.weight[2, 3] = 1e5

    def middle(self, x: Tensor) -> Tensor:
        return self.scaled(x)


class Backward(Between):
    """On the way back, the large factor comes before the small one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steep", 1e4 * torch.eye(WIDTH))

    def middle(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x * 1e-4, self.steep)  # fault: backward


class SecondGraph(Between):
    def middle(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        x = self.last(x)
        return (x * 300) * 1000  # fault: second graph


class OnlyInRegion(Between):
    """A region of the model's own; the same numbers outside of it are in range."""

    def middle(self, x: Tensor) -> Tensor:
        def region(y: Tensor) -> Tensor:
            z = self.last(y) * 400
            return (z * 400) / 1e5  # fault: region

        return checkpoint(region, x * 1.5, use_reentrant=False)


class InCheckpoint(nn.Module):
    """A model whose middle is inside `torch.utils.checkpoint`."""

    def __init__(self, model: Between) -> None:
        super().__init__()
        self.inner = model

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner
        x = checkpoint(inner.middle, inner.first(x), use_reentrant=False)
        return inner.last(x)


def steep_loss(output: Tensor) -> Tensor:
    wide = output.double().float() * 1e30
    return (wide * wide).sum()  # fault: loss


def plain_loss(output: Tensor) -> Tensor:
    return output.square().mean()


@dataclass
class Fault:
    """A planted fault, and the facts that must be told about it."""

    name: str
    make: Callable[[], nn.Module]
    factor: float = 1.0
    loss_fn: Callable[[Tensor], Tensor] = plain_loss
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def has_line(self) -> bool:
        return "name" not in self.facts


FAULTS = [
    Fault("attention", Attention, facts={"op": "aten::matmul.default"}),
    Fault("variance", Variance, facts={"direction": "forward"}),
    Fault("exponential", Exponential, facts={"op": "aten::exp.default"}),
    Fault("division", Division, facts={"op": "aten::div.Tensor"}),
    Fault("input", Between, math.inf, facts={"kind": "input", "name": "x"}),
    Fault("weight", BadWeight, facts={"kind": "weight", "name": "scaled.weight"}),
    Fault("backward", Backward, facts={"direction": "backward"}),
    Fault("region", OnlyInRegion, facts={"op": "aten::mul.Tensor"}),
    Fault("second graph", SecondGraph, facts={"direction": "forward"}),
    Fault("loss", Between, loss_fn=steep_loss, facts={"kind": "outside"}),
]


@pytest.mark.parametrize("regions", [False, True], ids=["eager", "checkpointed"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_planted_line_is_blamed(fault: Fault, regions: bool) -> None:
    torch.manual_seed(0)
    model = fault.make()
    if regions and isinstance(model, Between):
        model = InCheckpoint(model)
    x = torch.randn(6, WIDTH)
    x[1, 2] *= fault.factor
    found = autoamp.find_overflow(model, x, loss_fn=fault.loss_fn)
    assert found
    for name, wanted in fault.facts.items():
        inner = "inner." if regions and wanted == "scaled.weight" else ""
        assert getattr(found, name) == f"{inner}{wanted}", str(found)
    if fault.has_line:
        place = f"{Path(__file__).name}:{line_of(fault.name)}"
        says(found.source, line=place)
        says(found, line=place)
    if fault.name in ("input", "loss"):
        assert found.in_fp32
        assert found.rule is None
    else:
        assert found.rule is not None, str(found)
        assert_cured(model, x, fault.loss_fn, found)


def assert_cured(
    model: nn.Module, x: Tensor, loss_fn: Any, found: autoamp.Overflow
) -> None:
    """The model, converted with the proposed rule as it is printed, is finite."""
    rule = eval(f"dict({found.proposal})")
    twin = copy.deepcopy(model)
    autoamp.convert(twin, precision="fp16", do_no_harm=False, **rule)
    loss_fn(twin(x)).backward()
    grads = [p.grad for p in twin.parameters() if p.grad is not None]
    assert grads
    assert all(bool(g.isfinite().all()) for g in grads)
