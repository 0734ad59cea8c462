"""Placements made for another device, run on this CPU.

Prices, rules and facts are those of the device, so that the dtypes are those of a model
that is converted there; the kernels are this CPU's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from autoamp.passes.decide.devices import named_device
from autoamp.passes.graph_record import Prepared, Setting
from autoamp.passes.run import prepare
from autoamp.runtime import engine


@contextlib.contextmanager
def planned_for(name: str) -> Iterator[None]:
    """Models that are converted and called inside have the placement of a device.

    Args:
        name: as for `named_device`; "cpu" changes nothing.
    """

    def prepared(*args: Any, setting: Setting, **options: Any) -> Prepared:
        low: torch.dtype = args[3]
        on = replace(setting, device=named_device(name, low))
        return prepare(*args, setting=on, **options)

    with pytest.MonkeyPatch.context() as patch:
        if name != "cpu":
            patch.setattr(engine, "prepare", prepared)
            # A graph that was planned for this CPU is not to be met again.
            patch.setattr(engine.Engine, "shares_graphs", False)
        torch._dynamo.reset()
        yield
    torch._dynamo.reset()
