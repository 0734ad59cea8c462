"""The ways to run a model that are set side by side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from autoamp.dtypes import LOW_DTYPES
from autoamp.errors import OptionError, UnsupportedModelError
from autoamp.model.eligible import choose_precision, not_converted
from autoamp.options import Options
from autoamp.plain import class_name

KINDS = ("fp32", "tf32", "autocast", "autoamp", "tuned", "half")
"""What `ways=` may name, in the order in which the ways are shown."""

FP32 = "fp32"
_NAMES = {"tf32": "fp32, TF32", "tuned": "autoamp, tuned"}


@dataclass(frozen=True)
class Way:
    """One way to run a model.

    Attributes:
        kind: one of `KINDS`.
        low: the compute dtype of the ways that have one.
        options: the options of a conversion.
        compiled: whether inductor compiles what is run.
    """

    kind: str
    low: torch.dtype
    options: Options
    compiled: bool = False

    @property
    def name(self) -> str:
        """What the table calls the way."""
        half = ".bfloat16()" if self.low is torch.bfloat16 else ".half()"
        name = half if self.kind == "half" else _NAMES.get(self.kind, self.kind)
        return f"{name}, compiled" if self.compiled else name


def ways_for(
    device: torch.device,
    low: torch.dtype,
    options: Options,
    kinds: Iterable[str],
    *,
    compiled: bool,
) -> list[Way]:
    """The ways that `kinds` names, fp32 first; without TF32 where a device has none.

    Raises:
        OptionError: there is no such kind of way.
    """
    asked = [FP32, *kinds]
    if wrong := next((kind for kind in asked if kind not in KINDS), None):
        raise OptionError(f"{wrong!r} is not a way: give any of {', '.join(KINDS)}")
    plain = [
        Way(kind, low, options)
        for kind in KINDS
        if kind in asked and (kind != "tf32" or has_tf32(device))
    ]
    if not compiled:
        return plain
    # `tune` times torch's own kernels, so it leaves nothing to compile.
    again = [Way(w.kind, low, options, True) for w in plain if w.kind != "tuned"]
    return plain + again


def has_tf32(device: torch.device) -> bool:
    """Whether a device multiplies fp32 matrices in TF32 when it is allowed to."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def precision_for(model: nn.Module, options: Options) -> torch.dtype:
    """The compute dtype of the low ways: what `convert` takes, else what it could take.

    Raises:
        UnsupportedModelError: there is nothing in the model that could run low.
    """
    low, _ = choose_precision(model, options)
    if low is None:
        low, why = choose_precision(model, options.replace(do_no_harm=False))
        if low is None and options.precision in LOW_DTYPES:
            low = LOW_DTYPES[str(options.precision)]
        if low is None:
            raise UnsupportedModelError(
                f"{class_name(model)} {not_converted(model, why)}"
            )
    return low
