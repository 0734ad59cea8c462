"""A transform of torch.func inside a model is run as it is, and keeps its gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import autoamp


class Mapped(nn.Module):
    """Rows through `vmap`, between two linear layers; a weight is used inside."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def through(self, h: Tensor) -> Tensor:
        return torch.vmap(lambda row: row.cumsum(0) * self.scale)(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.through(self.enter(x)))


class Nested(Mapped):
    """One `vmap` in another."""

    def through(self, h: Tensor) -> Tensor:
        pairs = torch.vmap(torch.vmap(torch.mul, (None, 0)), (0, None))
        return pairs(h, h).sum(1) * self.scale


class Differentiated(Mapped):
    """The gradient of an energy, per row, is what the model computes with."""

    def through(self, h: Tensor) -> Tensor:
        energy = torch.func.grad(lambda row: (row.square() * self.scale).sum())
        return torch.vmap(energy)(h)


class Writes(Mapped):
    """What is mapped writes to its argument."""

    def through(self, h: Tensor) -> Tensor:
        copied = h.clone()
        torch.vmap(lambda row: row.mul_(2))(copied)
        return copied * self.scale


@pytest.mark.parametrize("kind", [Mapped, Nested, Differentiated, Writes])
def test_a_transform_inside_a_model_is_captured(kind: type[Mapped]) -> None:
    model = kind()
    exact = copy.deepcopy(model)
    autoamp.convert(model, precision="bf16", do_no_harm=False, strict=True)
    for rows in (5, 7):  # the second call has symbolic sizes
        x = torch.randn(rows, 8)
        y, expected = model(x), exact(x)
        model.zero_grad()
        exact.zero_grad()
        y.sum().backward()
        expected.sum().backward()
        pairs = zip(model.parameters(), exact.parameters(), strict=True)
        for ours, theirs in [(y, expected), *((p.grad, q.grad) for p, q in pairs)]:
            assert ours is not None
            # Three layers, each rounded to eight bits going in and coming out.
            allowed = 6 * 2**-8 * theirs.abs().max().item()
            torch.testing.assert_close(ours, theirs, rtol=0, atol=allowed)
    low = [row for row in autoamp.report(model).ops if row.precision == "bf16"]
    assert any("linear" in row.op for row in low)
