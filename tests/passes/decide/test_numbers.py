"""Numbers in tensors, and masks, are seen as Python's numbers are, if they are known.

That results are true where fp16 has no digits for a number is shown by the rows of
tests/table/numbers_in_tensors.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autoamp
from tests.says import says
from tests.small_models import Of, node, rewriting
from tests.table.numbers_in_tensors import LARGE, PARTS, SMALL, WIDTH, Spellings

LEAST = torch.finfo(torch.float32).min
X = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))


def of(function: Any) -> Of:
    torch.manual_seed(0)
    parts = {name: make() for name, make in PARTS.items()}
    model = Of(function, other=nn.Linear(WIDTH, WIDTH), **parts)
    model.attribute = torch.tensor(1e-8)  # no buffer
    return model


rewritten = rewriting(of, lambda: X.clone().requires_grad_(), "fp16")


def error(found: Tensor, true: Tensor) -> float:
    return ((found - true).norm() / true.norm()).item()


# -- numbers ---------------------------------------------------------------------------


def test_of_results_that_are_no_float_tensor_no_number_is_known() -> None:
    """A product of integers wraps around, and `frexp` gives two tensors."""

    def function(m: Any, x: Tensor) -> list[Tensor]:
        wrapped = torch.tensor(30000, dtype=torch.int16) * 4  # -11072
        fraction, _ = torch.frexp(torch.tensor(1e9))
        return [m.fc(x) * wrapped, m.fc(x) * fraction]

    decisions = rewritten(function).assignment.decisions.values()
    reasons = [d.reason for d in decisions if d.op.startswith("aten::mul.")]
    assert len(reasons) == 2
    assert not any("fp16" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("spellings", "op"), [(SMALL, "mul"), (LARGE, "div")], ids=["small", "large"]
)
def test_a_number_that_fp16_cannot_hold_keeps_its_op_in_fp32(
    spellings: Spellings, op: str
) -> None:
    """A divisor cut off at 65504 would divide by 15000 times less."""

    def function(m: Any, x: Tensor) -> list[Tensor]:
        return [spelt(m, m.fc(x)) for spelt in spellings.values()]

    found = rewritten(function)
    decisions = found.assignment.decisions.values()
    ops = [d for d in decisions if d.op.startswith(f"aten::{op}.")]
    assert len(ops) >= len(spellings)
    for decision in ops:
        assert not decision.low
        says(decision.reason, "fp16")
    results = zip(spellings, found.gm(X), of(function)(X), strict=True)
    for name, ours, exact in results:
        assert error(ours, exact) < torch.finfo(torch.float16).eps, name
    bf16 = rewritten(function, precision="bf16").assignment.decisions.values()
    assert not any("rounds to zero" in d.reason for d in bf16)


SHARED = torch.tensor(1e-8)
HELD: Spellings = {
    "tensor": SMALL["tensor"],
    "full like": SMALL["full like"],
    "attribute": lambda m, h: h * m.attribute,
    "buffer": SMALL["buffer"],
    "element": SMALL["element"],
    "global": lambda m, h: h * SHARED,
    "divisor": LARGE["buffer"],
}


def test_a_converted_model_knows_its_own_numbers() -> None:
    """Dynamo hands buffers, attributes and globals in; their values are the model's."""
    model = of(lambda m, x: [spelt(m, m.fc(x)) for spelt in HELD.values()])
    truth = model(X)
    autoamp.convert(model, precision="fp16", do_no_harm=False, strict=True)
    for name, ours, exact in zip(HELD, model(X), truth, strict=True):
        assert error(ours, exact) < 2**-10, name
    low = {op.op for op in autoamp.report(model).ops if op.is_low}
    assert "aten::linear.default" in low


def test_an_argument_and_a_parameter_are_known_to_nobody() -> None:
    model = of(lambda m, x, s: m.fc(x) * s * m.trained)
    autoamp.convert(model, precision="fp16", do_no_harm=False, strict=True)
    model(X, torch.tensor(1e-8))
    assert all(op.is_low for op in autoamp.report(model).ops if "mul" in op.op)


def test_a_mask_of_several_numbers_is_none_of_them() -> None:
    """The causal mask, made beside the scores: adding it is no arithmetic with 1e9."""

    def causal(m: Any, x: Tensor) -> Tensor:
        scores = m.fc(x) @ m.fc(x).t()
        mask = scores.new_full(scores.shape, -1e9).triu(1)
        return (scores + mask).softmax(-1) @ m.fc(x)

    reasons = rewritten(causal).assignment.decisions
    assert "computes with" not in reasons["add"].reason


# -- masks of numbers beyond the range saturate, and make no NaN -----------------------


def keep() -> Tensor:
    """Each row sees what is before it, and the third sees nothing."""
    found = torch.ones(32, 32, dtype=torch.bool).tril()
    found[2] = False
    return found


def masked(m: Any, x: Tensor, keep: Tensor, given: Tensor) -> list[Tensor]:
    """Attention, with a row that is masked out, in all the ways of writing a mask."""
    s = m.fc(x) @ m.other(x).t()
    added = (1.0 - keep.float()) * LEAST
    scores = [
        s + added,
        torch.where(keep, s, torch.full_like(s, LEAST)),
        torch.where(keep, s, torch.tensor(LEAST)),
        torch.where(keep, s, torch.full([], LEAST)),
        s.masked_fill(~keep, LEAST),
        s.masked_fill(~keep, -1e9),
    ]
    q, k, v = (each[None] for each in (m.fc(x), m.other(x), m.fc(x)))
    whole = functional.scaled_dot_product_attention
    return [each.softmax(-1) @ m.fc(x) for each in scores] + [
        whole(q, k, v, attn_mask=mask[None]) for mask in (added, given)
    ]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("lists", [{}, {"allow": ["softmax", "add", "where"]}])
def test_a_fully_masked_row_gives_no_nan(
    precision: str, lists: dict[str, list[str]]
) -> None:
    given = (X, keep(), torch.full((32, 32), LEAST))
    found = rewritten(masked, *given, precision=precision, **lists)
    assert found.assignment.decisions["scaled_dot_product_attention_1"].low
    assert "x2" in found.classified.extreme
    results = found.gm(*given)
    assert all(result.isfinite().all() for result in results)
    sum(result.sum() for result in results).backward()
    for parameter in found.gm.parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all()


@pytest.mark.parametrize(("precision", "literal"), [("fp16", -1e9), ("bf16", LEAST)])
def test_literals_beyond_the_range_are_clamped(precision: str, literal: float) -> None:
    def function(m: Any, x: Tensor, mask: Tensor) -> Tensor:
        return m.other(m.fc(x).masked_fill(mask, literal).softmax(-1))

    given = (X, torch.ones(32, WIDTH, dtype=torch.bool))
    found = rewritten(function, *given, precision=precision, allow=["softmax"])
    fill = node(found, "masked_fill")
    dtype = fill.meta["val"].dtype
    assert fill.args[2] == (-torch.finfo(dtype).max if dtype.itemsize == 2 else literal)
    infinite = rewritten(
        lambda m, x, k: m.fc(x).masked_fill(k, -torch.inf).clone(), *given
    )
    assert infinite.gm(*given).isinf().all()


@pytest.mark.parametrize("grad", [True, False])
def test_only_the_mask_is_extreme(grad: bool) -> None:
    """What saturates is rounded by no cast; scores are no mask."""

    def function(m: Any, x: Tensor, mask: Tensor) -> Tensor:
        return (m.fc(x) @ m.other(x).t() + mask).softmax(-1) @ x

    mask = torch.full((32, 32), LEAST).triu(1)
    found = rewritten(function, X, mask, grad=grad)
    assert found.classified.extreme & {"x0", "x1", "linear"} == {"x1"}


def test_what_is_extreme() -> None:
    """What fills a mask is, until it is cut off in range; a divisor fills none."""
    divided = rewritten(lambda m, x: m.fc(x.softmax(-1) / 5e5))
    assert "div" not in divided.classified.extreme
    for limit, extreme in ((1e5, True), (5.0, False)):
        cut = rewritten(lambda m, x, e=limit: m.fc((x * 1e6).clamp(-e, e)))
        assert "mul" in cut.classified.extreme
        assert ("clamp" in cut.classified.extreme) == extreme


def test_a_large_number_that_fills_a_mask_is_low_where_it_is_only_that() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        h = m.fc(x)
        return torch.where(h > 0, h, torch.full_like(h, LEAST)).tanh() @ m.fc.weight

    found = rewritten(function)
    assert {"full_like", "where"} <= found.assignment.low
    assert found.gm(X).isfinite().all()
