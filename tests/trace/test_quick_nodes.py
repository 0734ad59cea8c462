"""Nodes made without torch's search of their arguments are the nodes torch makes."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx, nn

from autoamp import compat


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        found = torch.cat([x, y * self.weight], dim=0)
        return {"a": found[1:, :], "b": torch.add(x, y, alpha=2)}


def _told(graph: fx.Graph) -> list[tuple[object, ...]]:
    return [
        (n.op, str(n.target), n.name, str(n.args), str(n.kwargs), n.type, n.meta)
        for n in graph.nodes
    ]


def test_a_quick_copy_is_torchs_copy() -> None:
    gm = fx.symbolic_trace(Net())
    for at, node in enumerate(gm.graph.nodes):
        if node.op != "output":
            node.meta["at"] = at
    theirs, ours = fx.Graph(), fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    theirs.output(theirs.graph_copy(gm.graph, {}))
    compat.quick_copy(gm.graph, ours, values)
    assert _told(ours) == _told(theirs)
    assert all(old.meta is not new.meta for old, new in values.items())
    for graph in (ours, theirs):
        graph.lint()
    users = [[u.name for u in n.users] for n in ours.nodes]
    assert users == [[u.name for u in n.users] for n in gm.graph.nodes]
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    made, wanted = fx.GraphModule(gm, ours)(x, y), gm(x, y)
    assert all(torch.equal(made[name], wanted[name]) for name in wanted)


def test_a_quick_node_has_its_operands_and_is_found() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = compat.quick_node(graph, "call_function", torch.add, (x, 1), {"alpha": 2})
    bare = compat.quick_node(graph, "call_function", operator.neg, (x,), {}, "wanted")
    assert (node.args, node.kwargs, bare.name) == ((x, 1), {"alpha": 2}, "wanted")
    assert list(x.users) == [node, bare]
    assert graph.find_nodes(op="call_function", target=torch.add) == [node]
