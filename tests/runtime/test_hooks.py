"""Hooks put on modules after the capture are called, and cost nothing before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autoamp
from tests.logs import warned
from tests.quick import each_with_one
from tests.says import says

X = torch.randn(4, 8)
PRECISIONS = ("bf16", "fp16")
CLOSE = 0.05
"""Two bf16 layers of numbers below 4, each rounded to 8 bits."""


def model(precision: str, **options: Any) -> nn.Module:
    inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    made = nn.Sequential(inner, nn.Linear(8, 8))
    return autoamp.convert(made, precision=precision, do_no_harm=False, **options)


def step(converted: nn.Module) -> None:
    converted(X).square().mean().backward()


@pytest.fixture
def looks(monkeypatch) -> list[nn.Module]:
    """The models whose modules were looked through for hooks, in order."""
    found: list[nn.Module] = []
    inner = autoamp.compat.has_hooks

    def look(of: nn.Module) -> bool:
        found.append(of)
        return inner(of)

    monkeypatch.setattr("autoamp.compat.has_hooks", look)
    return found


@pytest.mark.parametrize(
    ("training", "precision"), each_with_one([True, False], PRECISIONS)
)
def test_a_hook_is_called_from_when_it_is_put_there_until_it_is_taken_away(
    precision: str, training: bool
) -> None:
    converted = model(precision)
    run: Callable[..., Any] = step if training else converted
    given = (converted,) if training else (X,)
    seen: list[int] = []
    for _ in range(3):
        run(*given)
    for _ in range(2):
        handle = converted[0][0].register_forward_hook(lambda *_: seen.append(1))
        for _ in range(3):
            run(*given)
        assert len(seen) == 3
        handle.remove()
        run(*given)
        assert len(seen) == 3
        seen.clear()
    coverage = autoamp.report(converted).coverage
    assert coverage.share_of_calls == 1


def test_what_a_hook_gives_is_what_goes_on() -> None:
    converted = model("bf16")
    with torch.no_grad():
        before = converted[1](converted[0](X) * 2)
        converted(X)
        converted[0].register_forward_hook(lambda _, __, out: out * 2)
        assert torch.allclose(converted(X), before, atol=CLOSE)


def test_a_copy_and_its_original_have_hooks_of_their_own() -> None:
    first = model("bf16")
    step(first)
    second = copy.deepcopy(first)
    seen: list[str] = []
    second[1].register_forward_pre_hook(lambda *_: seen.append("second"))
    step(first)
    assert seen == []
    step(second)
    step(copy.deepcopy(second))
    assert seen == ["second"] * 2


@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_model_is_looked_through_while_nobody_adds_a_hook(
    precision: str, looks: list[nn.Module]
) -> None:
    converted = model(precision)
    optimizer = torch.optim.SGD(converted.parameters(), lr=0.1)
    for _ in range(4):
        step(converted)
        optimizer.step()
        optimizer.zero_grad()
    # The optimizer is given hooks once, in fp16 by the first run, in bf16 by the first
    # step; hooks on gradients do not count.
    assert len(looks) == 2
    before = len(looks)
    X.clone().requires_grad_().register_hook(lambda _: None)
    converted(X)
    converted(X)
    assert len(looks) == before + 1


def test_a_hook_on_a_tensor_captures_nothing_anew() -> None:
    converted = model("bf16")
    for _ in range(3):
        value = converted(X)
        value.register_hook(lambda grad: grad * 2)
        value.sum().backward()
    assert len(autoamp.report(converted).graphs) == 1


def test_a_module_with_a_hook_is_put_in_the_place_of_one_without() -> None:
    other = nn.Linear(8, 8)
    handle = other.register_forward_hook(lambda _, __, out: out * 2)
    converted = model("bf16")
    converted(X)
    converted[1] = other
    with torch.no_grad():
        once = other.forward(converted[0](X))
        assert torch.allclose(converted(X), 2 * once, atol=CLOSE)
        handle.remove()
        assert torch.allclose(converted(X), once, atol=CLOSE)


def _asks_for_gradients(_: nn.Module, __: Any, out: torch.Tensor) -> torch.Tensor:
    return out.requires_grad_(True)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_hook_more_at_each_step_makes_no_graph_for_each(
    precision: str, caplog: pytest.LogCaptureFixture
) -> None:
    converted = model(precision)
    exact = copy.deepcopy(autoamp.revert(copy.deepcopy(converted)))
    seen: list[int] = []
    for call in range(12):
        for each in (converted, exact):
            each[0].register_forward_hook(_asks_for_gradients)
            each[0].register_forward_hook(lambda *_: seen.append(1))
        found = converted(X)
        found.square().mean().backward()
        assert len(seen) == call + 1
        seen.clear()
        true = exact(X)
        assert torch.allclose(found, true, atol=CLOSE)
        assert not torch.equal(found, true), "it was rounded"
        seen.clear()
    report = autoamp.report(converted)
    assert len(report.graphs) <= 3
    assert report.coverage.calls == 12
    assert report.coverage.calls_aside >= 9
    (line,) = warned(caplog)
    says(line, "torch.autocast", "hooks of 0 ", line="test_hooks.py:")


def test_hooks_on_all_modules_that_come_and_go_make_few_graphs() -> None:
    converted, seen = model("bf16"), []
    for _ in range(12):
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, *_: seen.append(type(module).__name__)
        )
        try:
            converted(X)
        finally:
            handle.remove()
        converted(X)
    assert seen.count("Linear") == 24
    report = autoamp.report(converted)
    assert len(report.graphs) <= 4
    assert report.coverage.calls_aside <= 12, "calls without hooks have a graph"
