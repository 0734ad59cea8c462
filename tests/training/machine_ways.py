"""The precisions, options and models with which steps go beside a GradScaler's.

Copies of one captured model share its graphs, so that only the first run is dear.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import autoamp
from tests.training.steps import OPTIMIZERS, WIDTH, batch, mlp

INTERVAL = 2


@dataclass(frozen=True)
class Way:
    """A precision, and what decides in it about a step.

    Attributes:
        options: the name of what `convert` is given, among `OPTIONS`.
        scale: makes the loss scale that ours begins with, at a number or where it
            always does; None where there is none.
        half: the parameters are in half precision, and fp32 masters are stepped.
        norm: the model has a batch norm, whose buffers no skipped step may leave
            written.
        several: the script reduces gradients between ranks by itself.
        automatic: nobody converts ours but the automatic mode.
    """

    precision: str
    options: str
    scale: Callable[[float], autoamp.LossScale] | None = None
    half: bool = False
    norm: bool = False
    several: bool = False
    automatic: bool = False

    @property
    def low(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float16


def dynamic(first: float) -> autoamp.LossScale:
    options: Any = {"growth_interval": INTERVAL, "min_scale": 2.0**-100}
    return autoamp.DynamicLossScale(first, **options, climbs=False)


def fixed(_: float) -> autoamp.LossScale:
    return autoamp.StaticLossScale(2.0**10)


LOW = {"do_no_harm": False, "strict": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "auto": LOW,
    "dynamic": {**LOW, "loss_scale": "dynamic"},
    "fixed": {**LOW, "loss_scale": 2.0**10},
    "off": {**LOW, "loss_scale": "off"},
    "nothing": {**LOW, "loss_scale": "off", "guard": False},
}
WAYS = {
    "bf16": Way("bf16", "dynamic", dynamic),
    "bf16 guard": Way("bf16", "auto"),
    "fp16": Way("fp16", "dynamic", dynamic),
    "fp16 fixed": Way("fp16", "fixed", fixed),
    "bf16 ranks": Way("bf16", "dynamic", dynamic, several=True),
    "bf16 parameters": Way("bf16", "auto", half=True),
    "fp16 parameters": Way("fp16", "dynamic", dynamic, half=True),
    "fp16 ranks": Way("fp16", "dynamic", dynamic, several=True),
    "bf16 buffers": Way("bf16", "off", half=True, norm=True),
    "fp16 buffers": Way("fp16", "off", half=True, norm=True),
    "bf16 automatic": Way("bf16", "dynamic", dynamic, automatic=True),
    "fp16 automatic": Way("fp16", "dynamic", dynamic, automatic=True),
}

Make = Callable[[nn.Module], Any]


def one_a_layer(model: Any) -> list[Any]:
    adam = torch.optim.Adam(model[0].parameters(), foreach=True)
    return [adam, torch.optim.SGD(model[2].parameters(), 0.1, momentum=0.9)]


MAKERS: dict[str, Callable[[Any], list[Any]]] = {"two optimizers": one_a_layer}


def optimizers_of(label: str, model: nn.Module) -> list[Any]:
    return MAKERS[label](model) if label in MAKERS else [OPTIMIZERS[label](model)]


FROZEN = (None, 0, 2)
"""Which layer of the model is frozen."""


def freeze(model: Any, layer: int | None) -> None:
    for at in (0, 2):
        model[at].requires_grad_(at != layer)


def plain(half: torch.dtype | None, norm: bool) -> Any:
    """The model that all three are copies of."""
    torch.manual_seed(0)
    model = mlp()
    if norm:
        model[1] = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Tanh())
    return model.to(half)


@functools.cache
def base(
    precision: str,
    half: torch.dtype | None,
    norm: bool,
    options: str,
    automatic: str = "",
) -> Any:
    """Captured; each run of the machine trains copies, for free.

    Args:
        automatic: the test that runs in the automatic mode, which captures the model;
            the end of the mode reverts it.
    """
    model, given = plain(half, norm), OPTIONS[options]
    if half is not None and given.get("loss_scale", "off") == "off":
        return model  # of which nothing is captured
    if not automatic:
        forgotten = torch.optim.SGD(model.parameters(), 0.1) if half else None
        autoamp.convert(model, forgotten, precision=precision, **given)
    for layer in FROZEN:
        freeze(model, layer)
        model(batch(0)[0].to(model[0].weight.dtype)).sum().backward()
    freeze(model, None)
    model.zero_grad()
    return model
