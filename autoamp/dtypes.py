"""The low-precision dtypes, their names and their ranges."""

from __future__ import annotations

import torch

LOW_DTYPES: dict[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""Short name (as in `precision=` and in the names of rules files) to torch dtype."""

HIGH_DTYPE = torch.float32
"""The only dtype that is ever lowered; float64, complex and integers are left alone."""

_ALIASES = {
    "float16": "fp16",
    "half": "fp16",
    "torch.float16": "fp16",
    "bfloat16": "bf16",
    "torch.bfloat16": "bf16",
}


def short_name(dtype: torch.dtype) -> str:
    """The name used in reports: `fp32`, `bf16`, `fp16`, else torch's own name."""
    names = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
    return names.get(dtype, str(dtype).removeprefix("torch."))


def parse_low_dtype(value: object) -> torch.dtype | None:
    """The low dtype meant by `value` (a name or a dtype), or None if there is none."""
    if isinstance(value, torch.dtype):
        return value if value in LOW_DTYPES.values() else None
    if isinstance(value, str):
        name = value.strip().lower()
        return LOW_DTYPES.get(_ALIASES.get(name, name))
    return None


def largest(dtype: torch.dtype) -> float:
    """The largest finite number of `dtype`: 65504 for fp16, about 3.39e38 for bf16."""
    return float(torch.finfo(dtype).max)


def smallest(dtype: torch.dtype) -> float:
    """The smallest positive number of `dtype`: 6e-8 for fp16, about 9e-41 for bf16."""
    info = torch.finfo(dtype)
    return float(info.smallest_normal * info.eps)
