"""Verdicts on calls of which the rule, or torch alone, says more than the op's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autoamp.passes.rules import Category
from autoamp.passes.run import rewrite_graph
from autoamp.training.options import Options
from tests.passes.decide.door import Verdict
from tests.says import says
from tests.small_models import Of
from tests.strategies import capture

BF16, FP16 = torch.bfloat16, torch.float16


def verdict_on(
    call: Callable[..., Any], low: torch.dtype = BF16, **options: Any
) -> Verdict:
    """The verdict on a call that reads a low product, and ends the model."""
    gm = capture(Of(lambda m, x: call(x @ x)), 1)
    chosen = Options(do_no_harm=False, **options)
    found = rewrite_graph(gm, [torch.ones(4, 4)], chosen, low)
    return [*found.classified.verdicts.values()][-1]


@pytest.mark.parametrize(
    ("low", "exponent", "category"),
    [
        (BF16, -4.0, Category.INFER),
        (BF16, 4, Category.INFER),
        (BF16, 4.5, Category.DENY),
        (BF16, -5, Category.DENY),
        (FP16, 0.5, Category.INFER),
        (FP16, 2, Category.DENY),
    ],
)
def test_a_power_is_low_where_its_exponent_is_in_the_rules_range(
    low: torch.dtype, exponent: float, category: Category
) -> None:
    verdict = verdict_on(lambda x: x.pow(exponent), low)
    assert verdict.category is category


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_noise_may_be_rounded_where_no_fp32_is_asked_for(dtype: Any) -> None:
    verdict = verdict_on(lambda x: torch.randn_like(x, dtype=dtype))
    assert verdict.pinned
    assert verdict.may_round is (dtype is None)


@pytest.mark.parametrize(
    ("call", "listed", "category", "said"),
    [
        (torch.exp, ("infer", "exp"), Category.INFER, "pointwise"),
        (torch.t, ("clear", "t"), Category.CLEAR, "view"),
        (torch.cumprod, ("deny", "cumprod"), Category.DENY, "list"),
    ],
)
def test_of_an_op_in_no_list_torch_says_what_it_is(
    call: Any, listed: tuple[str, str], category: Category, said: str
) -> None:
    given = (0,) if call is torch.cumprod else ()
    verdict = verdict_on(lambda x: call(x, *given), unlist=(listed,))
    assert (verdict.category, verdict.origin) == (category, "schema")
    assert verdict.listed is False
    assert said in verdict.reason


def test_an_op_that_autocast_alone_keeps_in_fp32_says_so() -> None:
    verdict = verdict_on(torch.trace)
    assert (verdict.pinned, verdict.origin) == (True, "torch.autocast")


def test_a_call_that_mixes_integers_in_is_left_as_written() -> None:
    verdict = verdict_on(lambda x: torch.kron(x, torch.arange(4)))
    assert verdict.pinned
    says(verdict.reason, "other", "integers")
