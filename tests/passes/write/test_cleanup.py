"""The clean-up: what does nothing goes, what has an effect stays."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from autoamp import compat
from tests.passes.write.door import clean_up

ATEN = torch.ops.aten
RELU = ATEN.relu.default


def graph_of(steps: str) -> fx.GraphModule:
    """A graph of `steps`: "on" and "off" switch the grad mode, "op" is read."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    for step in steps.split():
        if step in ("on", "off"):
            graph.call_function(compat.SET_GRAD, (step == "on",))
        else:
            made = graph.call_function(RELU, (value,))
            value = made if step == "op" else value
    graph.output(value)
    return fx.GraphModule({}, graph)


def steps_of(gm: fx.GraphModule) -> str:
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    named = {True: "on", False: "off"}
    return " ".join("op" if n.target is RELU else named[n.args[0]] for n in calls)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("op", "op"),
        ("on op", "op"),
        ("off op on op", "off op on op"),
        ("off on op", "op"),
        ("on off on op", "op"),
        ("off on off op", "off op"),
        ("off op off op", "off op op"),
        ("op off op on off op on op", "op off op op on op"),
        ("dead op dead", "op"),
        ("off dead on op", "op"),  # nothing is left between once the dead op has gone
        ("off op on", "off op on"),
    ],
)
def test_idle_switches_and_dead_ops_go(before: str, after: str) -> None:
    gm = graph_of(before)
    cleaned = clean_up(gm)
    assert steps_of(cleaned) == after
    assert cleaned.code.count("aten.relu") == after.count("op")
    assert clean_up(cleaned) is cleaned
    x = torch.tensor([-1.0, 1.0], requires_grad=True)
    with torch.enable_grad():
        found = cleaned(x).requires_grad
    with torch.enable_grad():
        assert found == gm(x).requires_grad


def test_the_graph_starts_in_the_mode_of_its_caller() -> None:
    gm = graph_of("off op on op")
    with torch.no_grad():
        assert steps_of(clean_up(gm)) == "op on op"


def test_writes_and_random_draws_stay() -> None:
    def function(x: Tensor) -> Tensor:
        x.neg_()
        torch.rand_like(x)
        (x + 1).relu()
        return x

    gm = torch.fx.experimental.proxy_tensor.make_fx(function)(torch.randn(2))
    left = [n.target for n in clean_up(gm).graph.nodes if n.op == "call_function"]
    assert left == [ATEN.neg_.default, ATEN.rand_like.default]


def test_a_graph_that_cannot_run_is_refused() -> None:
    gm = graph_of("op op")
    first, second = (n for n in gm.graph.nodes if n.op == "call_function")
    second.append(first)
    with pytest.raises(RuntimeError):
        clean_up(gm)
