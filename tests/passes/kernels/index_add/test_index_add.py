"""`index_add`, which keeps nothing of what it adds, beside torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.metrics import relative_error, saved_bytes
from tests.passes.kernels.door import index_add, index_add_
from tests.small_models import converted

CASES: dict[str, tuple[tuple[int, ...], int, list[int], dict[str, Any]]] = {
    "rows": ((5, 3), 0, [0, 4, 0, 2], {}),
    "columns": ((3, 5), 1, [1, 1, 1, 0], {}),
    "from the end": ((2, 3, 5), -1, [4, 3], {}),
    "a factor": ((5, 3), 0, [0, 4, 0, 2], {"alpha": -0.5}),
    "a vector": ((5,), 0, [0, 0], {}),
    "nothing": ((5, 3), 0, [], {}),
}


def operands(name: str, dtype: torch.dtype) -> tuple[Tensor, int, Tensor, Tensor]:
    shape, dim, index, _ = CASES[name]
    torch.manual_seed(0)
    rows = [*shape]
    rows[dim] = len(index)
    data, source = (torch.randn(s, dtype=dtype).requires_grad_() for s in (shape, rows))
    return data, dim, torch.tensor(index, dtype=torch.long), source


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_the_numbers_are_torchs(name: str, dtype: torch.dtype, in_place: bool) -> None:
    """The result, both gradients, and the gradients of those."""
    found = []
    pairs = (index_add_, Tensor.index_add_), (index_add, torch.index_add)
    for call in pairs[not in_place]:
        data, dim, index, source = operands(name, dtype)
        out = call(data * 1, dim, index, source, **CASES[name][3])
        slopes = torch.autograd.grad(
            (out.square()).sum(), (data, source), create_graph=True
        )
        again = torch.autograd.grad(sum(s.square().sum() for s in slopes), source)
        found.append([out, *slopes, *again])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("needs", ["data", "source"])
def test_one_operand_alone_takes_a_gradient(needs: str) -> None:
    data, dim, index, source = operands("rows", torch.float32)
    (source if needs == "data" else data).requires_grad_(False)
    index_add(data, dim, index, source).sum().backward()
    given = data if needs == "data" else source
    assert torch.equal(given.grad, torch.ones_like(given))


class Messages(nn.Module):
    """Two layers of a graph network: each sends its rows along the edges."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.in_place = in_place

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        sent, got = edges
        for layer in self.layers:
            summed = torch.zeros(x.shape, dtype=torch.float32)
            rows = x[sent].float()
            if self.in_place:
                summed.index_add_(0, got, rows)
            else:
                summed = summed.index_add(0, got, rows)
            x = F.relu(layer(summed))
        return x


@pytest.mark.parametrize("in_place", [False, True])
def test_a_graph_network_keeps_no_messages(in_place: bool) -> None:
    torch.manual_seed(1)
    x, edges = torch.randn(8, 16), torch.randint(8, (2, 64))
    plain, model = Messages(in_place), converted(Messages(in_place))
    results = [each(x, edges) for each in (plain, model)]
    for result in results:
        result.square().sum().backward()
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(relative_error(a.grad, b.grad) < 0.02 for b, a in pairs)
    messages = 64 * 16 * 4
    kept = [saved_bytes(lambda m=m: m(x, edges)).total for m in (plain, model)]
    assert kept[0] > messages > kept[1]
