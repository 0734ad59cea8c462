"""A skipped step is blamed on the op that overflowed; `heal` keeps it in fp32."""

from __future__ import annotations

import copy
import gc
import logging
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoamp
from autoamp.errors import LossScaleError
from tests.small_models import WIDTH, Between


def line_of(name: str) -> str:
    """`test_blame.py:N`, the line of this file that ends in the marker of a fault."""
    lines = Path(__file__).read_text().splitlines()
    (found,) = [n for n, text in enumerate(lines, 1) if text.endswith(f"# {name}")]
    return f"{Path(__file__).name}:{found}:"


class Product(Between):
    def middle(self, x: Tensor) -> Tensor:
        return (x * 400) * 400 / 1e5  # product


class Region(Between):
    def middle(self, x: Tensor) -> Tensor:
        def region(y: Tensor) -> Tensor:
            return (self.last(y) * 400) * 400 / 1e5  # region

        return checkpoint(region, x * 1.5, use_reentrant=False)


class SecondGraph(Between):
    def middle(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return (self.last(x) * 400) * 400 / 1e5  # second graph


class Backward(Between):
    """On the way back, the large factor comes before the small one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steep", 2e4 * torch.eye(WIDTH))

    def middle(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x * 1e-5, self.steep)  # backward


FAULTS = {
    "product": Product,
    "region": Region,
    "second graph": SecondGraph,
    "backward": Backward,
}


class Training:
    """A training in fp16, one step at a time."""

    def __init__(
        self, make: Callable[[], nn.Module], scale: float, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.model = model = make()
        given: dict[str, Any] = {"precision": "fp16", "do_no_harm": False, **options}
        given.setdefault("loss_scale", autoamp.DynamicLossScale(scale))
        self.optimizer: Any = torch.optim.SGD(model.parameters(), 1e-3)
        autoamp.convert(model, self.optimizer, **given)

    def step(self, x: Tensor | None = None, factor: float = 1.0) -> bool:
        """Whether the step was skipped."""
        x = torch.randn(6, WIDTH) if x is None else x
        self.optimizer.zero_grad()
        (self.model(x).square().mean() * factor).backward()
        self.optimizer.step()
        return bool(self.optimizer.step_was_skipped)

    @property
    def skips(self) -> tuple[str, ...]:
        return autoamp.report(self.model).loss_scale.skips


@pytest.mark.thorough(but=["product", "backward"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_step_skipped_after_another_names_the_op(name: str, caplog) -> None:
    training = Training(FAULTS[name], 2.0**12)
    with caplog.at_level(logging.INFO, logger="autoamp"):
        assert [training.step() for _ in range(3)] == [True] * 3
    for why in training.skips[1:]:
        assert line_of(name) in why
        assert "aten::" in why
        assert "overflowed in fp16" in why
        assert why in caplog.text
    assert training.skips[0].startswith("step 1: ")


class State(Between):
    """An overflow before code that holds state, which was poisoned before."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.BatchNorm1d(WIDTH)
        self.group = nn.InstanceNorm1d(2, track_running_stats=True)
        self.register_buffer("mean", torch.zeros(WIDTH))
        for buffer in self.buffers():
            if buffer.is_floating_point():
                buffer.fill_(torch.nan)

    def middle(self, x: Tensor) -> Tensor:
        x = (x * 400) * 400 / 1e5  # state
        if self.kind == "norm":
            return self.norm(x)
        if self.kind == "instance":
            return self.group(x.view(-1, 2, WIDTH // 2)).view(x.shape)
        if self.kind == "copied":
            self.mean.copy_(x.detach().mean(0))
        elif self.kind == "average":
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        else:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x


KINDS = "norm", "instance", "copied", "average", "assigned"


@pytest.mark.thorough(but=["norm", "assigned"])
@pytest.mark.parametrize("kind", KINDS)
def test_state_that_no_result_depends_on_is_not_blamed(kind: str) -> None:
    training = Training(lambda: State(kind), 2.0**12, heal=True)
    skipped = [training.step() for _ in range(6)]
    assert skipped == [True] * 4 + [False] * 2
    assert all(line_of("state") in why for why in training.skips[1:])


def test_statistics_are_blamed_where_a_norm_reads_them() -> None:
    training = Training(lambda: State("norm").train(False), 2.0**8)
    assert all(training.step(torch.zeros(6, WIDTH)) for _ in range(2))
    assert "norm.running_mean holds a number that is not finite" in training.skips[1]


def test_the_error_at_the_floor_names_the_op() -> None:
    scale = autoamp.DynamicLossScale(4.0, min_scale=1.0)
    training = Training(Product, 4.0, loss_scale=scale)
    assert training.step()
    assert training.step()
    with pytest.raises(LossScaleError, match=re.escape(line_of("product"))):
        training.step()


def test_a_module_and_its_line_are_named() -> None:
    training = Training(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Product()), 2.0**8
    )
    training.step()
    training.step()
    assert " in 1 (" in training.skips[1]


def test_a_weight_is_named_as_its_users_know_it() -> None:
    inner = nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    training = Training(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), inner), 2.0**8)
    assert training.step(factor=1e6)
    assert "the gradient of 1.1." in training.skips[0]
    assert "read by aten::linear" in training.skips[0]


def test_what_is_not_the_models_fault_is_said_to_be_so() -> None:
    training = Training(Between, 2.0**8)
    assert [training.step(factor=torch.inf) for _ in range(2)] == [True] * 2
    assert "outside of the model" in training.skips[1]
    training = Training(Between, 2.0**8)
    bad = torch.full((6, WIDTH), torch.nan)
    assert [training.step(bad) for _ in range(2)] == [True] * 2
    assert "input.0 holds a number that is not finite" in training.skips[1]


def test_only_steps_after_a_skipped_step_are_watched(monkeypatch) -> None:
    from autoamp.capture import graph

    watched: list[Any] = []
    real = graph.Recorder
    monkeypatch.setattr(
        graph, "Recorder", lambda *a, **k: watched.append(a) or real(*a, **k)
    )
    training = Training(Between, 2.0**8)
    assert not any(training.step() for _ in range(3))
    assert watched == []
    assert training.step(factor=1e9)
    assert watched == []
    assert not training.step()
    assert len(watched) == 1
    assert not training.step()
    assert len(watched) == 1


def test_a_step_that_only_just_overflowed_is_explained_by_the_next() -> None:
    training = Training(Between, 2.0**16)
    x = torch.randn(6, WIDTH)
    while training.step(x, 1e3):
        pass
    count = len(training.skips)
    assert count > 1
    training = Training(Between, autoamp.report(training.model).loss_scale.scale * 2)
    assert training.step(x, 1e3)
    assert not training.step(x, 1e3)
    (why,) = training.skips
    assert "came nearest to the limit of fp16" in why


def test_a_trail_keeps_no_values_alive() -> None:
    training = Training(Product, 2.0**12)
    training.step()
    x = torch.randn(6, WIDTH)
    gone = weakref.ref(x)
    training.step(x)
    del x
    gc.collect()
    assert gone() is None


def test_a_watched_step_has_the_gradients_of_any_other() -> None:
    found = []
    for watches in (False, True):
        training = Training(Region, 2.0**8)
        with torch.no_grad():
            training.model.last.weight.mul_(1e-3)
            training.model.last.bias.zero_()
        record = autoamp.model.conversion.conversion_of(training.model).engine.record
        record.scaling.skip_watch.watching = watches
        torch.manual_seed(1)
        assert not training.step()
        found.append([p.grad.clone() for p in training.model.parameters()])
    for plain, watched in zip(*found, strict=True):
        assert torch.equal(plain, watched)


# -- heal ------------------------------------------------------------------------------


def test_a_rule_is_proposed_once(caplog) -> None:
    training = Training(Product, 2.0**12)
    with caplog.at_level(logging.WARNING, logger="autoamp"):
        assert all(training.step() for _ in range(6))
    proposals = [m for m in caplog.messages if "steps in a row" in m]
    assert len(proposals) == 1
    assert re.search(r"convert\(model, (deny|keep)=\[", proposals[0])
    assert line_of("product") in proposals[0]


def test_a_scale_that_is_to_fall_is_no_reason_for_a_rule(caplog) -> None:
    falling = autoamp.DynamicLossScale(2.0**15, climbs=False)
    training = Training(Backward, 2.0**15, loss_scale=falling)
    with caplog.at_level(logging.WARNING, logger="autoamp"):
        assert all(training.step(factor=16.0) for _ in range(6))
    assert "steps in a row" not in caplog.text


@pytest.mark.thorough(but=["product"])
@pytest.mark.parametrize("name", ["product", "region", "second graph"])
def test_heal_trains_on(name: str, caplog) -> None:
    training = Training(FAULTS[name], 2.0**12, heal=True)
    with caplog.at_level(logging.WARNING, logger="autoamp"):
        skipped = [training.step() for _ in range(8)]
    assert skipped == [True] * 4 + [False] * 4, training.skips
    assert caplog.text.count("captured again with") == 1
    after = autoamp.report(training.model)
    assert len(after.loss_scale.skips) == 4
    assert after.loss_scale.scale == 2.0**8
    assert any(op.precision == "fp32" for op in after.ops)


def test_heal_reaches_deep_copies_and_is_reverted() -> None:
    training = Training(Product, 2.0**12, heal=True)
    twin = copy.deepcopy(training.model)
    x = torch.ones(6, WIDTH)
    assert not twin(1000 * x).isfinite().all()
    for _ in range(4):
        training.step()
    assert twin(1000 * x).isfinite().all()
    autoamp.revert(training.model)
    assert not autoamp.is_converted(training.model)


def test_heal_is_an_option() -> None:
    with pytest.raises(autoamp.OptionError, match="heal='yes' is not True or False"):
        autoamp.convert(Product(), heal="yes")  # type: ignore[arg-type]
