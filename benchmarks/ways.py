"""The ways to run a model that are set side by side, and the step that is timed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autoamp

from .errors import Batch
from .metrics import ModelCase, to_device
from .setting import Setting

CPU_BF16 = Setting()
INDUCTOR = ", inductor"
"""The end of the name of a way that inductor compiles."""

CHANNELS_LAST = ", channels last"
"""The end of the name of a way whose convolutions and images lie channels last."""

Step = Callable[[], None]


class Prepared(NamedTuple):
    """What is called, the context of its forward, its batch, and the model itself."""

    call: Callable[..., Any]
    context: Callable[[], AbstractContextManager[Any]]
    batch: Batch
    model: nn.Module

    def forward(self) -> Any:
        """One forward."""
        args, kwargs = copy.copy(self.batch)
        with self.context():
            return self.call(*args, **kwargs)


def low_way(setting: Setting) -> str:
    """The way in which all of the model is in the compute dtype: "bfloat16"."""
    return str(setting.low).removeprefix("torch.")


def prepared(
    case: ModelCase, way: str, setting: Setting = CPU_BF16, **options: Any
) -> Prepared:
    """A model of its own, ready to run one way.

    Args:
        case: the model and its batch.
        way: "fp32", "autocast", "autoamp", `low_way`; or one followed by
            `CHANNELS_LAST`, by `INDUCTOR`, or by both in this order.
        setting: the device and the compute dtype.
        **options: of the conversion, for autoamp.
    """
    device, dtype = setting.device, setting.low
    way, comma, _ = way.partition(INDUCTOR)
    way, last, _ = way.partition(CHANNELS_LAST)
    model, batch = case.model().to(device), to_device(case.inputs(0), device)
    if last:
        model = model.to(memory_format=torch.channels_last)
        batch = pytree.tree_map_only(
            Tensor,
            lambda t: t.to(memory_format=torch.channels_last) if t.dim() == 4 else t,
            batch,
        )
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    if way.startswith("autoamp"):
        given = {"do_no_harm": False, "strict": True, **options}
        if comma:
            given["backend"] = "inductor"
        model = autoamp.convert(model, precision=setting.precision, **given)
        return Prepared(model, context, batch, model)
    if way == "autocast":
        context = partial(torch.autocast, device, dtype)
    elif way == low_way(setting):
        model = model.to(dtype)
        batch = pytree.tree_map_only(
            Tensor, lambda t: t.to(dtype) if t.dtype == torch.float32 else t, batch
        )
    call: Callable[..., Any] = torch.compile(model) if comma else model
    return Prepared(call, context, batch, model)


def scaler_of(way: str, setting: Setting) -> torch.amp.GradScaler | None:
    """The loss scaler that a way needs beside it: autocast's, in fp16."""
    needed = way.startswith("autocast") and setting.precision == "fp16"
    return torch.amp.GradScaler(setting.device) if needed else None


def step_of(
    case: ModelCase,
    ready: Prepared,
    batches: int = 1,
    scaler: torch.amp.GradScaler | None = None,
) -> Step:
    """A training step: forwards and backwards of `batches`, and a step of SGD."""
    optimizer = torch.optim.SGD(ready.model.parameters(), lr=1e-6, foreach=True)
    ready.model.train()

    def step() -> None:
        for _ in range(batches):
            loss = case.loss(ready.forward())
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step
