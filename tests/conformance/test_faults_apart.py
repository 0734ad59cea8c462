"""Another torch under `backend="auto"`: names that the compilation apart asks for.

Each name is taken away in the process that trains, in the one that compiles, or in
both.  The model trains on as with `backend="eager"`, and one line says why; without
some names it is compiled all the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import autoamp
from autoamp.capture import background
from autoamp.capture.background import Background
from tests.conformance.apart_without import ABSENT, VARIABLE
from tests.conformance.table import Figures
from tests.training.steps import BF16

CHILD = "tests.conformance.apart_without"
LIMIT = 240.0

AT_THE_START = ("_is_default", "get_config_copy")
"""Without these the process that trains starts no other."""

AT_THE_END = (
    "counters",
    "fxgraph_cache_hit",
    "graph_compile",
    "collect_bw_donated_buffer_idxs",
    "cache_key_tag",
    "compile_with",
)
"""Without these the process that compiles fails; the process that trains has them."""

TAKING = ("graph_compile", "collect_bw_donated_buffer_idxs", "cache_key_tag")
"""Without these the process that trains cannot take the code that was compiled."""

NEEDLESS = ("force_non_lazy_backward_lowering", "compile_lock")

SAID = {
    "fxgraph_cache_hit": "keeps no code of this graph in its cache",
    "collect_bw_donated_buffer_idxs": "may write to saved tensors",
    "compile_with": "no compiler is here",
}


@pytest.fixture(autouse=True)
def early(monkeypatch, tmp_path_factory) -> Iterator[None]:
    """Graphs are compiled early, and all tests share one cache."""
    cache = tmp_path_factory.getbasetemp() / "inductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    monkeypatch.setattr(background, "LEAST_CALLS", 2)
    monkeypatch.setattr(background, "SECONDS_A_NODE", 0.0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Training:
    """A small model that trains; the graph of its forward."""

    def __init__(self, backend: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        autoamp.convert(self.model, backend=backend, **BF16)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.x = torch.randn(4, 8)

    def step(self) -> float:
        loss = self.model(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def trained(
    patch: pytest.MonkeyPatch, *, at_the_end: str = ""
) -> tuple[Background, list[float], list[float], autoamp.Report]:
    """The graph, and the losses under `auto` and `eager`.

    Args:
        at_the_end: what is taken away once the other process is over.
    """
    found: list[Background] = []
    begin = Background.__init__

    def noted(self: Background, *args: object, **kwargs: object) -> None:
        begin(self, *args, **kwargs)  # type: ignore[arg-type]
        found.append(self)

    patch.setattr(Background, "__init__", noted)
    ours, eager = Training("auto"), Training("eager")
    losses = [ours.step() for _ in range(2)]
    (graph,) = found
    end = time.monotonic() + LIMIT
    while graph._compilation is not None and not graph._compilation.is_over:
        assert time.monotonic() < end
        time.sleep(0.05)
    if at_the_end:
        ABSENT[at_the_end](patch)
    losses += [ours.step() for _ in range(4)]
    report = autoamp.report(ours.model)
    return graph, losses, [eager.step() for _ in range(6)], report


def assert_stays_eager(
    name: str, patch: pytest.MonkeyPatch, caplog, *, at_the_end: str = ""
) -> None:
    with caplog.at_level(logging.WARNING, "autoamp"):
        graph, losses, wanted, report = trained(patch, at_the_end=at_the_end)
    said = SAID.get(name, name)
    assert said in graph.state
    assert losses == wanted
    assert report.skipped == []
    told = [r.message for r in caplog.records if "stays eager" in r.message]
    assert len(told) == 1
    assert said in told[0]
    assert graph._captured is graph._ready is graph._compilation is None


@pytest.mark.parametrize("name", AT_THE_START)
def test_nothing_is_started_without(
    name: str, monkeypatch, caplog, figures: Figures
) -> None:
    ABSENT[name](monkeypatch)
    assert_stays_eager(name, monkeypatch, caplog)
    figures.count("names taken away")


@pytest.mark.parametrize("name", AT_THE_END)
def test_a_graph_stays_eager_where_the_other_process_is_without(
    name: str, monkeypatch, caplog, figures: Figures
) -> None:
    monkeypatch.setattr("autoamp.compat.apart._CHILD", CHILD)
    monkeypatch.setenv(VARIABLE, name)
    assert_stays_eager(name, monkeypatch, caplog)
    figures.count("names taken away")


@pytest.mark.parametrize("name", TAKING)
def test_the_code_is_not_taken_without(
    name: str, monkeypatch, caplog, figures: Figures
) -> None:
    assert_stays_eager(name, monkeypatch, caplog, at_the_end=name)
    figures.count("names taken away")


@pytest.mark.parametrize("name", NEEDLESS)
def test_a_graph_is_compiled_all_the_same_without(
    name: str, monkeypatch, figures: Figures
) -> None:
    """The backward is compiled at its first call then; locks are autoamp's own."""
    monkeypatch.setattr("autoamp.compat.apart._CHILD", CHILD)
    monkeypatch.setenv(VARIABLE, name)
    ABSENT[name](monkeypatch)
    graph, losses, wanted, report = trained(monkeypatch)
    assert graph.state == "compiled"
    assert report.skipped == []
    torch.testing.assert_close(losses, wanted, rtol=2**-7, atol=1e-4)
    figures.count("names taken away")


def test_a_switch_of_another_torch_is_left_alone(monkeypatch) -> None:
    """A switch that the process that trains has, and the other has not, and so on."""
    from autoamp.compat import apart

    assert apart._switch("cudnn.no_such_switch") is None
    monkeypatch.setattr(apart, "_SWITCHES", ("no_such.switch", *apart._SWITCHES))
    graph, *_ = trained(monkeypatch)
    assert graph.state == "compiled"
