"""Tensors that come to have the `id` of weights that are gone are nobody's weights."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import autoamp

SIZE = 8
FP16 = {"precision": "fp16", "do_no_harm": False, "strict": True}


def overflowed() -> nn.Module:
    """A model whose last backward has overflowed, and which nobody has stepped."""
    model = autoamp.convert(nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh()), **FP16)
    (model(torch.randn(4, SIZE)).sum() * torch.inf).backward()
    return model


def parameter_at(places: set[int]) -> nn.Parameter | None:
    """A new parameter that has one of these ids; None where memory is not reused."""
    others = []
    for _ in range(10_000):
        found = nn.Parameter(torch.zeros(3))
        if id(found) in places:
            return found
        others.append(found)
    return None


@pytest.mark.parametrize("kept", ["nothing", "engine", "memory", "both"])
def test_an_optimizer_of_others_steps_as_it_would(kept: str) -> None:
    model = overflowed()
    held: list[Any] = []
    if kept in ("engine", "both"):  # as a cycle keeps it until it is collected
        held.append(model._autoamp.engine)
    if kept in ("memory", "both"):
        held += [weight.detach() for weight in model.parameters()]
    places = {id(weight) for weight in model.parameters()}
    del model
    gc.collect()
    weight = parameter_at(places)
    if weight is None:
        pytest.skip("no object has come to lie where another was")
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(weight.detach(), -torch.ones(3))
    assert "step" not in optimizer.__dict__
    weight.grad.fill_(torch.inf)  # nor is a step of its own skipped
    optimizer.step()
    assert torch.equal(weight.detach(), torch.full((3,), -torch.inf))
    assert not hasattr(optimizer, "step_was_skipped")


def test_the_optimizer_made_after_the_backward_is_the_models() -> None:
    model = overflowed()
    before = [weight.detach().clone() for weight in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.step()
    assert optimizer.step_was_skipped
    assert all(map(torch.equal, before, model.parameters()))


def test_a_weight_that_outlives_its_model_is_still_the_one_that_overflowed() -> None:
    model = overflowed()
    engine, kept = model._autoamp.engine, model[0].bias
    places = {id(model[0].weight)}
    del model
    gc.collect()
    other = parameter_at(places)
    if other is None:
        pytest.skip("no object has come to lie where another was")
    other.grad = torch.ones(3)
    optimizer = torch.optim.SGD([other, kept], lr=1.0)
    optimizer.step()
    assert optimizer.step_was_skipped
    assert kept.isfinite().all()
    assert engine.record.scaling.ledger.stepped
