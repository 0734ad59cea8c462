"""Norms of ours beside the written-out norms under autocast, against float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from autoamp.kernels.functions.norms import layer_norm, rms_norm

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


def our_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float
) -> Tensor:
    return layer_norm(x, [x.shape[-1]], weight, bias, epsilon)


def our_rms_norm(
    x: Tensor, weight: Tensor | None, _: Tensor | None, epsilon: float
) -> Tensor:
    return rms_norm(x, [x.shape[-1]], weight, epsilon)


NORMS = {
    "layer": (written_layer_norm, our_layer_norm),
    "rms": (written_rms_norm, our_rms_norm),
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


def test_gradients_of_few_rows_are_sums_in_fp32() -> None:
    """A sum of 200 numbers near 1 in bf16 is wrong in the third digit."""
    data = torch.randn(200, 8).bfloat16()
    weight, bias = torch.ones(8).requires_grad_(), torch.zeros(8).requires_grad_()
    grad = (1 + torch.rand(200, 8)).bfloat16()
    layer_norm(data, [8], weight, bias).backward(grad)
    assert bias.grad is not None
    torch.testing.assert_close(bias.grad, grad.double().sum(0).float())
