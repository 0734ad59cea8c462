"""The numbers that a proof is checked by: a second opinion that knows no algebra.

A chain and a kernel run in float64 on ordinary numbers and on hostile ones: zeros,
denormals, rows of 1e-30 and 1e30, rows far from zero, infinities, NaN.  Wherever the
chain gives a finite number, the kernel has to give the same, and NaN where a NaN that
was read made the chain give NaN.  Where the chain overflows nothing is asked of the
kernel: a row of which an infinity makes a part NaN has lost its sum, and the rest of it
means nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = 2.0**-22
"""The largest difference, as a share of the largest number of a row, or of the element:
two units in the last place of fp32, as much as a chain of a few fp32 ops is off.  The
constants of a chain are read to fp32's precision, and no results are nearer."""

LOST = 2.0**-40
"""The same, as a share of numbers that may have cancelled: where `1 + tanh(x)` does,
this share of float64's own digits is lost, and more than half of fp32's."""

_SCALES = (1e-6, 1e-4, 1e-2, 1.0, 1.0, 30.0, 0.0, 1e-310, 1e-40, 1e-30, 1e30)
"""Sizes of the rows that chains are tried on.  An epsilon shows in the small ones, and
also where it was left out."""

_COARSE = 2.0**-12
"""The same for numbers computed in fp32, by ops that add up a row in any order."""

_SHIFTS = (20.0, -20.0, 80.0, -80.0, 3e4, -3e4)
"""Means of rows that differ by a tenth of it: `mean(x * x) - mean(x)**2` then keeps
14 of float64's 16 digits."""

_ORDINARY = (1e-6, 40.0)
"""Where a chain has to give finite numbers, lest nothing be asked of a kernel."""

_ODD = (float("inf"), -float("inf"), float("nan"))


def elements() -> Tensor:
    """The numbers that functions of one element are tried on, in float64."""
    large = torch.logspace(-30, 4, 200, dtype=torch.float64, device="cpu")
    fine = torch.linspace(-12, 12, 2001, dtype=torch.float64, device="cpu")
    some = [0.0, -0.0, 1e-310, -1e-310, 1e-40, -1e-40, *_SHIFTS, *_ODD]
    odd = torch.tensor(some, dtype=torch.float64, device="cpu")
    return torch.cat([fine, large, -large, odd])


def rows(vectors: int, size: int, dims: int) -> tuple[Tensor, ...]:
    """Rows of all sizes, and vectors, from a generator of their own, in float64.

    The rows have as many dimensions as in the graph, but at least two, each of more
    than one element, so that a sum over a wrong dimension shows.
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(
            shape, generator=generator, dtype=torch.float64, device="cpu"
        )

    sizes = [*_SCALES, *(abs(shift) / 10 for shift in _SHIFTS), *[1.0] * len(_ODD)]
    scales = torch.tensor(sizes, dtype=torch.float64, device="cpu")
    data = drawn(len(sizes), *[2] * (dims - 2), size)
    data = data * scales.view(-1, *[1] * (data.dim() - 1))
    data[3] += 4.0  # rows whose mean is not zero
    for i, shift in enumerate(_SHIFTS, start=len(_SCALES)):
        data[i] += shift
    for i, odd in enumerate(_ODD, start=len(_SCALES) + len(_SHIFTS)):
        data[i, ..., 0] = odd
    return (data, *(drawn(size) for _ in range(vectors)))


def agree(
    found: Tensor,
    expected: Tensor,
    data: Tensor,
    size: int = 0,
    cancelled: Tensor | None = None,
) -> bool:
    """Whether a chain's numbers are a kernel's, element by element or row by row.

    Args:
        found, expected: the results of the chain and of the kernel.
        data: the tensor that both have read.
        size: the number of elements of a row; 0 for functions of each element.
        cancelled: numbers as large as those that may have cancelled; `data` by default,
            and none for rows.
    """
    if found.shape != expected.shape:
        return False
    asked, has_nan, sizes = found.isfinite(), data.isnan(), data.abs()
    allowed = TOLERANCE * torch.where(asked, expected.abs(), 0.0)
    if size:
        asked = asked & ~found.isnan().any(-1, True)
        allowed = allowed.amax(-1, keepdim=True)
        has_nan, sizes = has_nan.any(-1, True), sizes.amax(-1, keepdim=True)
    else:
        lost = data if cancelled is None else cancelled
        allowed = allowed + LOST * lost.abs().nan_to_num(0.0, 0.0)
    least, most = _ORDINARY
    is_ordinary = (sizes >= least) & (sizes <= most)
    if not (asked | ~is_ordinary).all():
        return False
    near = (found - expected).abs() <= allowed
    spread = found.isnan() & has_nan
    return bool((near | ~asked).all()) and bool((expected.isnan() | ~spread).all())


def is_as_true(
    found: Tensor, chain: Tensor, exact: Tensor, data: Tensor, size: int = 0
) -> bool:
    """Whether a kernel's numbers in fp32 are true wherever the chain's are.

    Args:
        found, chain: the results of the kernel and of the chain in fp32.
        exact: the chain's result in float64 on the same data.
        data, size: as for `agree`.
    """
    sizes = torch.where(exact.isfinite(), exact.abs(), 0.0)
    sizes = sizes.amax(-1, keepdim=True) if size else sizes.maximum(data.abs())
    allowed = _COARSE * sizes.nan_to_num(0.0, 0.0)
    is_true = (chain - exact).abs() <= allowed
    if size:  # zeros of a row that overflowed are near some of its elements
        is_true = is_true.all(-1, keepdim=True).expand_as(exact)
    return bool(((found - exact).abs() <= 2 * allowed)[is_true].all())
