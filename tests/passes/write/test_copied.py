"""A pass edits a copy, of a graph and of the bodies inside of it."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from autoamp.passes.write.copied import edited


class Nested(nn.Module):
    """A graph that calls another."""

    def __init__(self, outer: str, inner: str) -> None:
        super().__init__()
        self.outer = outer
        self.body = fx.symbolic_trace(lambda x: getattr(torch, inner)(x) + 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = getattr(torch, self.outer)(self.body(x))
        return found


class Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, name: str) -> bool:
        return True


def finds(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is torch.exp]


def exp_to_sin(graph: fx.Graph) -> None:
    for node in finds(graph):
        node.target = torch.sin


@pytest.mark.parametrize("outer", ["exp", "cos"])
@pytest.mark.parametrize("inner", ["exp", "cos"])
def test_bodies_are_edited_too_and_only_what_changes_is_copied(
    outer: str, inner: str
) -> None:
    model = Nested(outer, inner)
    gm = fx.GraphModule(model, Tracer().trace(model))
    new = edited(gm, exp_to_sin, finds=finds)
    assert (new is gm) is (outer == inner == "cos")
    assert (new.body is gm.body) is (inner == "cos")
    x = torch.ones(3)
    assert torch.equal(gm(x), model(x))
    written = {"exp": "sin", "cos": "cos"}
    new.recompile()
    new.body.recompile()
    assert torch.equal(new(x), Nested(written[outer], written[inner])(x))
