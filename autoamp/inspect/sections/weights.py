"""The weights that low-precision ops read, and whether their values fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from autoamp.dtypes import NARROWEST, rounding, short_name
from autoamp.inspect.rows import Section

ROUNDING = rounding(NARROWEST)
"""The largest relative error by which fp16 rounds a number in its range."""

_NARROWEST = short_name(NARROWEST)


@dataclass(frozen=True)
class Range:
    """The magnitudes in one weight.

    Attributes:
        largest: the largest magnitude; NaN where the weight holds a NaN.
        too_large: how many numbers are infinite in fp16.
        lost: how many numbers other than 0 are 0 in fp16.
        count: how many numbers the weight has.
        error: the relative error of the fp16 copy, ||copy - weight|| / ||weight||.
    """

    largest: float
    too_large: int
    lost: int
    count: int
    error: float


@dataclass(frozen=True)
class WeightRow:
    """One weight that is read in low precision.

    Attributes:
        graph, body: the section that reads the weight.
        name: the weight's path in the model, "fc.weight".
        dtype: the short name of the low dtype.
        shape: the weight's shape, with hints for symbolic sizes.
        kept: whether the low copy is kept until the weight changes.
        range: the magnitudes in the weight, if the low dtype is fp16 and the weight
            holds data; else None (bf16 has the range of fp32).
    """

    graph: int
    body: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    kept: bool
    range: Range | None

    @property
    def fits(self) -> bool:
        """Whether the error of the weight's copy is no larger than that of rounding.

        A few numbers near 0 may become 0.
        """
        return self.range is None or self.range.error <= ROUNDING


def ranges_of(weights: Mapping[str, torch.Tensor]) -> dict[str, Range]:
    """The magnitudes of fp32 weights that hold data; one pass over each weight."""
    found: dict[str, Range] = {}
    for name, weight in weights.items():
        if weight.dtype != torch.float32 or not _holds_data(weight):
            continue
        with torch.no_grad():
            size = weight.detach().abs()
            low = size.to(NARROWEST)
            found[name] = Range(
                largest=float(size.max()),
                too_large=int((low.isinf() & size.isfinite()).sum()),
                lost=int(((low == 0) & (size != 0)).sum()),
                count=weight.numel(),
                error=_error(low, size),
            )
    return found


def _holds_data(weight: torch.Tensor) -> bool:
    """Whether the elements can be read; the memory of an offloaded weight is gone."""
    if weight.is_meta or not weight.numel():
        return False
    steps = zip(weight.shape, weight.stride(), strict=True)
    last = weight.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    held: int = weight.untyped_storage().nbytes()
    return held >= (last + 1) * weight.element_size()


def _error(low: torch.Tensor, exact: torch.Tensor) -> float:
    size = float(exact.double().norm())
    return float((low.double() - exact.double()).norm()) / size if size else 0.0


def weight_rows(
    sections: Sequence[Section], ranges: Mapping[str, Range]
) -> list[WeightRow]:
    """One row per weight and section that reads the weight in low precision."""
    rows = []
    for section in sections:
        for cast in section.casts:
            node = section.before.get(cast.value)
            if cast.kind != "weight" or node is None:
                continue
            name = node.meta.get("autoamp_path") or str(node.target)
            rows.append(
                WeightRow(
                    graph=section.graph,
                    body=section.body,
                    name=name,
                    dtype=cast.dtype,
                    shape=tuple(node.meta["val"].shape),
                    kept=not cast.every_call,
                    range=ranges.get(name) if cast.dtype == _NARROWEST else None,
                )
            )
    return rows
