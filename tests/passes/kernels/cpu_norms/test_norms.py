"""Norms of our own, beside torch's: low data, sums in fp32.

Norms as libraries write them, and hostile data, are in chains/test_spelled.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoamp
from tests.metrics import relative_error
from tests.passes.kernels.door import layer_norm, rms_norm
from tests.small_models import Of, converted

WIDTH = 32
X = torch.randn(4, WIDTH)

CASES = [
    # rows, width, spread of the data, its mean, epsilon, what is odd
    (1, 64, 1.0, 0.0, 1e-5, ""),
    (3, 7, 1e-2, 0.0, 1e-5, ""),
    (200, 48, 1.0, 0.0, 1e-5, ""),
    (300, 16, 1.0, 0.0, 1.0, ""),
    (64, 64, 100.0, 1e4, 1e-5, ""),
    (5, 2000, 1e-2, 0.0, 1e-12, ""),
    (20, 32, 1.0, 0.0, 0.0, ""),
    (20, 32, 1.0, 0.0, 1e-5, "zeros"),
    (64, 64, 100.0, 1e4, 1e-5, "alike"),
    (200, 1, 100.0, 1e4, 1e-12, ""),
    (40, 64, 1.0, 0.0, 1e-5, "huge"),
]
NORMS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], int]] = {
    "layer": (layer_norm, F.layer_norm, 2),
    "rms": (rms_norm, F.rms_norm, 1),
}


def low_data(
    case: tuple[int, int, float, float, float, str], low: torch.dtype
) -> Tensor:
    rows, width, spread, mean, _, odd = case
    x = torch.randn(rows, width) * spread + mean
    if odd == "zeros":
        x[0] = 0
    if odd == "alike":
        x[::2] = mean
    if odd == "huge":
        x[:, 0] *= 30
    return x.to(low)


def with_gradients(norm: Any, given: list[Tensor], grad: Tensor, eps: float) -> Any:
    x, *parameters = (t.detach().clone().requires_grad_() for t in given)
    result = norm(x, [x.shape[-1]], *parameters, eps)
    result.backward(grad.to(result.dtype))
    return [result.detach(), *(t.grad for t in (x, *parameters))]


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_a_low_norm_is_that_of_fp32_but_for_a_rounding(
    name: str, case: tuple[int, int, float, float, float, str], low: torch.dtype
) -> None:
    ours, torchs, count = NORMS[name]
    x, grad = low_data(case, low), torch.randn(case[:2]).to(low)
    vectors = [1 + 0.3 * torch.randn(case[1]) for _ in range(count)]
    mine = with_gradients(ours, [x, *vectors], grad, case[4])
    fp32, true = (
        with_gradients(torchs, [t.to(wide) for t in (x, *vectors)], grad, case[4])
        for wide in (torch.float32, torch.float64)
    )
    for found, other, exact in zip(mine, fp32, true, strict=True):
        best = other.to(found.dtype).double()
        if best.isfinite().all() and exact.isfinite().all():
            error, least = ((t.double() - exact).norm() for t in (found, best))
            rounding = torch.finfo(low).eps / 2 * exact.norm()
            assert error <= 1.1 * least + rounding + 1e-30
        assert not (found.isnan() & ~exact.isnan()).any()


@pytest.mark.parametrize(
    ("weight", "bias"),
    [*itertools.product((None, torch.float32, torch.bfloat16), repeat=2)],
)
@pytest.mark.parametrize("mean", [0, 500])
def test_parameters_of_any_dtype(
    weight: torch.dtype | None, bias: torch.dtype | None, mean: int
) -> None:
    """Torch's kernel takes no fp32 bias alone, and no parameters of two dtypes."""
    data = (torch.randn(3, 5, 2, 4) + mean).bfloat16()
    grad = torch.randn(5, 3, 2, 4).transpose(0, 1).bfloat16()
    found = []
    for norm, kind in ((layer_norm, None), (F.layer_norm, torch.float64)):
        torch.manual_seed(1)
        x = data.to(kind or data.dtype).transpose(0, 1).transpose(0, 1).requires_grad_()
        given = [
            d and torch.randn(2, 4).to(d).to(kind or d).requires_grad_()
            for d in (weight, bias)
        ]
        result = norm(x, [2, 4], *given, 1e-5)
        leaves = [t for t in (x, *given) if t is not None]
        grads = torch.autograd.grad(result, leaves, grad.to(result.dtype))
        found.append([result, *grads])
        assert [t.dtype for t in grads] == [t.dtype for t in leaves]
    for mine, true in zip(*found, strict=True):
        assert (mine - true).norm() <= 0.01 * true.norm()


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shape", [(3, 4, WIDTH), (5, WIDTH), (WIDTH,)])
def test_rms_norm_is_torchs(shape: tuple[int, ...], weighted: bool) -> None:
    """The result to the bit, and gradients no further from float64's by a half more."""
    given = [torch.randn(shape), *[torch.randn(WIDTH)] * weighted]
    grad = torch.randn(shape)

    def run(norm: Any, wide: torch.dtype) -> Any:
        def of(x: Tensor, sizes: list[int], *rest: Any) -> Tensor:
            return norm(x, sizes, *(rest if weighted else (None, *rest)))

        return with_gradients(of, [t.to(wide) for t in given], grad, 1e-6)

    ours, theirs = run(rms_norm, torch.float32), run(F.rms_norm, torch.float32)
    assert torch.equal(ours[0], theirs[0])
    for a, b, true in zip(ours, theirs, run(F.rms_norm, torch.float64), strict=True):
        assert relative_error(a, true) <= 1.5 * relative_error(b, true) + 2**-24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_without_an_epsilon_takes_torchs(dtype: torch.dtype) -> None:
    x = (torch.randn(4, WIDTH) * 1e-3).to(dtype)
    ours, theirs = rms_norm(x, [WIDTH]), F.rms_norm(x, [WIDTH])
    assert ours.dtype is dtype
    assert torch.equal(ours, theirs)


def test_norms_of_float64_stay_torchs() -> None:
    def mixed(m: Any, x: Tensor) -> Tensor:
        wide = m.a(x).double()
        wide = F.rms_norm(wide, [WIDTH]) + F.layer_norm(wide.exp(), [WIDTH])
        return m.b(wide.float())

    model = converted(Of(mixed, a=nn.Linear(WIDTH, WIDTH), b=nn.Linear(WIDTH, 8)))
    model(X)
    (gm,) = autoamp.report(model).graphs
    called = {node.target for node in gm.graph.nodes}
    assert {torch.ops.aten.rms_norm.default, torch.ops.aten.layer_norm.default} < called


def test_rms_norm_is_laid_out_as_torchs() -> None:
    x = torch.randn(4, WIDTH, 6).transpose(1, 2).requires_grad_()
    ours = rms_norm(x, [WIDTH], None, 1e-6)
    assert ours.stride() == F.rms_norm(x, [WIDTH], None, 1e-6).stride()
    ours.sum().backward()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_low_layer_norm_sums_its_rows_truly(precision: str) -> None:
    """Torch's own kernel gives 256 or 512 where 64000 is true."""
    layers = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)
    model: Any = nn.Sequential(*layers)
    model[2].weight.data.fill_(1.0)
    converted(model, precision=precision, loss_scale="off")
    model(torch.randn(16000, WIDTH)).sum().backward()
    assert model[1].bias.grad.tolist() == [4 * 16000.0] * WIDTH


def penalty(function: Any, x: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    """The gradient of a gradient's norm, as a gradient penalty takes it."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(function(x).pow(3).sum(), x, create_graph=True)
    return [*torch.autograd.grad(grad.square().sum(), parameters)]


def test_rms_norm_differentiates_twice() -> None:
    weight, x = torch.randn(WIDTH, requires_grad=True), torch.randn(3, WIDTH)
    ours, theirs = (
        penalty(lambda x, norm=norm: norm(x, [WIDTH], weight, 1e-6), x, [weight])
        for norm in (rms_norm, F.rms_norm)
    )
    assert relative_error(ours, theirs) < 1e-5


def test_a_low_layer_norm_differentiates_twice() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    parameters = [*model.parameters()][:3]
    expected = penalty(model, X, parameters)
    for ours, true in zip(
        penalty(converted(model), X, parameters), expected, strict=True
    ):
        assert relative_error(ours, true) < 0.05
