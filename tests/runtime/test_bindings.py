"""Graphs run by torch's own functions, which call the very ops of the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import autoamp
from autoamp.passes.write.bindings import BINDINGS, with_bindings
from tests.small_models import converted, mlp

A = torch.ops.aten
X = torch.randn(2, 4, 6, 6)
ROWS = torch.rand(4, 6)

CALLS: dict[Any, tuple[Any, ...]] = {
    A.add.Tensor: (ROWS, ROWS),
    A.addmm.default: (ROWS[0], ROWS, torch.randn(6, 6)),
    A.batch_norm.default: (
        *(X, ROWS[:, 0], ROWS[:, 1], torch.zeros(4), torch.ones(4)),
        *(True, 0.1, 1e-5, False),
    ),
    A.bmm.default: (X[0], X[1]),
    A.cat.default: ([ROWS, ROWS], 1),
    A.chunk.default: (ROWS, 2, 1),
    A.clone.default: (ROWS,),
    A.contiguous.default: (ROWS.t(),),
    A.conv1d.default: (X[0], torch.randn(3, 6, 2), None, [1], [1], [1], 1),
    A.conv2d.default: (X, torch.randn(8, 2, 3, 3), None, [2, 1], [1, 1], [1, 1], 2),
    A.conv3d.default: (X[None], torch.randn(3, 2, 1, 1, 1), torch.zeros(3)),
    A.div.Tensor: (ROWS, 3.0),
    A.dropout.default: (ROWS, 0.5, True),
    A.embedding.default: (ROWS, torch.tensor([[1, 2], [0, 3]]), 0, False, False),
    A.expand.default: (ROWS[:, None], [4, 3, 6]),
    A.flatten.using_ints: (X, 1, 2),
    A.group_norm.default: (X, 2, ROWS[:, 0], ROWS[:, 1], 1e-5, False),
    A.layer_norm.default: (ROWS, [6], ROWS[0], ROWS[1], 1e-6, False),
    A.linear.default: (ROWS, torch.randn(3, 6), torch.zeros(3)),
    A.log_softmax.int: (ROWS, -1),
    A.matmul.default: (ROWS, ROWS.t()),
    A.max_pool2d.default: (X, [3, 3], [2, 2], [1, 1], [1, 1], True),
    A.permute.default: (X, [0, 2, 3, 1]),
    A.reshape.default: (ROWS, [3, -1]),
    A.scaled_dot_product_attention.default: (X, X, X, None, 0.0, True),
    A.select.int: (X, 1, -1),
    A.softmax.int: (ROWS, 1, torch.float64),
    A.transpose.int: (X, 1, -1),
    A.unbind.int: (X, 1),
    A.unsqueeze.default: (X, -1),
    A.view.default: (ROWS, [2, 12]),
}
"""Arguments of ops as graphs have them; of others that take a tensor alone, `ROWS`."""

PAIRS = {A.mul.Tensor, A.sub.Tensor}


def arguments(op: Any) -> tuple[Any, ...]:
    return CALLS.get(op, (ROWS, ROWS) if op in PAIRS else (ROWS,))


def called(function: Any, arguments: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """What a call returns, and the op it calls, before it is taken apart."""
    tensors = [a for a in arguments if isinstance(a, Tensor)]

    def run(*given: Tensor) -> Any:
        left = iter(given)
        swapped = [next(left) if isinstance(a, Tensor) else a for a in arguments]
        return function(*swapped)

    gm = make_fx(run, pre_dispatch=True)(*tensors)
    ops = [
        n.target for n in gm.graph.nodes if isinstance(n.target, torch._ops.OpOverload)
    ]
    torch.manual_seed(0)
    return run(*tensors), ops


@pytest.mark.parametrize("op", BINDINGS, ids=str)
def test_a_binding_calls_its_op(op: Any) -> None:
    given = arguments(op)
    expected, ops = called(op, given)
    found, bound_ops = called(BINDINGS[op], given)
    assert op in ops
    assert bound_ops == ops
    pairs = zip(pytree.tree_leaves(expected), pytree.tree_leaves(found), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_the_graph_that_is_reported_keeps_its_ops() -> None:
    model = converted(mlp())
    model(torch.randn(4, 8))
    (gm,) = autoamp.report(model).graphs
    assert "torch.ops.aten.linear.default(" in gm.code
    assert "aten" not in with_bindings(gm).code
    assert "torch.ops.aten.linear.default(" in gm.code
