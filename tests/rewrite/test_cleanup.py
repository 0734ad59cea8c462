"""Each rule of the clean-up: what does nothing goes, what has an effect stays."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from autoamp import compat
from autoamp.rewrite.copied import clean_up

ATEN = torch.ops.aten


def graph_of(steps: str) -> fx.GraphModule:
    """A graph of `steps`: "on" and "off" switch the grad mode, "op" is read."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    for step in steps.split():
        if step == "op":
            value = graph.call_function(ATEN.relu.default, (value,))
        elif step == "dead":
            graph.call_function(ATEN.relu.default, (value,))
        else:
            graph.call_function(compat.SET_GRAD, (step == "on",))
    graph.output(value)
    return fx.GraphModule({}, graph)


def steps_of(gm: fx.GraphModule) -> str:
    names = {compat.SET_GRAD: ("off", "on"), ATEN.relu.default: ("op", "op")}
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    return " ".join(names[n.target][n.args[0] is True] for n in calls)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("op", "op"),
        ("on op", "op"),
        ("off op on op", "off op on op"),
        ("off on op", "op"),
        ("off on off op", "off op"),
        ("off op off op", "off op op"),
        ("op off op on off op on op", "op off op op on op"),
        ("dead op dead", "op"),
        # Nothing is left between the two once the dead op has gone.
        ("off dead on op", "op"),
        ("off op on", "off op on"),
    ],
)
def test_idle_switches_and_dead_ops_go(before: str, after: str) -> None:
    gm = graph_of(before)
    removed = len(before.split()) - len(after.split())
    cleaned = clean_up(gm)
    assert len(gm.graph.nodes) - len(cleaned.graph.nodes) == removed
    assert steps_of(cleaned) == after
    assert clean_up(cleaned) is cleaned


def test_the_graph_starts_in_the_mode_of_its_caller() -> None:
    gm = graph_of("off op on op")
    with torch.no_grad():
        gm = clean_up(gm)
    assert steps_of(gm) == "op on op"


def test_the_code_that_runs_is_the_cleaned_one() -> None:
    gm = clean_up(graph_of("off on op"))
    assert "grad" not in gm.code
    x = torch.tensor([-1.0, 1.0], requires_grad=True)
    assert gm(x).requires_grad


def test_writes_and_random_draws_stay() -> None:
    def function(x: Tensor) -> Tensor:
        x.neg_()
        torch.rand_like(x)
        (x + 1).relu()
        return x

    gm = torch.fx.experimental.proxy_tensor.make_fx(function)(torch.randn(2))
    gm = clean_up(gm)
    left = [n.target for n in gm.graph.nodes if n.op == "call_function"]
    assert left == [ATEN.neg_.default, ATEN.rand_like.default]


def test_a_graph_that_cannot_run_is_refused() -> None:
    gm = graph_of("op op")
    first, second = (n for n in gm.graph.nodes if n.op == "call_function")
    second.append(first)
    with pytest.raises(RuntimeError, match="used before it has been defined"):
        clean_up(gm)
