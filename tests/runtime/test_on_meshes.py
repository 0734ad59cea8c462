"""A graph on DTensors that the pass fails on runs under autocast, and says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import autoamp
from autoamp import CaptureError
from autoamp.passes.see.dtensors_as_whole import Meshes
from tests.logs import warned
from tests.one_rank import one_rank
from tests.says import says
from tests.small_models import BF16 as OPTIONS

OLDER_TORCH = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


def net(mesh: Any) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    return parallelize_module(
        made, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )


@pytest.fixture
def _failing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Any:
        raise CaptureError("a mesh by moonlight")

    monkeypatch.setattr("autoamp.passes.see.normalise.whole_inputs", fails)


@pytest.mark.usefixtures("_failing")
def test_it_is_autocasts_to_the_bit(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(4, 16)
    with one_rank() as mesh:
        model = net(mesh)
        with torch.autocast("cpu", torch.bfloat16):
            expected = model(x)
        autoamp.convert(model, **OPTIONS)
        found = model(x)
        ((_, why),) = autoamp.report(model).skipped
    assert found.dtype == torch.float32  # as the call gives without autoamp
    assert torch.equal(found, expected.float())
    says(why, "torch.autocast")
    says(warned(caplog), "a mesh by moonlight")


@pytest.mark.usefixtures("_failing")
def test_strict_is_an_error() -> None:
    with one_rank() as mesh:
        model = autoamp.convert(net(mesh), **OPTIONS, strict=True)
        with pytest.raises(CaptureError) as raised:
            model(torch.randn(4, 16))
        says(raised, "a mesh by moonlight")


def test_calls_that_dynamo_hides_are_an_error_that_says_so() -> None:
    """Torch 2.11 hides them; here its way of naming them is copied."""

    def prim_redistribute(x: Any) -> Any:
        return x

    prim_redistribute.__module__ = "torch._dynamo.variables.tensor"
    graph = fx.Graph()
    graph.call_function(prim_redistribute, (graph.placeholder("x"),))
    meshes = Meshes(fx.GraphModule(nn.Module(), graph))
    (call,) = graph.find_nodes(op="call_function", target=prim_redistribute)
    with pytest.raises(CaptureError) as raised:
        meshes.run(call, [None])
    says(raised, "placements")


@pytest.mark.skipif(
    OLDER_TORCH,
    reason="Dynamo of a torch before 2.13 hides the placements of calls on DTensors, "
    "so that graphs with such calls run under autocast",
)
def test_other_sizes_make_no_graph_for_each_size() -> None:
    """One for the first size, one for all others, as without DTensors."""
    with one_rank() as mesh:
        model = autoamp.convert(net(mesh), **OPTIONS, strict=True)
        for rows in (8, 6, 10, 4, 12, 7):
            model(torch.randn(rows, 16)).sum().backward()
        report = autoamp.report(model)
    assert len(report.graphs) == 2
    assert report.skipped == []
