"""Casts: none is made twice, gradients stay exact, and each says where it is from.

Where casts stand is shown in tests/passes/golden/casts.txt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, fx, nn

import autoamp
from tests import small_models
from tests.logs import warned
from tests.passes.write.door import rewritten_graph
from tests.small_models import BF16, Of
from tests.strategies import Program, choices, inputs, programs

WIDTH = 8


@settings(max_examples=40)
@given(programs(), choices())
def test_no_value_is_cast_twice_in_one_place(
    program: Program, options: dict[str, Any]
) -> None:
    found = small_models.rewritten(program, inputs(), **options)
    epochs: dict[str, set[tuple[int, int]]] = {}
    for fact in found.facts.nodes.values():
        for operand in fact.operands:
            where = epochs.setdefault(operand.value, set())
            where.add((fact.region, operand.epoch))
    made = Counter((c.value, c.dtype) for c in found.casts)
    for (value, _), count in made.items():
        returned = value in found.facts.returned
        assert count <= len(epochs.get(value, ())) + returned


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "weight": lambda w: w,
    "turned": lambda w: w.t(),
    "view of turned": lambda w: w.t().unsqueeze(0).squeeze(0),
    "piece of turned": lambda w: w.t().chunk(1, 1)[0],
    "turned piece": lambda w: w.chunk(1, 0)[0].t(),
}


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("view", VIEWS)
def test_the_gradient_of_a_weight_used_often_is_exact(free: bool, view: str) -> None:
    """Gradients 2048 and 21 times 1: one shared bf16 cast would lose the ones.

    They are used in a later region than the one that a view of the weight is made in.
    """

    def function(m: Any, x: Tensor) -> Tensor:
        seen = VIEWS[view](m.weight)
        with torch.no_grad():
            constant = x @ seen
        return sum((x @ seen for _ in range(21)), (2048 * x) @ seen + constant)

    model, x = Of(function, weight=nn.Parameter(torch.eye(WIDTH))), torch.ones(1, WIDTH)
    found = small_models.rewritten(model, (x,), "bf16", free_weights=free)
    found.gm(x).sum().backward()
    weight: Any = model.weight
    assert weight.grad.unique().tolist() == [2048 + 21]


def test_pieces_beside_a_returned_size_are_no_copies(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither `unbind` nor a size is one tensor: no piece is taken for the size."""

    def pieces(m: Any, x: Tensor) -> tuple[Tensor, int]:
        left, right = m.fc(x).unbind(-2)
        return m.fc(left * right), x.shape[0] * 2

    model = autoamp.convert(Of(pieces, fc=nn.Linear(WIDTH, WIDTH)), **BF16)
    for rows in (4, 5):  # the second size makes the size a value of the graph
        result, size = model(torch.randn(rows, 2, WIDTH))
        assert (result.shape, size) == ((rows, WIDTH), rows * 2)
    assert not warned(caplog)


def test_nodes_keep_their_metadata_and_casts_have_that_of_what_they_cast() -> None:
    """The line of the user's code and the module, by which reports find them."""
    x = torch.zeros(4, WIDTH)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).exp()

    gm = torch.export.export(Net(), (x,)).module()
    assert isinstance(gm, fx.GraphModule)
    gm.meta["mine"] = 1
    found = rewritten_graph(gm, (x,), **BF16, deny=("exp",))
    before = {n.name: n for n in found.before.graph.nodes}
    after = {n.name: n for n in found.gm.graph.nodes}
    for name in before.keys() & after.keys():
        assert after[name].meta.keys() == before[name].meta.keys()
        assert after[name].stack_trace == before[name].stack_trace
    assert found.gm.meta == found.before.meta
    linear, cast = after["linear"], after["linear_fp32"]
    assert "self.fc(x)" in linear.stack_trace
    assert cast.stack_trace == linear.stack_trace
    assert cast.meta["nn_module_stack"] == linear.meta["nn_module_stack"]
    kinds = {c.name: c.kind for c in found.casts}
    marked = {n: each.meta["autoamp_cast"] for n, each in after.items() if n in kinds}
    assert marked == kinds


def test_a_view_that_is_repeated_takes_no_name_of_another() -> None:
    """The original's nodes keep their names, by which everything is known of them."""

    def function(m: Any, x: Tensor) -> Tensor:
        for _ in range(2):
            turned = m.weight.t()
            x = x @ turned @ turned
            first, second = m.weight.chunk(2)
            x = torch.cat([x @ first.t(), x @ second.t(), x @ first.t()], -1)[:, 4:]
        return x

    model = Of(function, weight=nn.Parameter(torch.eye(WIDTH)))
    x = torch.ones(2, WIDTH)
    found = small_models.rewritten(model, (x,), "bf16", free_weights=True)
    before = {n.name: n.target for n in found.before.graph.nodes}
    after = {n.name: n.target for n in found.gm.graph.nodes}
    assert {n: t for n, t in after.items() if n in before}.items() <= before.items()
    assert len(after) > len(before)
