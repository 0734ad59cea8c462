"""The low-precision dtypes: a table with one row for each.

A new dtype is a new row, a rules file, and its figures in `passes/decide/devices.toml`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

LowName = Literal["fp16", "bf16"]
"""The names of the low dtypes."""

Precision = Literal["auto", LowName]
"""The words that `precision=` takes, beside torch's dtypes."""


class LowDtype(NamedTuple):
    """The facts about one low dtype; its range, epsilon and width are torch's.

    Attributes:
        dtype: torch's dtype.
        name: the name in `precision=`, in reports and of the rules file.
        method: the method of a module that casts its weights to the dtype.
        needs_loss_scale: whether the dtype rounds small gradients to 0, since its range
            is narrower than fp32's.
        has_masters: whether an optimizer steps fp32 masters of weights that arrive in
            the dtype.
        cuda_capability: the least compute capability of GPUs that multiply the dtype.
        cpu_units: the units of CPUs that multiply the dtype, the fastest first.
    """

    dtype: torch.dtype
    name: LowName
    method: str
    needs_loss_scale: bool
    has_masters: bool
    cuda_capability: str
    cpu_units: tuple[str, ...]


LOW_TABLE = (
    LowDtype(
        *(torch.float16, "fp16", "half"),
        needs_loss_scale=True,
        has_masters=True,
        cuda_capability="7.0",
        cpu_units=("amx_fp16",),
    ),
    LowDtype(
        *(torch.bfloat16, "bf16", "bfloat16"),
        needs_loss_scale=False,
        has_masters=True,
        cuda_capability="8.0",
        cpu_units=("amx_bf16", "avx512_bf16"),
    ),
)
"""The low dtypes; the dtype with the narrowest range comes first."""

LOW_DTYPES: dict[str, torch.dtype] = {row.name: row.dtype for row in LOW_TABLE}
"""Short name (as in `precision=` and in the names of rules files) to torch dtype."""

HALVES = frozenset(row.dtype for row in LOW_TABLE if row.has_masters)
"""The dtypes of weights of which an optimizer steps fp32 masters."""

HIGH_DTYPE = torch.float32
"""The only dtype that is ever lowered; float64, complex and integers are left alone."""

NARROWEST = LOW_TABLE[0].dtype
"""The low dtype with the narrowest range."""

UNSCALED = next(row.dtype for row in LOW_TABLE if not row.needs_loss_scale)
"""The low dtype for regions where nothing scales the loss."""

_SCALED = frozenset(row.dtype for row in LOW_TABLE if row.needs_loss_scale)
_SHORT = {HIGH_DTYPE: "fp32", **{row.dtype: row.name for row in LOW_TABLE}}


def _torch_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


TORCH_NAMES = tuple(_torch_name(row.dtype) for row in LOW_TABLE)
"""Torch's names of the low dtypes, which rules files use."""

_BY_NAME = {
    each: row.dtype
    for row in LOW_TABLE
    for each in (row.name, row.method, _torch_name(row.dtype), str(row.dtype))
}


def short_name(dtype: torch.dtype) -> str:
    """The name used in reports: `fp32`, `bf16`, `fp16`, else torch's own name."""
    return _SHORT.get(dtype) or _torch_name(dtype)


def parse_low_dtype(value: object) -> torch.dtype | None:
    """The low dtype that `value`, a name or a dtype, means; None for other values."""
    if isinstance(value, torch.dtype):
        return value if value in LOW_DTYPES.values() else None
    return _BY_NAME.get(value.strip().lower()) if isinstance(value, str) else None


def row_of(low: torch.dtype) -> LowDtype:
    """The row of a low dtype."""
    return next(row for row in LOW_TABLE if row.dtype == low)


def needs_loss_scale(dtype: torch.dtype | None) -> bool:
    """Whether gradients in `dtype` need a loss scale."""
    return dtype in _SCALED


def has_masters(dtype: torch.dtype) -> bool:
    """Whether an optimizer steps fp32 masters of weights that arrive in `dtype`."""
    return dtype in HALVES


def largest(dtype: torch.dtype) -> float:
    """The largest finite number of `dtype`: 65504 for fp16, about 3.39e38 for bf16."""
    return float(torch.finfo(dtype).max)


def smallest(dtype: torch.dtype) -> float:
    """The smallest positive number of `dtype`: 6e-8 for fp16, about 9e-41 for bf16."""
    info = torch.finfo(dtype)
    return float(info.smallest_normal * info.eps)


def rounding(dtype: torch.dtype) -> float:
    """The largest relative error by which `dtype` rounds a number in its range."""
    return float(torch.finfo(dtype).eps / 2)
