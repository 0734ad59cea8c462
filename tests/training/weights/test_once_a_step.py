"""Copies that one call needs between two steps are refreshed together, unwatched."""

from __future__ import annotations

import torch
from torch import nn

import autoamp
from autoamp.runtime.captured_graph import Graph
from autoamp.runtime.conversion import conversion_of
from autoamp.training import weight_copies as copies
from autoamp.training.sentinels import copies_of

LOW = torch.bfloat16


def trained(
    steps: int = 2, *, to_input: bool = False
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A converted model after some steps with one call each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Conv1d(4, 4, 1), nn.Linear(8, 8))
    model = autoamp.convert(model, precision="bf16", do_no_harm=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        step(model, optimizer, to_input=to_input)
    return model, optimizer


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, to_input: bool = False
) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 8, requires_grad=to_input)).sum().backward()
    optimizer.step()


def reads_all(model: nn.Module) -> bool:
    """Whether one more call is given copies that are equal to the weights."""
    weights = [*model.parameters()]
    lows = graph_of(model).copies.fresh(weights)
    pairs = zip(lows, weights, strict=True)
    return all(torch.equal(low, p.detach().to(LOW)) for low, p in pairs)


def graph_of(model: nn.Module) -> Graph:
    graph: Graph
    (graph,) = conversion_of(model).engine.record.graphs
    assert graph.copies is not None
    return graph


def watched(model: nn.Module) -> int:
    found = [c for p in model.parameters() for c in copies_of(p)]
    return sum(copy.sentinel is not None for copy in found)


def test_copies_are_unwatched_after_steps_of_one_call_each() -> None:
    model, optimizer = trained()
    for _ in range(3):
        assert reads_all(model)
        assert watched(model) == 0
        optimizer.step()
    model(torch.ones(4, 8))
    assert reads_all(model)  # a second call before the step
    assert watched(model) == 6


def test_after_a_step_of_one_call_copies_are_unwatched_again() -> None:
    model, optimizer = trained()
    model(torch.ones(4, 8))
    model(torch.ones(4, 8))
    optimizer.step()
    assert reads_all(model)
    assert watched(model) == 6, "the step before had two calls"
    optimizer.step()
    assert reads_all(model)
    assert watched(model) == 0


def test_a_graph_keeps_its_copies_until_its_backward() -> None:
    model, _ = trained(to_input=True)
    x = torch.ones(4, 8, requires_grad=True)
    kept = model(x)  # needs the copies for the gradient of `x`
    wanted = torch.autograd.grad(kept.sum(), x, retain_graph=True)[0]
    weights = [*model.parameters()]
    copies.before_write(weights)
    for weight in weights:
        weight.data.mul_(2)  # no version counter is moved
    assert reads_all(model)
    assert torch.equal(torch.autograd.grad(kept.sum(), x)[0], wanted)


def test_a_frozen_weight_stays_watched_and_is_not_copied_again() -> None:
    model, optimizer = trained(0)
    model[0].weight.requires_grad_(False)
    for _ in range(2):
        step(model, optimizer)
    model(torch.ones(4, 8))
    assert watched(model) == 1
    before = graph_of(model).copies.refreshed
    optimizer.step()
    model(torch.ones(4, 8))
    assert graph_of(model).copies.refreshed - before == 5
    model[0].weight.data.mul_(2)
    optimizer.step()
    assert reads_all(model)
