"""Norms of our own beside torch's, and beside the written-out norms under autocast.

The truth is float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoamp
from autoamp.kernels.functions.norms import layer_norm, rms_norm
from tests.kernels.chains.test_chains import WIDTH, X, converted
from tests.metrics import relative_error
from tests.small_models import Of

SEEDS = 16
ROUNDING = {torch.bfloat16: 1e-3, torch.float16: 1.5e-4}
"""A floor: about a quarter of a rounding of the result."""

Norm = Callable[[Tensor, Tensor | None, Tensor | None, float], Tensor]
CASES = [
    # rows, width, scale of the data, mean in spreads, epsilon, what is odd
    (1, 64, 1.0, 0, 1e-5, ""),
    (3, 7, 1e-2, 0, 1e-5, ""),
    (64, 64, 1.0, 0, 1e-5, ""),
    (200, 48, 1.0, 0, 1e-5, ""),
    (300, 16, 1.0, 0, 1.0, ""),
    (64, 64, 100.0, 100, 1e-5, ""),
    (5, 2000, 1e-2, 0, 1e-12, ""),
    (20, 32, 1.0, 0, 0.0, ""),
    (20, 32, 1.0, 0, 1e-5, "zeros"),
    (64, 64, 100.0, 100, 1e-5, "alike"),
    (64, 64, 100.0, 100, 1e-12, "alike"),
    (200, 1, 100.0, 100, 1e-12, ""),
    (40, 64, 1.0, 0, 1e-5, "huge"),
]


def written_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float
) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    result = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + epsilon)
    result = result if weight is None else result * weight
    return result if bias is None else result + bias


def written_rms_norm(
    x: Tensor, weight: Tensor | None, _: Tensor | None, epsilon: float
) -> Tensor:
    result = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
    return result if weight is None else result * weight


NORMS: dict[str, tuple[Norm, Norm]] = {
    "layer": (
        written_layer_norm,
        lambda x, w, b, epsilon: layer_norm(x, [x.shape[-1]], w, b, epsilon),
    ),
    "rms": (
        written_rms_norm,
        lambda x, w, _, epsilon: rms_norm(x, [x.shape[-1]], w, epsilon),
    ),
}


def between(
    norm: Norm, given: dict[str, Tensor], epsilon: float, ours: torch.dtype | None
) -> dict[str, Tensor]:
    """The result and the gradients of two products with a norm between them.

    Args:
        ours: the dtype of the products' operands, where no autocast casts them.
    """
    leaves = {
        name: value.detach().clone().requires_grad_() for name, value in given.items()
    }
    grad = leaves.pop("cotangent").detach()

    def low(name: str) -> Tensor:
        return leaves[name] if ours is None else leaves[name].to(ours)

    data = F.linear(low("x"), low("first"), low("shift"))
    made = norm(data, leaves.get("weight"), leaves.get("bias"), epsilon)
    result = F.linear(made, low("second"))
    result.backward(grad.to(result.dtype))
    found = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {"result": result.detach(), **found}


def numbers(
    case: tuple[int, int, float, int, float, str], parameters: str, seed: int
) -> dict[str, Tensor]:
    rows, width, scale, offset, _, odd = case
    generator = torch.Generator().manual_seed(seed)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    x, first = draw(rows, 16), scale * draw(width, 16) / 4
    shift = scale * (0.1 * draw(width) + offset)
    if odd == "alike":
        x[::2], shift = 0, torch.full((width,), scale * (1 + offset))
    if odd == "zeros":
        x[0], shift = 0, torch.zeros(width)
    if odd == "huge":
        first[0] *= 30
    found = {"x": x, "first": first, "shift": shift}
    found["second"] = draw(8, width) / width**0.5
    found["cotangent"] = draw(rows, 8) / rows
    if "w" in parameters:
        found["weight"] = 1 + 0.3 * draw(width)
    if "b" in parameters:
        found["bias"] = 0.3 * draw(width)
    return found


def errors(
    name: str,
    case: tuple[int, int, float, int, float, str],
    parameters: str,
    low: torch.dtype,
) -> Iterator[tuple[str, float, float]]:
    """The errors of each result and gradient, ours and autocast's, over all seeds."""
    written, ours = NORMS[name]
    totals: dict[str, Tensor] = {}
    for seed in range(SEEDS):
        given = numbers(case, parameters, seed)
        wide = {key: value.double() for key, value in given.items()}
        exact = between(written, wide, case[4], None)
        with torch.autocast("cpu", low):
            theirs = between(written, given, case[4], None)
        mine = between(ours, given, case[4], low)
        for key, true in exact.items():
            off = [(found[key] - true).square().sum() for found in (mine, theirs)]
            squares = torch.stack([*off, true.square().sum()])
            totals[key] = totals.get(key, 0) + squares
    for key, squares in totals.items():
        size = squares[2].sqrt().clamp_min(1e-30)
        yield key, *(squares[:2].sqrt() / size).tolist()


@pytest.mark.thorough(
    but=[
        "layer-(1, 64, 1.0, 0, 1e-05, '')-low0",
        "layer-(64, 64, 100.0, 100, 1e-05, '')-low0",
        "layer-(64, 64, 100.0, 100, 1e-12, 'alike')-low0",
        "rms-(64, 64, 1.0, 0, 1e-05, '')-low1",
        "rms-(20, 32, 1.0, 0, 0.0, '')-low1",
        "rms-(40, 64, 1.0, 0, 1e-05, 'huge')-low1",
    ]
)
@pytest.mark.parametrize("low", ROUNDING)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_as_true_as_the_written_one(
    name: str, case: tuple[int, int, float, int, float, str], low: torch.dtype
) -> None:
    for key, mine, theirs in errors(name, case, "wb" if name == "layer" else "w", low):
        if not math.isnan(theirs):  # autocast's squares may be 0 in fp16
            assert mine <= 1.1 * theirs + ROUNDING[low], key
        assert not math.isnan(mine), key


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
            None
            if d is None
            else torch.randn(2, 4).to(d).to(kind or d).requires_grad_()
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


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_low_layer_norm_sums_its_rows_truly(precision: str) -> None:
    """Torch's own kernel gives 256 or 512 where 64000 is true."""
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)
    )
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
