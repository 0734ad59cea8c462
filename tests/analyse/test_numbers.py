"""Numbers in tensors are seen as Python's numbers are, where capture knows them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.small_models import rewriting
from tests.truth import MARGIN, errors, relative

WIDTH = 16
LOW = (torch.bfloat16, torch.float16)
X = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))


class Of(nn.Module):
    """A model of one function over a layer and numbers in its attributes."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.attribute = torch.tensor(1e-8)
        self.register_buffer("small", torch.tensor(1e-8))
        self.register_buffer("one", torch.tensor([1e-8]))
        self.register_buffer("large", torch.tensor(1e9))
        self.trained = nn.Parameter(torch.tensor(1e-8))

    def forward(self, *given: Tensor) -> Tensor:
        return self.function(self, *given)


rewritten = rewriting(Of, lambda: X.clone().requires_grad_(), "fp16")


def empty(h: Tensor) -> Tensor:
    return torch.empty_like(h).fill_(1e-8)


SMALL: dict[str, Callable[[Of, Tensor], Tensor]] = {
    "number": lambda m, h: h * 1e-8,
    "tensor": lambda m, h: h * torch.tensor(1e-8),
    "its kin": lambda m, h: h * h.new_tensor(1e-8),
    "as tensor": lambda m, h: torch.as_tensor(1e-8) * h,
    "scalar tensor": lambda m, h: h * torch.scalar_tensor(1e-8),
    "full": lambda m, h: h * torch.full((), 1e-8),
    "new full": lambda m, h: h * h.new_full((), 1e-8),
    "new full row": lambda m, h: h * h.new_full((WIDTH,), 1e-8),
    "full like": lambda m, h: h * torch.full_like(h, 1e-8),
    "filled": lambda m, h: h * empty(h),
    "attribute": lambda m, h: h * m.attribute,
    "buffer": lambda m, h: h * m.small,
    "element": lambda m, h: h * m.one[0],
    "copies": lambda m, h: h * torch.tensor(1e-8).clone().detach().to("cpu"),
    "computed": lambda m, h: h * torch.tensor(1e-4) ** 2,
    "negative": lambda m, h: h * -torch.tensor(1e-8),
}


@pytest.mark.thorough(
    but=["number", "as tensor", "new full", "filled", "element", "negative"]
)
@pytest.mark.parametrize("kind", SMALL)
def test_a_small_number_in_a_tensor_keeps_its_op_in_fp32(kind: str) -> None:
    function = SMALL[kind]
    found = rewritten(lambda m, x: function(m, m.fc(x)))
    product = [d for d in found.assignment.decisions.values() if "mul" in d.op][-1]
    assert not product.low
    assert "which fp16 rounds to zero" in product.reason
    assert "computes with " in product.reason
    bf16 = rewritten(lambda m, x: function(m, m.fc(x)), precision="bf16").assignment
    assert not any("rounds to zero" in d.reason for d in bf16.decisions.values())


@pytest.mark.thorough(
    but=[
        "number-bf16",
        "as tensor-bf16",
        "new full-bf16",
        "filled-fp16",
        "element-fp16",
        "negative-fp16",
    ]
)
@pytest.mark.parametrize("low", LOW, ids=["bf16", "fp16"])
@pytest.mark.parametrize("kind", SMALL)
def test_small_numbers_are_no_less_true_than_under_autocast(
    kind: str, low: torch.dtype
) -> None:
    function = SMALL[kind]
    found = errors(Of(lambda m, x: function(m, m.fc(x))), (X,), low)
    assert found.worst() <= MARGIN
    assert found.ours[0] < torch.finfo(low).eps, "digits are left, where fp16 had none"


GUARDS: dict[str, Callable[[Of, Tensor], Tensor]] = {
    "sum": lambda m, n: n + torch.tensor(1e-8),
    "buffer": lambda m, n: n + m.small,
    "maximum": lambda m, n: torch.maximum(n, torch.tensor(1e-8)),
    "clamp": lambda m, n: torch.clamp(n, min=torch.full((), 1e-8)),
    "where": lambda m, n: torch.where(n > 1, n, torch.tensor(1e-8)),
    "fill": lambda m, n: n.masked_fill(n < 1, torch.tensor(1e-8)),
}


@pytest.mark.thorough(
    but=[
        "sum-bf16",
        "buffer-bf16",
        "maximum-bf16",
        "clamp-fp16",
        "where-fp16",
        "fill-fp16",
    ]
)
@pytest.mark.parametrize("low", LOW, ids=["bf16", "fp16"])
@pytest.mark.parametrize("kind", GUARDS)
def test_what_guards_a_division_by_zero_does(kind: str, low: torch.dtype) -> None:
    """A norm of zero: autocast divides by it in fp16."""
    guard = GUARDS[kind]

    def function(m: Of, x: Tensor) -> Tensor:
        h = m.fc(x)
        return h * 1e-3 / guard(m, (h - h).amax(-1, keepdim=True))

    found = errors(Of(function), (X,), low)
    assert found.worst() <= MARGIN
    assert found.ours[0] < 8 * torch.finfo(low).eps, "a linear, a factor, a divisor"


LARGE: dict[str, Callable[[Of, Tensor], Tensor]] = {
    "number": lambda m, h: h / 1e9,
    "tensor": lambda m, h: h / torch.tensor(1e9),
    "whole": lambda m, h: h / torch.tensor(10**9),
    "buffer": lambda m, h: h / m.large,
    "negative": lambda m, h: h / -torch.tensor(1e9),
    "full": lambda m, h: h / torch.full((), 1e9),
    "new full": lambda m, h: h / h.new_full((1,), 1e9),
    "full like": lambda m, h: h / torch.full_like(h, 1e9),
    "filled": lambda m, h: h / torch.empty_like(h).fill_(1e9),
}


@pytest.mark.parametrize("kind", LARGE)
def test_a_divisor_beyond_the_range_is_not_cut_off(kind: str) -> None:
    """Cut off at 65504 it would divide by 15000 times less; autocast's fp16 gives 0."""
    function = LARGE[kind]
    model = Of(lambda m, x: function(m, m.fc(x)))
    truth = copy.deepcopy(model).double()
    truth.large = truth.large.double()
    found = rewritten(model.function)
    quotient = next(d for n, d in found.assignment.decisions.items() if "div" in n)
    assert not quotient.low
    assert "which is beyond fp16's range" in quotient.reason
    result = found.gm(X).detach().double()
    eps = torch.finfo(torch.float16).eps
    assert relative(result, truth(X.double()).detach()) < eps, "one low linear"


def test_a_large_number_that_fills_a_mask_is_cut_off_where_it_is_only_that() -> None:
    least = torch.finfo(torch.float32).min

    def masked(m: Of, x: Tensor) -> Tensor:
        h = m.fc(x)
        return torch.where(h > 0, h, torch.full_like(h, least)).tanh() @ m.fc.weight

    found = rewritten(masked)
    assert {"full_like", "where"} <= found.assignment.low
    assert found.gm(X).isfinite().all()


def test_a_mask_of_several_numbers_is_none_of_them() -> None:
    """The causal mask, made beside the scores: adding it is no arithmetic with 1e9."""

    def causal(m: Of, x: Tensor) -> Tensor:
        scores = m.fc(x) @ m.fc(x).t()
        mask = scores.new_full(scores.shape, -1e9).triu(1)
        return (scores + mask).softmax(-1) @ m.fc(x)

    reasons = rewritten(causal).assignment.decisions
    assert "computes with" not in reasons["add"].reason


@pytest.mark.thorough(
    but=[
        "1e-08-<lambda>-bf16",
        "1e-08-<lambda>-fp16",
        "1.0-<lambda>-bf16",
        "1000000000.0-<lambda>-bf16",
        "1000000000.0-<lambda>-fp16",
    ]
)
@pytest.mark.parametrize("low", LOW, ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    ("size", "function"),
    [
        (1e-8, lambda m, h, s: h * s + h * m.trained),
        (1.0, lambda m, h, s: h * s + h / (s * 2) + h * h.abs().amax()),
        (1e9, lambda m, h, s: h / s + h / (s * 2) + h / -s),
    ],
)
def test_a_number_nobody_knows_is_as_true_as_under_autocast(
    size: float, function: Callable[..., Tensor], low: torch.dtype
) -> None:
    """0-dim inputs and parameters, and what is computed of them, promote nothing."""

    def scaled(m: Of, x: Tensor, s: Tensor) -> Tensor:
        return function(m, m.fc(x), s)

    given = (X, torch.tensor(size))
    assert errors(Of(scaled), given, low).worst() <= MARGIN
    found = rewritten(scaled, *given).assignment.decisions.values()
    assert not any("computes with" in d.reason for d in found)


SHARED = torch.tensor(1e-8)
HELD: dict[str, Callable[[Of, Tensor], Tensor]] = {
    "tensor": SMALL["tensor"],
    "full like": SMALL["full like"],
    "attribute": SMALL["attribute"],
    "buffer": SMALL["buffer"],
    "element": SMALL["element"],
    "global": lambda m, h: h * SHARED,
    "divisor": LARGE["buffer"],
}


@pytest.mark.thorough(but=["tensor", "attribute", "buffer", "element", "divisor"])
@pytest.mark.parametrize("kind", HELD)
def test_a_converted_model_knows_its_own_numbers(kind: str) -> None:
    """Dynamo hands buffers, attributes and globals in; their values are the model's."""
    function = HELD[kind]
    model = Of(lambda m, x: function(m, m.fc(x)))
    truth = model(X).detach()
    autoamp.convert(model, precision="fp16", do_no_harm=False, strict=True)
    result = model(X).detach()
    low = {op.op for op in autoamp.report(model).ops if op.is_low}
    assert "aten::linear.default" in low
    assert relative(result.double(), truth.double()) < 2**-10, "one low linear"


def test_an_argument_and_a_parameter_are_known_to_nobody() -> None:
    model = Of(lambda m, x, s: m.fc(x) * s * m.trained)
    autoamp.convert(model, precision="fp16", do_no_harm=False, strict=True)
    model(X, torch.tensor(1e-8))
    assert all(op.is_low for op in autoamp.report(model).ops if "mul" in op.op)


def test_a_tensor_written_over_is_read_as_it_is() -> None:
    def written(m: Of, x: Tensor) -> Tensor:
        scale = torch.tensor(1.0)
        scale.fill_(1e-8)
        return m.fc(x) * scale

    assert errors(Of(written), (X,), torch.float16).ours[0] < 2**-10
