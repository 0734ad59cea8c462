"""Masks that hold numbers beyond the range saturate, and make no NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autoamp.dtypes import parse_low_dtype
from autoamp.rewrite.rewritten import Rewritten
from tests.small_models import Of, rewriting

WIDTH = 8


def of(function: Callable[..., Any]) -> Of:
    """A model of one function and two layers."""
    return Of(function, fc=nn.Linear(WIDTH, WIDTH), other=nn.Linear(WIDTH, WIDTH))


rewritten = rewriting(of, lambda: torch.randn(4, WIDTH), "fp16")


def dtype(found: Rewritten, name: str) -> torch.dtype:
    return next(n for n in found.gm.graph.nodes if n.name == name).meta["val"].dtype


def attention(m: Of, x: Tensor, keep: Tensor, kind: str = "add") -> Tensor:
    """Attention written out, one row fully masked by the smallest fp32 number."""
    least = torch.finfo(torch.float32).min
    scores = m.fc(x) @ m.other(x).t()
    if kind == "add":
        scores = scores + (1.0 - keep.float()) * least
    elif kind == "where":
        scores = torch.where(keep, scores, torch.full_like(scores, least))
    elif kind == "number":
        scores = torch.where(keep, scores, torch.tensor(least))
    elif kind == "made":
        scores = torch.where(keep, scores, torch.full([], least))
    elif kind == "fill":
        scores = scores.masked_fill(~keep, least)
    else:
        given = (1.0 - keep.float()) * least
        return functional.scaled_dot_product_attention(
            m.fc(x)[None], m.other(x)[None], x[None], attn_mask=given[None]
        )[0]
    return scores.softmax(-1) @ m.fc(x)


@pytest.mark.thorough(
    but=[
        "lists0-add-fp16",
        "lists0-number-bf16",
        "lists0-fill-bf16",
        "lists1-where-fp16",
        "lists1-made-fp16",
        "lists1-sdpa-bf16",
    ]
)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("kind", ["add", "where", "number", "made", "fill", "sdpa"])
@pytest.mark.parametrize("lists", [{}, {"allow": ["softmax", "add", "where"]}])
def test_a_fully_masked_row_gives_no_nan(
    precision: str, kind: str, lists: dict[str, list[str]]
) -> None:
    keep = torch.ones(4, 4, dtype=torch.bool).tril()
    keep[2] = False
    given = (torch.randn(4, WIDTH), keep)
    found = rewritten(
        lambda m, x, k: attention(m, x, k, kind), *given, precision=precision, **lists
    )
    assert found.assignment.low
    result = found.gm(*given)
    assert result.isfinite().all()
    result.sum().backward()
    for parameter in found.gm.parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_mask_given_as_an_input_saturates(precision: str) -> None:
    def function(m: Of, x: Tensor, mask: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(
            m.fc(x)[None], m.other(x)[None], m.fc(x)[None], attn_mask=mask[None]
        )

    mask = torch.full((4, 4), torch.finfo(torch.float32).min)
    given = (torch.randn(4, WIDTH), mask)
    found = rewritten(function, *given, precision=precision)
    assert "x1" in found.classified.extreme
    assert "scaled_dot_product_attention" in found.assignment.low
    assert found.gm(*given).isfinite().all()


@pytest.mark.parametrize(
    ("precision", "literal"), [("fp16", -1e9), ("bf16", -3.4028234663852886e38)]
)
def test_literals_beyond_the_range_are_clamped(precision: str, literal: float) -> None:
    def function(m: Of, x: Tensor, mask: Tensor) -> Tensor:
        return m.other(m.fc(x).masked_fill(mask, literal).softmax(-1))

    given = (torch.randn(4, WIDTH), torch.ones(4, WIDTH, dtype=torch.bool))
    found = rewritten(function, *given, precision=precision, allow=["softmax"])
    filled = next(n for n in found.gm.graph.nodes if n.name == "masked_fill")
    largest = torch.finfo(parse_low_dtype(precision)).max
    if filled.meta["val"].dtype is not torch.float32:
        assert filled.args[2] == -largest
    assert found.gm(*given).isfinite().all()
    infinite = rewritten(
        lambda m, x, k: m.fc(x).masked_fill(k, float("-inf")).clone(), *given
    )
    assert infinite.gm(*given).isinf().all()


def test_only_the_mask_is_extreme() -> None:
    """What saturates is rounded by no cast; scores are no mask."""

    def masked(m: Of, x: Tensor, mask: Tensor) -> Tensor:
        scores = m.fc(x) @ m.other(x).t()
        return (scores + mask).softmax(-1) @ x

    mask = torch.full((4, 4), torch.finfo(torch.float32).min).triu(1)
    for grad in (True, False):
        found = rewritten(masked, torch.randn(4, WIDTH), mask, grad=grad)
        assert found.classified.extreme & {"x0", "x1", "linear"} == {"x1"}


def test_a_divisor_fills_no_mask() -> None:
    """fp16 has few digits for what a huge divisor makes, and nothing to saturate."""
    found = rewritten(lambda m, x: m.fc(x.softmax(-1) / 5e5))
    assert "div" not in found.classified.extreme


@pytest.mark.parametrize(("limit", "extreme"), [(1e5, True), (5.0, False)])
def test_what_is_cut_off_in_range_is_not_extreme(limit: float, extreme: bool) -> None:
    found = rewritten(lambda m, x: m.fc((x * 1e6).clamp(-limit, limit)))
    assert "mul" in found.classified.extreme
    assert ("clamp" in found.classified.extreme) == extreme
