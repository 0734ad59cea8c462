"""Models whose calls change what their graphs depend on: `self.losses.append(...)`."""

from __future__ import annotations

import collections
import logging
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.quick import each_with_one
from tests.small_models import BF16

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
CALLS = 26


class Changing(nn.Module):
    """Computes in `net`, and keeps something of each call in `kept`."""

    kept: Any

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.kept = kept

    def step(self, x: Tensor) -> Tensor:
        loss = self.net(x).square().mean()
        return self.keep(loss)

    def forward(self, x: Tensor) -> Tensor:
        return self.step(x)

    def keep(self, loss: Tensor) -> Tensor:
        raise NotImplementedError


class Appends(Changing):
    def keep(self, loss: Tensor) -> Tensor:
        self.kept.append(loss.detach())
        return loss


class AppendsNumbers(Changing):
    def keep(self, loss: Tensor) -> Tensor:
        self.kept.append(loss.item())
        return loss


class Adds(Changing):
    def keep(self, loss: Tensor) -> Tensor:
        self.kept += [loss.detach()]
        return loss


class Keys(Changing):
    def keep(self, loss: Tensor) -> Tensor:
        self.kept[len(self.kept)] = loss.detach()
        return loss


class Fills(Changing):
    def keep(self, loss: Tensor) -> Tensor:
        self.kept.setdefault("losses", []).append(loss.detach())
        return loss


class Nested(Changing):
    def keep(self, loss: Tensor) -> Tensor:
        self.kept.losses.append(loss.detach())
        return loss


class Remembers(Changing):
    def keep(self, loss: Tensor) -> Tensor:
        self.kept.add(len(self.kept))
        return loss


class Anneals(Changing):
    def keep(self, loss: Tensor) -> Tensor:
        self.kept = self.kept * 0.9
        return loss * self.kept


class Counts(Changing):
    def keep(self, loss: Tensor) -> Tensor:
        self.kept += 1
        return loss * 2 if self.kept % 3 == 0 else loss


CASES = [
    (Appends, list),
    (Appends, collections.deque),
    (AppendsNumbers, list),
    (Adds, list),
    (Keys, dict),
    (Fills, dict),
    (Nested, lambda: types.SimpleNamespace(losses=[])),
    (Remembers, set),
    (Anneals, lambda: 1.0),
    (Counts, lambda: 0),
]

CALLED = ["step", "forward"]


def size(kept: Any) -> Any:
    if isinstance(kept, types.SimpleNamespace):
        kept = kept.losses
    if isinstance(kept, dict) and "losses" in kept:
        kept = kept["losses"]
    return kept if isinstance(kept, (int, float)) else len(kept)


@pytest.mark.thorough
@pytest.mark.parametrize(("case", "name"), each_with_one(CASES, CALLED))
def test_every_call_stays_low_and_graphs_are_not_made_for_each(
    case: tuple[type[Changing], Any], name: str, caplog
) -> None:
    kind, make = case
    model, plain = kind(make()), kind(make())
    plain.load_state_dict(model.state_dict())
    autoamp.convert(model, **BF16)
    graphs = []
    for _ in range(CALLS):
        found, true = getattr(model, name)(X), getattr(plain, name)(X)
        assert not torch.equal(found, true), "it was rounded"
        torch.testing.assert_close(found, true, rtol=0.05, atol=0.05)
        graphs.append(len(autoamp.report(model).graphs))
    assert size(model.kept) == size(plain.kept)
    assert graphs[-1] == graphs[CALLS // 2]
    coverage = autoamp.report(model).coverage
    assert (coverage.calls, coverage.calls_aside) == (CALLS, 0)
    assert all(
        row.is_low for row in autoamp.report(model).ops if "linear" in str(row.op)
    )
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


class Settles(Changing):
    """Makes something at its first call, and turns a switch at every call."""

    is_odd = False

    def keep(self, loss: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = [loss.detach()]
        self.is_odd = not self.is_odd
        return loss


def test_what_settles_stays_one_graph() -> None:
    model = autoamp.convert(Settles(None), **BF16)
    for _ in range(CALLS):
        model(X)
    report = autoamp.report(model)
    assert not report.skipped
    assert len(report.graphs) <= 3


@pytest.mark.thorough
def test_the_report_names_what_is_left_to_python() -> None:
    model = autoamp.convert(Appends([]), **BF16)
    for _ in range(CALLS):
        model(X)
    said = [what for what, why in autoamp.report(model).skipped if "grows" in why]
    assert {what.rpartition(" ")[2] for what in said} == {"forward", "step", "keep"}


class Scaled(Changing):
    """Computes with what the user keeps in the model between calls."""

    def keep(self, loss: Tensor) -> Tensor:
        return loss * (self.kept if isinstance(self.kept, float) else len(self.kept))


def changed_outside(model: Changing, call: int) -> None:
    if isinstance(model.kept, float):
        model.kept += 0.5
    else:
        model.kept[f"key {call}"] = call


@pytest.mark.thorough
@pytest.mark.parametrize(("make", "name"), each_with_one([float, dict], CALLED))
def test_past_the_recompile_limit_modules_stay_low(make: Any, name: str) -> None:
    model, plain = Scaled(make()), Scaled(make())
    plain.load_state_dict(model.state_dict())
    autoamp.convert(model, **BF16)
    for call in range(CALLS):
        changed_outside(model, call)
        changed_outside(plain, call)
        found, true = getattr(model, name)(X), getattr(plain, name)(X)
        assert not torch.equal(found, true), "it was rounded"
        torch.testing.assert_close(found, true, rtol=0.05, atol=0.05)
    report = autoamp.report(model)
    assert (report.coverage.calls, report.coverage.calls_aside) == (CALLS, 0)
    assert report.coverage.low_flops == report.coverage.flops > 0
    # A number that changes is an input of one graph.
    met = any("recompile_limit" in why for _, why in report.skipped)
    assert met == (make is dict)
