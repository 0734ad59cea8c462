"""One training step of one model, run one way, with its bytes counted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autoamp
from autoamp.counted.ops import CountingMode
from autoamp.counted.saved import saved_bytes
from autoamp.counted.traffic import Traffic, TrafficMode, is_cast

from .bytes_bound import bytes_bound
from .errors import Batch
from .metrics import ModelCase, to_device
from .setting import Setting

WAYS = ("fp32", "autocast", "autoamp", "bfloat16")
"""The columns of the table."""

WARM_UP = 2
"""Steps before the counted one: the first captures, and an optimizer follows each."""

BF16 = torch.bfloat16
CPU_BF16 = Setting()


@dataclass(frozen=True)
class StepCount:
    """What one training step came to.

    `refreshed` counts low copies of weights that were made equal to their weights in
    the counted step: after an optimizer step all of them, and their bytes are in the
    forward's.  `saved` is the bytes saved for the backward.  `bound` is the least bytes
    of the step under the ceiling (`bytes_bound.py`), 0 for ways other than autoamp.
    """

    traffic: Traffic
    saved: int
    refreshed: int
    loss: float
    bound: int = 0

    def as_json(self) -> dict[str, Any]:
        """The figures of the table, as JSON holds them."""
        lines = self.traffic.by_line()
        return {
            "step": self.traffic.bytes(),
            "forward": self.traffic.bytes("forward"),
            "backward": self.traffic.bytes("backward"),
            "casts": sum(n for line, n in lines.items() if is_cast(line)),
            "saved": self.saved,
            "refreshed": self.refreshed,
            "loss": self.loss,
        } | ({"bound": self.bound} if self.bound else {})


def count_step(case: ModelCase, way: str) -> StepCount:
    """Bytes of a training step of `case`, run in one of `WAYS`.

    The step counted is the one after `WARM_UP` steps, each followed by an optimizer's
    step, so that copies of weights kept between calls are out of date and are refreshed
    in it.  The optimizer's own bytes are not counted.  Bytes saved for the backward are
    those of one more forward on the same batch.
    """
    model, context, batch = prepared(case, way)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def forward(batch: Batch) -> Any:
        torch.manual_seed(0)
        args, kwargs = batch
        with context():
            output = model(*args, **kwargs)
        return case.loss(output), output

    def step(batch: Batch) -> Tensor:
        value: Tensor = forward(batch)[0]
        value.backward()
        return value.detach()

    fresh = partial(copy.deepcopy, batch)  # a model may write into its inputs
    for _ in range(WARM_UP):
        step(fresh())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    last = fresh()
    with CountingMode(model.parameters()) as counting, TrafficMode() as mode:
        loss = step(last)
    optimizer.zero_grad(set_to_none=True)
    # Before `saved_bytes`, whose hooks may have the model captured once more.
    bound = bytes_bound(autoamp.report(model).rewritten) if way == "autoamp" else 0
    saved = saved_bytes(partial(forward, fresh()), model.parameters()).total
    refreshed = counting.counts.refreshed
    return StepCount(mode.traffic, saved, refreshed, loss.item(), bound)


def prepared(
    case: ModelCase, way: str, setting: Setting = CPU_BF16
) -> tuple[nn.Module, Callable[[], AbstractContextManager[Any]], Batch]:
    """The model to call, the context of its forward, and the batch it gets."""
    device, dtype = setting.device, setting.low
    model, batch = case.model().to(device), to_device(case.inputs(0), device)
    if way == "autocast":
        return model, partial(torch.autocast, device, dtype), batch
    if way == "autoamp":
        converted: nn.Module = autoamp.convert(
            model, precision=setting.precision, do_no_harm=False, strict=True
        )
        return converted, nullcontext, batch
    if way == low_way(setting):
        low: Batch = pytree.tree_map_only(
            Tensor, lambda t: t.to(dtype) if t.dtype == torch.float32 else t, batch
        )
        return model.to(dtype), nullcontext, low
    return model, nullcontext, batch


def low_way(setting: Setting) -> str:
    """The way in which all of the model is in the compute dtype: "bfloat16"."""
    return str(setting.low).removeprefix("torch.")
