"""One training step of one model, run one way, with its bytes counted."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autoamp.passes.check.saved import saved_bytes
from autoamp.tools.count import CountingMode

from .metrics import ModelCase
from .traffic import Traffic, TrafficMode, is_cast
from .ways import Prepared, prepared

WAYS = ("fp32", "autocast", "autoamp", "bfloat16")
"""The columns of the table."""

WARM_UP = 2
"""Steps before the counted one: the first captures, and an optimizer follows each."""


@dataclass(frozen=True)
class StepCount:
    """What one training step came to.

    `refreshed` counts low copies of weights that were made equal to their weights in
    the counted step: after an optimizer step all of them, and their bytes are in the
    forward's.  `saved` is the bytes saved for the backward.
    """

    traffic: Traffic
    saved: int
    refreshed: int
    loss: float

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
        }


def count_step(case: ModelCase, way: str) -> StepCount:
    """Bytes of a training step of `case`, run in one of `WAYS`.

    The step counted is the one after `WARM_UP` steps, each followed by an optimizer's
    step, so that copies of weights kept between calls are out of date and are refreshed
    in it.  The optimizer's own bytes are not counted.  Bytes saved for the backward are
    those of one more forward on the same batch.
    """
    ready = prepared(case, way)
    parameters = list(ready.model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1e-6)

    def fresh() -> Prepared:
        """The model with a batch of its own, which it may write into."""
        return ready._replace(batch=copy.deepcopy(ready.batch))

    def forward(own: Prepared) -> Any:
        torch.manual_seed(0)
        output = own.forward()
        return case.loss(output), output

    def step(own: Prepared) -> Tensor:
        value: Tensor = forward(own)[0]
        value.backward()
        return value.detach()

    for _ in range(WARM_UP):
        step(fresh())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    last = fresh()  # the copy of the batch is no part of the step
    with CountingMode(parameters) as counting, TrafficMode() as mode:
        loss = step(last)
    optimizer.zero_grad(set_to_none=True)
    saved = saved_bytes(partial(forward, fresh()), parameters).total
    refreshed = counting.counts.refreshed
    return StepCount(mode.traffic, saved, refreshed, loss.item())
