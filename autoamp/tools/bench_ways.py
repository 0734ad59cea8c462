"""The ways to run a model that a benchmark compares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import nn

from autoamp.dtypes import LOW_DTYPES, row_of, short_name
from autoamp.errors import OptionError, UnsupportedModelError
from autoamp.messages import class_name
from autoamp.runtime.eligible import (
    choose_precision,
    home_of,
    not_converted,
    parameters_of,
)
from autoamp.training.options import Options

WayName = Literal["fp32", "tf32", "autocast", "autoamp", "half"]

KINDS: tuple[WayName, ...] = get_args(WayName)
"""The kinds of ways that `ways=` may name, in the order in which they are shown."""


@dataclass(frozen=True)
class Way:
    """One way to run a model.

    Attributes:
        kind: one of `KINDS`.
        low: the compute dtype of the ways that have one.
        options: the options of a conversion.
        compiled: whether inductor compiles the way.
        arrived: the half dtype that most of the model's weights are in already, or "".
    """

    kind: str
    low: torch.dtype
    options: Options
    compiled: bool = False
    arrived: str = ""

    @property
    def name(self) -> str:
        """The name of the way in the table."""
        name = self.kind
        if self.kind == "tf32":
            name = "fp32, TF32"
        elif self.kind == "half":
            name = f".{row_of(self.low).method}()"
        elif self.kind == "fp32" and self.arrived:
            name = "as it is"
        return f"{name}, compiled" if self.compiled else name


def ways_for(
    model: nn.Module, options: Options, kinds: Iterable[str], *, compiled: bool
) -> list[Way]:
    """The ways that `kinds` names, fp32 first; without TF32 where a device has none.

    Raises:
        OptionError: a kind is not in `KINDS`.
        UnsupportedModelError: nothing in the model could run low.
    """
    asked = ["fp32", *kinds]
    if wrong := next((kind for kind in asked if kind not in KINDS), None):
        raise OptionError(f"{wrong!r} is not a way: give any of {', '.join(KINDS)}")
    low, half = _precision_for(model, options), arrived(model)
    device = home_of(model)
    has_tf32 = False
    if device.type == "cuda":
        has_tf32 = torch.cuda.get_device_capability(device) >= (8, 0)
    plain = [
        Way(kind, low, options, arrived=half)
        for kind in KINDS
        if kind in asked and (kind != "tf32" or has_tf32)
    ]
    again = [replace(way, compiled=True) for way in plain]
    return plain + again if compiled else plain


def arrived(model: nn.Module) -> str:
    """The half dtype of most elements of the model's weights, or ""."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in parameters_of(model):
        sizes[parameter.dtype] += parameter.numel()
    most = max(sizes, key=lambda dtype: sizes[dtype], default=None)
    return short_name(most) if most and most in LOW_DTYPES.values() else ""


def _precision_for(model: nn.Module, options: Options) -> torch.dtype:
    """The compute dtype of the low ways.

    This is the dtype that `convert` would choose.  Where `convert` would leave the
    model as it is, the dtype of half-precision weights is taken, else the dtype under
    `do_no_harm=False`, else the dtype of `precision=`.
    """
    low, _ = choose_precision(model, options)
    low = low or LOW_DTYPES.get(arrived(model))
    if low is None:
        low, why = choose_precision(model, options.replace(do_no_harm=False))
        low = low or LOW_DTYPES.get(str(options.precision))
        if low is None:
            raise UnsupportedModelError(f"{class_name(model)} {not_converted(why)}")
    return low
