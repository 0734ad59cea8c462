"""Norms of our own beside torch's, and beside autocast's."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoamp
from autoamp.kernels.functions.norms import rms_norm
from tests.kernels.chains.test_chains import WIDTH, X, converted, stepped
from tests.metrics import relative_error
from tests.small_models import Of


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shape", [(3, 4, WIDTH), (5, WIDTH), (WIDTH,)])
def test_rms_norm_is_torchs(shape: tuple[int, ...], weighted: bool) -> None:
    """The result to the bit, and gradients no further from float64's by a half more."""
    torch.manual_seed(0)
    data, weight, grad = torch.randn(shape), torch.randn(WIDTH), torch.randn(shape)

    def run(norm: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        x = data.to(dtype, copy=True).requires_grad_()
        w = weight.to(dtype, copy=True).requires_grad_() if weighted else None
        result = norm(x, [WIDTH], w, 1e-6)
        result.backward(grad.to(dtype))
        return [result.detach(), *(v.grad for v in (x, w) if v is not None)]

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
    def mixed(model: nn.Module, x: Tensor) -> Tensor:
        wide = model.a(x).double()
        wide = F.rms_norm(wide, [WIDTH]) + F.layer_norm(wide.exp(), [WIDTH])
        return model.b(wide.float())

    parts = {"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, 8)}
    (gm,) = converted(Of(mixed, **parts), X).graphs
    called = {node.target for node in gm.graph.nodes}
    assert {torch.ops.aten.rms_norm.default, torch.ops.aten.layer_norm.default} < called


def test_rms_norm_is_laid_out_as_torchs() -> None:
    x = torch.randn(4, WIDTH, 6).transpose(1, 2).requires_grad_()
    ours = rms_norm(x, [WIDTH], None, 1e-6)
    assert ours.stride() == F.rms_norm(x, [WIDTH], None, 1e-6).stride()
    ours.sum().backward()


def test_rms_norm_differentiates_twice() -> None:
    """The gradient of a gradient's norm, as a gradient penalty takes it."""
    torch.manual_seed(0)
    x = torch.randn(3, WIDTH, requires_grad=True)
    weight = torch.randn(WIDTH, requires_grad=True)

    def penalty(norm: Callable[..., Tensor]) -> list[Tensor]:
        result = norm(x, [WIDTH], weight, 1e-6).pow(3).sum()
        (grad,) = torch.autograd.grad(result, x, create_graph=True)
        return [*torch.autograd.grad(grad.square().sum(), (x, weight))]

    for ours, theirs in zip(penalty(rms_norm), penalty(F.rms_norm), strict=True):
        assert relative_error(ours, theirs) < 1e-5


def normed(affine: bool = True) -> nn.Sequential:
    norm = nn.LayerNorm(WIDTH, elementwise_affine=affine)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, 4))


@pytest.mark.parametrize("affine", [True, False])
def test_a_low_layer_norm_is_as_true_as_under_autocast(affine: bool) -> None:
    torch.manual_seed(0)
    model, x = normed(affine), torch.randn(1000, WIDTH)
    true = stepped(copy.deepcopy(model).double(), x.double())
    theirs = stepped(model, x, autocast=True)
    report = converted(model, x)
    rows = [row for row in report.ops if row.op == "aten::layer_norm.default"]
    assert [row.precision for row in rows] == ["bf16"]
    for a, b, c in zip(stepped(model, x), theirs, true, strict=True):
        assert relative_error(a, c) <= 1.05 * relative_error(b, c)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_low_layer_norm_sums_its_rows_truly(precision: str) -> None:
    """Torch's own kernel gives 256 or 512 where 64000 is true."""
    model = normed()
    model[2].weight.data.fill_(1.0)
    x = torch.randn(16000, WIDTH)
    converted(model, x, precision=precision, loss_scale="off")
    model(x).sum().backward()
    assert model[1].bias.grad.tolist() == [4 * 16000.0] * WIDTH


def test_a_low_layer_norm_differentiates_twice() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))

    def penalty(model: nn.Module) -> list[Tensor]:
        x = X.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
        return [*torch.autograd.grad(grad.square().sum(), [*model.parameters()])[:3]]

    expected = penalty(model)
    autoamp.convert(model, precision="bf16", do_no_harm=False, strict=True)
    for ours, theirs in zip(penalty(model), expected, strict=True):
        assert relative_error(ours, theirs) < 0.05
