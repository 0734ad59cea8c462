"""A runner shows its observers every node, in checkpointed regions too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from autoamp import compat
from autoamp.graph_functions import checkpointed
from autoamp.node_by_node.runner import Observer, Runner, runs_every_op

X = torch.tensor([1.0, 2.0])


class Noting(Observer):
    def __init__(self, *, adds: float = 0.0) -> None:
        self.adds = adds
        self.seen: list[str] = []
        self.results: list[Any] = []

    def after(self, _: fx.Interpreter, n: fx.Node, value: Any) -> Any:
        if n.op != "call_function":
            return value
        self.seen.append(n.name)
        return value + self.adds if isinstance(value, torch.Tensor) else value

    def ended(self, results: Any) -> None:
        self.results.append(results)


def _body(function: Any, name: str) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.create_node("call_function", function, (x,), name=name),))
    return fx.GraphModule(torch.nn.Module(), graph)


def _calling(target: Any, **bodies: fx.GraphModule) -> fx.GraphModule:
    """A graph that calls `target` with the bodies, on its input."""
    root, graph = torch.nn.Module(), fx.Graph()
    x = graph.placeholder("x")
    for name, body in bodies.items():
        root.add_module(name, body)
    given = [graph.get_attr(name) for name in bodies]
    args = (*given, x) if target is checkpointed else (True, *given, [x])
    graph.output(graph.create_node("call_function", target, args, name="region"))
    return fx.GraphModule(root, graph)


def test_the_body_of_a_checkpointed_region_is_seen() -> None:
    gm, noting = _calling(checkpointed, body=_body(torch.exp, "exp")), Noting()
    (found,) = Runner(gm, [noting]).run(X)
    assert torch.equal(found, X.exp())
    assert noting.seen == ["exp", "region"]
    assert runs_every_op(gm)
    bodies = {name: _body(torch.exp, name) for name in ("yes", "no")}
    assert not runs_every_op(_calling(compat.COND, **bodies))


def test_each_observer_is_given_the_value_that_the_one_before_has_given() -> None:
    first, second = Noting(adds=1.0), Noting(adds=10.0)
    (found,) = Runner(_body(torch.exp, "exp"), [first, second]).run(X)
    assert torch.equal(found, X.exp() + 11)


def test_a_run_ends_once_and_without_results_where_it_raises() -> None:
    gm, noting = _calling(checkpointed, body=_body(torch.exp, "exp")), Noting()
    results = Runner(gm, [noting]).run(X)
    assert noting.results == [results]
    runner = Runner(_body(torch.linalg.cholesky, "fails"), [noting])
    with pytest.raises(RuntimeError):
        runner.run(X)
    assert noting.results[1:] == [None]
    assert not runner.env
