"""A step that the guard skips, in bf16, is blamed on the op that made the infinity."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoamp
from tests.small_models import WIDTH, Between

GUARDED: dict[str, Any] = {"precision": "bf16", "do_no_harm": False, "strict": True}


def line_of(name: str) -> str:
    """`test_blame_guarded.py:N`, the line that ends in the marker of a fault."""
    lines = Path(__file__).read_text().splitlines()
    (found,) = [n for n, text in enumerate(lines, 1) if text.endswith(f"# {name}")]
    return f"{Path(__file__).name}:{found}:"


class Product(Between):
    def middle(self, x: Tensor) -> Tensor:
        return x.abs().add(1) * 1e30 * 1e30  # product


class Region(Between):
    def middle(self, x: Tensor) -> Tensor:
        def region(y: Tensor) -> Tensor:
            return self.last(y).abs().add(1) * 1e30 * 1e30  # region

        return checkpoint(region, x * 1.5, use_reentrant=False)


class Tame(Between):
    def middle(self, x: Tensor) -> Tensor:
        def region(y: Tensor) -> Tensor:
            return nn.functional.dropout(self.last(y).abs(), 0.3)

        return checkpoint(region, x * 1.5, use_reentrant=False)


class SecondGraph(Between):
    def middle(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.last(x).abs().add(1) * 1e30 * 1e30  # second graph


class Fp32(Between):
    """A sum that stays in fp32 by its rule."""

    def middle(self, x: Tensor) -> Tensor:
        return x.add(100).exp().cumsum(0)  # fp32


class Backward(Between):
    """The forward is finite; the slope of a square root at zero is not."""

    def middle(self, x: Tensor) -> Tensor:
        return x.relu().mul(0).sqrt()  # backward


class BackwardRegion(Between):
    def middle(self, x: Tensor) -> Tensor:
        def region(y: Tensor) -> Tensor:
            return self.last(y).mul(0).sqrt()  # backward region

        return checkpoint(region, x * 1.5, use_reentrant=False)


FAULTS = {
    "product": Product,
    "region": Region,
    "second graph": SecondGraph,
    "fp32": Fp32,
    "backward": Backward,
    "backward region": BackwardRegion,
}


class Training:
    """A training, one step at a time."""

    def __init__(self, make: Callable[[], nn.Module], **options: Any) -> None:
        torch.manual_seed(0)
        self.model = make()
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), 1e-3)
        autoamp.convert(self.model, self.optimizer, **{**GUARDED, **options})

    def step(self, x: Tensor | None = None, factor: float = 1.0) -> bool:
        """Whether the step was skipped."""
        x = torch.randn(6, WIDTH) if x is None else x
        self.optimizer.zero_grad()
        (self.model(x).square().mean() * factor).backward()
        self.optimizer.step()
        return bool(self.optimizer.step_was_skipped)

    @property
    def skips(self) -> tuple[str, ...]:
        return skips_of(self.model)


def skips_of(model: nn.Module) -> tuple[str, ...]:
    found = autoamp.report(model).loss_scale
    return () if found is None else found.skips


@pytest.mark.thorough(but=["product", "backward region"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_step_skipped_after_another_names_the_op(name: str, caplog: Any) -> None:
    training = Training(FAULTS[name])
    with caplog.at_level(logging.INFO, logger="autoamp"):
        assert [training.step() for _ in range(4)] == [True] * 4
    for why in training.skips[1:]:
        assert line_of(name) in why
        assert "aten::" in why
        assert why in caplog.text
        assert ("the gradient of aten::" in why) == ("backward" in name)
    assert training.skips[0].startswith("step 1: the gradient of ")


def test_a_bad_loss_is_said_to_be_outside() -> None:
    training = Training(Between)
    assert [training.step(factor=torch.inf) for _ in range(2)] == [True] * 2
    assert "came in with the gradient of output 0" in training.skips[1]
    assert "outside of the model" in training.skips[1]


def test_bad_data_is_said_to_have_arrived() -> None:
    training = Training(Between)
    bad = torch.full((6, WIDTH), torch.nan)
    assert [training.step(bad) for _ in range(2)] == [True] * 2
    assert "input.0 holds a number that is not finite" in training.skips[1]
    assert "arrived in that argument" in training.skips[1]


class Squashed(Between):
    """The infinity of an input is gone from the result, and comes back as NaN."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


def test_an_infinity_that_only_the_backward_shows() -> None:
    training = Training(Squashed)
    bad = torch.randn(6, WIDTH)
    bad[0, 0] = torch.inf
    assert [training.step(bad) for _ in range(2)] == [True] * 2
    assert "the gradient of aten::linear.default" in training.skips[1]
    assert "became NaN in fp32" in training.skips[1]
    assert "input.0, in which a number is not finite" in training.skips[1]


@pytest.mark.thorough(but=["product-True", "backward-False"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", ["product", "backward"])
def test_two_models_in_one_optimizer(first: bool, name: str) -> None:
    """The model that made the infinity is named for both, wherever it stands."""
    torch.manual_seed(0)
    bad, good = FAULTS[name](), Between()
    models = [bad, good] if first else [good, bad]
    for each in (bad, good):
        autoamp.convert(each, **GUARDED)
    params = [p for each in models for p in each.parameters()]
    optimizer: Any = torch.optim.SGD(params, 1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.randn(6, WIDTH)
        for each in models:
            x = each(x)
        x.float().square().mean().backward()
        optimizer.step()
        assert optimizer.step_was_skipped
    for why in skips_of(bad)[1:]:
        assert line_of(name) in why
        assert "in the model" not in why
    for why in skips_of(good)[1:]:
        assert line_of(name) in why
        assert f"in the model {type(bad).__name__}, " in why


def test_two_optimizers_of_one_model() -> None:
    """One takes its step after the same backward; the other's skip is explained."""

    class Branches(Between):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.first(x), self.last(x).mul(0).sqrt()  # branches

    torch.manual_seed(0)
    model = autoamp.convert(Branches(), **GUARDED)
    for order in (("first", "last"), ("last", "first")):
        mine = [
            torch.optim.SGD(getattr(model, name).parameters(), 1e-3) for name in order
        ]
        for _ in range(3):
            for each in mine:
                each.zero_grad()
            one, other = model(torch.randn(6, WIDTH))
            (one.mean() + other.mean()).backward()
            for name, each in zip(order, mine, strict=True):
                each.step()
                skipped = bool(getattr(each, "step_was_skipped", False))
                assert skipped is (name == "last")
    skips = skips_of(model)
    assert sum(line_of("branches") in why for why in skips) >= 4


def test_only_steps_after_a_skipped_step_are_watched(monkeypatch: Any) -> None:
    from autoamp.capture import graph

    watched: list[Any] = []
    real = graph.Runner
    monkeypatch.setattr(
        graph, "Runner", lambda *a, **k: watched.append(a) or real(*a, **k)
    )
    training = Training(Between)
    assert not any(training.step() for _ in range(3))
    assert training.step(factor=torch.inf)
    assert watched == []
    with torch.no_grad():
        training.model(torch.randn(6, WIDTH))
    assert watched == [], "no backward follows"
    assert not training.step()
    assert len(watched) == 1
    assert not training.step()
    assert len(watched) == 1


def test_a_watched_step_has_the_gradients_of_any_other() -> None:
    found = []
    for watches in (False, True):
        training = Training(Tame)
        record = autoamp.model.conversion.conversion_of(training.model).engine.record
        record.scaling.skip_watch.watching = watches
        record.scaling.skip_watch.asks_fp32 = watches
        torch.manual_seed(1)
        assert not training.step()
        found.append([p.grad.clone() for p in training.model.parameters()])
    for plain, watched in zip(*found, strict=True):
        assert torch.equal(plain, watched)


# -- remedies --------------------------------------------------------------------------


class Edge(Between):
    """3.4e38 is infinite in bf16, and finite in fp32."""

    def middle(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x.mul(0).add(1), self.wide)  # edge
        return y.float() * 1e-38

    def __init__(self) -> None:
        super().__init__()
        wide = torch.zeros(WIDTH, WIDTH)
        wide[:, :2] = torch.tensor([torch.finfo(torch.bfloat16).max, 1.1e36])
        self.register_buffer("wide", wide)


def test_a_rule_is_proposed_once(caplog: Any) -> None:
    training = Training(Edge)
    with caplog.at_level(logging.WARNING, logger="autoamp"):
        assert all(training.step() for _ in range(6))
    (proposal,) = [m for m in caplog.messages if "would keep that in fp32" in m]
    assert "steps in a row" in proposal
    assert line_of("edge") in proposal


def test_heal_trains_on(caplog: Any) -> None:
    training = Training(Edge, heal=True)
    with caplog.at_level(logging.WARNING, logger="autoamp"):
        skipped = [training.step() for _ in range(8)]
    assert skipped == [True] * 4 + [False] * 4, training.skips
    assert caplog.text.count("captured again with") == 1


def test_two_skips_after_one_backward_count_once() -> None:
    torch.manual_seed(0)
    model = autoamp.convert(Edge(), **GUARDED, heal=True)
    optimizers: list[Any] = [
        torch.optim.SGD(part.parameters(), 1e-3) for part in (model.first, model.last)
    ]
    found = []
    for _ in range(6):
        model.zero_grad()
        model(torch.randn(6, WIDTH)).square().mean().backward()
        for each in optimizers:
            each.step()
        found.append([bool(each.step_was_skipped) for each in optimizers])
    # If each skip counted, the remedy would come one backward earlier.
    assert found == [[True, True]] * 4 + [[False, False]] * 2
    assert sum(line_of("edge") in why for why in skips_of(model)) == 6


@pytest.mark.thorough(but=["product", "second graph", "fp32", "backward region"])
@pytest.mark.parametrize("name", FAULTS)
def test_no_rule_is_proposed_that_fp32_would_not_cure(name: str, caplog: Any) -> None:
    training = Training(FAULTS[name], heal=True)
    with caplog.at_level(logging.WARNING, logger="autoamp"):
        assert all(training.step() for _ in range(6))
    assert "captured again" not in caplog.text
    assert "it has no loss scale" in caplog.text
