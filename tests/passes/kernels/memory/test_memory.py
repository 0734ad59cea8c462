"""No function of ours reads memory that nobody wrote: all fresh memory holds NaN here.

Fresh memory often holds zeros, or what the same call wrote before, so that a function
that reads it gives the right numbers in most runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import deterministic
from torch.utils._python_dispatch import TorchDispatchMode

from tests.passes.kernels.door import (
    attention,
    depthwise,
    layer_norm,
    product,
    rms_norm,
    rotary,
    scaled_and_rounded,
    softmax,
)

LOW = (torch.bfloat16, torch.float16)


class Lazy(TorchDispatchMode):
    """Kernels that write no result of a product with a factor of 0, as oneDNN's."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        is_zero = float(torch.tensor(kwargs.get("alpha", 1.0))) == 0
        if name in ("baddbmm", "baddbmm_", "addmm", "addbmm") and is_zero:
            return kwargs["out"] if "out" in kwargs else torch.empty_like(args[0])
        return func(*args, **kwargs)


@pytest.fixture
def nans(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All fresh memory holds NaN, inside of torch's ops too."""
    monkeypatch.setattr(deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    with Lazy():
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=[{}, {torch.bfloat16: "amx_bf16"}], ids=["plain", "units"])
def units(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without units for bf16, and one with."""
    monkeypatch.setattr("autoamp.compat.cpu_low_precision_units", lambda: request.param)


Call = Callable[..., Tensor]


def results(call: Call, operands: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The result and the gradients of all operands, in float64."""
    given = [t.to(dtype).requires_grad_() for t in operands]
    made = call(*given)
    by = torch.arange(made.numel()).remainder(7).sub(3).view(made.shape)
    found = torch.autograd.grad(made, given, by.to(made.dtype))
    return [t.detach().double() for t in (made, *found)]


def check(ours: Call, plain: Call, sizes: Sequence[Any], dtype: torch.dtype) -> None:
    """Ours is as near to plain torch in fp32 as rounding is, or as torch in `dtype`."""
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randn(s, generator=generator).to(dtype) for s in sizes]
    true = results(plain, operands, torch.float32)
    base = results(plain, operands, dtype)
    found = results(ours, operands, dtype)
    for mine, theirs, exact in zip(found, base, true, strict=True):
        assert mine.shape == exact.shape
        error, allowed = ((t - exact).norm() for t in (mine, theirs))
        assert error <= max(allowed, torch.finfo(dtype).eps * exact.norm())


# Sizes: batch, heads, queries, keys, width.
SIZES = [
    (1, 2, 64, 64, 8),
    (1, 1, 5, 33, 7),
    (1, 1, 130, 40, 16),
    (0, 2, 64, 64, 8),
    (1, 2, 0, 64, 8),
    (1, 2, 5, 0, 8),
    (1, 2, 5, 7, 0),
]
SCALES = [None, 0.0, 1e-50]


@pytest.mark.usefixtures("units", "nans")
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("size", "scale"), [*itertools.product(SIZES, SCALES)])
def test_attention(
    size: Sequence[int], scale: float | None, masked: bool, dtype: torch.dtype
) -> None:
    *several, queries, keys, width = size
    seen = torch.arange(queries * keys).remainder(3).view(queries, keys) > 0

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * (max(width, 1) ** -0.5 if scale is None else scale)
        if masked:
            scores = scores.masked_fill(seen.logical_not(), -torch.inf)
        return scores.softmax(-1) @ v

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, seen if masked else None, scale=scale)

    rows = (*several, queries, width), (*several, keys, width), (*several, keys, width)
    check(ours, plain, rows, dtype)


@pytest.mark.usefixtures("nans")
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("rows", [(5, 3), (1,), (0,), (4, 0)])
@pytest.mark.parametrize("size", [1, 7, 64])
def test_norms(rows: Sequence[int], size: int, dtype: torch.dtype) -> None:
    data, each = (*rows, size), [size]
    for given in ([data], [data, each]):
        check(
            lambda x, *w: rms_norm(x, each, *w, epsilon=0.5),
            lambda x, *w: functional.rms_norm(x, each, *w, eps=0.5),
            given,
            dtype,
        )
    for given in ([data], [data, each], [data, each, each]):
        check(
            lambda x, *w: layer_norm(x, each, *w),
            lambda x, *w: functional.layer_norm(x, each, *w),
            given,
            dtype,
        )
    check(lambda t: softmax(t, -1), lambda t: t.softmax(-1), [data], dtype)


@pytest.mark.usefixtures("nans")
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("rows", [(5, 3), (0, 3), (1,)])
@pytest.mark.parametrize("pairs", [False, True])
def test_rotary(rows: Sequence[int], pairs: bool, dtype: torch.dtype) -> None:
    angles = torch.arange(8.0)

    def plain(data: Tensor) -> Tensor:
        wide = data.float()
        if pairs:
            other = torch.stack((-wide[..., 1::2], wide[..., ::2]), -1).flatten(-2)
        else:
            other = torch.cat((-wide[..., 4:], wide[..., :4]), -1)
        return (wide * angles.cos() + other * angles.sin()).to(data.dtype)

    def ours(data: Tensor) -> Tensor:
        return rotary(data, angles.cos(), angles.sin(), data.dtype, -1, pairs)

    check(ours, plain, [(*rows, 8)], dtype)


@pytest.mark.usefixtures("nans")
@pytest.mark.parametrize("batch", [0, 1, 2])
@pytest.mark.parametrize("size", [1, 9])
@pytest.mark.parametrize("dimensions", [1, 2])
def test_depthwise_filters(batch: int, size: int, dimensions: int) -> None:
    call = getattr(functional, f"conv{dimensions}d")
    spread = (2,) * dimensions

    def way(of: Any) -> Call:
        padding = (4,) * dimensions
        return lambda x, w: of(x, w, None, spread, padding, (1,) * dimensions, 3)

    given = (batch, 3, *(size,) * dimensions), (3, 1, *(7,) * dimensions)
    check(way(depthwise), way(call), given, torch.bfloat16)


@pytest.mark.usefixtures("nans")
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    "given",
    [[(3, 5), (5, 4)], [(3, 0), (0, 4)], [(0, 5), (5, 4)], [(2, 3, 5), (2, 5, 4)]],
)
def test_products(given: Sequence[Any], wide: bool, dtype: torch.dtype) -> None:
    check(lambda a, b: product(a, b, wide=wide), torch.matmul, given, dtype)


@pytest.mark.usefixtures("nans")
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("size", [0, 1, 2**18 + 3])
@pytest.mark.parametrize("factor", [0.0, 0.25])
def test_gradients_that_are_scaled(
    size: int, factor: float, dtype: torch.dtype
) -> None:
    grad, scale = torch.arange(float(size)).remainder(64), torch.tensor(factor)
    for each in (grad, grad.expand(2, -1), grad.expand(2, -1).mT):
        found = scaled_and_rounded(each, scale, dtype)
        torch.testing.assert_close(found, (each * factor).to(dtype), rtol=0, atol=0)
