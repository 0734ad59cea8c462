"""Rotary position embeddings that are written out run as one call.

Spellings, and chains that are none, are the rows of tests/table/rotary.py; the graph is
shown in golden/rotary.txt of tests/passes.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.metrics import relative_error
from tests.passes.kernels.door import rotary
from tests.says import says
from tests.small_models import Of, converted
from tests.spelled.rotary_embeddings import halves, pairs
from tests.table.rotary import LENGTH, WIDTH, by_llama
from tests.table.rows import ROWS


def model() -> nn.Module:
    return ROWS["rotary/llama"].model()


def inputs(length: int = LENGTH) -> Tensor:
    return torch.randn(3, length, WIDTH)


def embeddings(model: nn.Module) -> list[torch.dtype]:
    """The dtypes of the embeddings that a converted model runs as one call."""
    nodes = (n for gm in autoamp.report(model).graphs for n in gm.graph.nodes)
    return [n.meta["val"].dtype for n in nodes if n.target is rotary]


def test_a_write_between_the_products_is_seen() -> None:
    def written(m: Of, x: Tensor) -> Tensor:
        x = m.get_submodule("fc")(x)
        cos, sin = x.detach().cos(), x.detach().sin()
        straight = x * cos
        x[:1].mul_(2)  # later reads are of `x`, and not of what the call returns
        return m.get_submodule("fc")(straight + halves(x) * sin)

    plain = Of(written, fc=nn.Linear(WIDTH, WIDTH))
    with torch.no_grad():
        ours, x = converted(copy.deepcopy(plain)), inputs()
        assert relative_error(ours(x), plain(x)) < 0.02
    assert not embeddings(ours)


def test_the_cast_that_attention_reads_is_part_of_the_call() -> None:
    ours = converted(model())
    ours(inputs())
    assert embeddings(ours) == [torch.bfloat16] * 2


def test_the_report_counts_it_and_fuse_leaves_it_out() -> None:
    ours, plain = converted(model()), converted(model(), fuse={"rotary": False})
    for each in (ours, plain):
        each(inputs())
    says(str(autoamp.report(ours)), 14, "rotary (2)")
    assert not embeddings(plain)
    assert "kernel" not in str(autoamp.report(plain))


def test_a_length_that_changes_is_not_compared() -> None:
    ours = converted(model())
    plain = autoamp.revert(copy.deepcopy(ours))
    for length in (8, 12, 20):
        given = inputs(length)
        assert relative_error(ours(given), plain(given)) < 0.02
    assert len(embeddings(ours)) == 4  # one graph for 8, one for any other length


@pytest.mark.parametrize("in_pairs", [False, True])
@pytest.mark.parametrize("sign", [-1, 1])
def test_rotary_differentiates_twice(in_pairs: bool, sign: int) -> None:
    x, v = torch.randn(2, 3, 6, requires_grad=True), torch.randn(2, 3, 6)
    cos, sin = torch.randn(3, 6), torch.randn(3, 6)
    other = pairs if in_pairs else halves
    found = []
    for made in (
        by_llama(x, cos, 0 * sin) - sign * other(x) * sin,
        rotary(x, cos, sin, torch.float32, sign, in_pairs),
    ):
        result = (made * v).pow(2).sum()
        (first,) = torch.autograd.grad(result, x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), x)
        found.append((result, first, second))
    for mine, true in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, true)
