"""Models whose calls change what their graphs depend on: `self.losses.append(...)`."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.logs import warned
from tests.quick import each_with_one
from tests.small_models import BF16

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
CALLS = 26


class Changing(nn.Module):
    """Computes in `net`, and keeps something of each call in `kept`."""

    def __init__(self, keep: Keep, kept: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.keep, self.kept = keep, kept

    def step(self, x: Tensor) -> Tensor:
        return self.keep(self, self.net(x).square().mean())

    def forward(self, x: Tensor) -> Tensor:
        return self.step(x)


Keep = Callable[[Changing, Tensor], Tensor]


def pair(keep: Keep, make: Callable[[], Any]) -> tuple[Changing, Changing]:
    """A converted model, and one with its weights that is left as it is."""
    model, plain = Changing(keep, make()), Changing(keep, make())
    plain.load_state_dict(model.state_dict())
    return autoamp.convert(model, **BF16), plain


def check_call(model: Changing, plain: Changing, name: str) -> None:
    found, true = getattr(model, name)(X), getattr(plain, name)(X)
    assert not torch.equal(found, true), "it was rounded"
    torch.testing.assert_close(found, true, rtol=0.05, atol=0.05)


def appends(m: Changing, loss: Tensor) -> Tensor:
    m.kept.append(loss.detach())
    return loss


def adds(m: Changing, loss: Tensor) -> Tensor:
    m.kept += [loss.item()]
    return loss


def fills(m: Changing, loss: Tensor) -> Tensor:
    m.kept[len(m.kept)] = m.kept.setdefault("loss", loss.detach())
    return loss


def nested(m: Changing, loss: Tensor) -> Tensor:
    m.kept.losses.append(loss.detach())
    return loss


def remembers(m: Changing, loss: Tensor) -> Tensor:
    m.kept.add(len(m.kept))
    return loss


def anneals(m: Changing, loss: Tensor) -> Tensor:
    m.kept = m.kept * 0.9
    return loss * m.kept


def counts(m: Changing, loss: Tensor) -> Tensor:
    m.kept += 1
    return loss * 2 if m.kept % 3 == 0 else loss


CASES = [
    (appends, list),
    (appends, collections.deque),
    (adds, list),
    (fills, dict),
    (nested, lambda: types.SimpleNamespace(losses=[])),
    (remembers, set),
    (anneals, lambda: 1.0),
    (counts, lambda: 0),
]

CALLED = ["step", "forward"]


def size(kept: Any) -> Any:
    kept = getattr(kept, "losses", kept)
    return kept if isinstance(kept, (int, float)) else len(kept)


@pytest.mark.parametrize(("case", "name"), each_with_one(CASES, CALLED))
def test_every_call_stays_low_and_graphs_are_not_made_for_each(
    case: tuple[Keep, Any], name: str, caplog
) -> None:
    model, plain = pair(*case)
    graphs = []
    for _ in range(CALLS):
        check_call(model, plain, name)
        graphs.append(len(autoamp.report(model).graphs))
    assert size(model.kept) == size(plain.kept)
    assert graphs[-1] == graphs[CALLS // 2]
    report = autoamp.report(model)
    assert (report.coverage.calls, report.coverage.calls_aside) == (CALLS, 0)
    assert all(row.is_low for row in report.ops if "linear" in str(row.op))
    assert not warned(caplog)
    if case == (appends, list):
        said = [what for what, why in report.skipped if "grows" in why]
        names = {what.rpartition(" ")[2] for what in said}
        if name == "forward":
            assert {"step", "appends"} <= names <= {"forward", "step", "appends"}
        else:  # no graph holds the method, but that of the module in it
            assert not names
            assert any(what == "Changing.step" for what, _ in report.skipped)


def test_what_settles_stays_one_graph() -> None:
    """It makes something at its first call, and turns a switch at every call."""

    def settles(m: Any, loss: Tensor) -> Tensor:
        if m.kept is None:
            m.kept = [loss.detach()]
        m.is_odd = not m.is_odd
        return loss

    model: Any = Changing(settles, None)
    model.is_odd = False
    autoamp.convert(model, **BF16)
    for _ in range(CALLS):
        model(X)
    report = autoamp.report(model)
    assert not report.skipped
    assert len(report.graphs) <= 3
