"""Checkpointed regions inside a converted model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoamp
from autoamp.passes import list as passes
from tests.metrics import relative_error

WIDTH = 8


class Regions(nn.Module):
    """A region in a region, around dropout or a branch of `torch.cond`."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.5)
        self.branches = branches
        self.turn: Tensor
        self.register_buffer("turn", torch.ones((), dtype=torch.long))

    def inner(self, x: Tensor) -> Tensor:
        if not self.branches:
            return self.dropout(self.first(x))
        return torch.cond(
            self.turn == 1,
            lambda x: self.first(x).relu(),
            lambda x: self.second(x).tanh(),
            (x,),
        )

    def outer(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False).sin()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(checkpoint(self.outer, x, use_reentrant=False)).cos()


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    model(x).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("branches", [False, True])
def test_regions_in_regions(branches: bool) -> None:
    model, x = Regions(branches), torch.randn(4, WIDTH)
    expected = gradients(model, x)
    autoamp.convert(model, precision="bf16", do_no_harm=False, strict=True)
    # Two products, and four in the backward, each with operands and result rounded.
    unit = torch.finfo(torch.bfloat16).eps / 2
    assert relative_error(gradients(model, x), expected) < 6 * 3 * unit
    assert "bf16" in {row.precision for row in autoamp.report(model).ops}


@pytest.mark.parametrize("branches", [False, True])
def test_regions_of_a_graph_the_pass_failed_on(branches: bool, monkeypatch) -> None:
    """They run as in the model: the same dropout mask twice, and branches too."""
    model, x = Regions(branches), torch.randn(4, WIDTH)
    expected = gradients(model, x)

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(passes, "collect_facts", fail)
    autoamp.convert(model, precision="bf16", do_no_harm=False)
    assert relative_error(gradients(model, x), expected) == 0
    ((_, why),) = autoamp.report(model).skipped
    assert "planted" in why
