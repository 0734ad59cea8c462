"""What the tests of measuring look at inside of autoamp: the only imports of it."""

from __future__ import annotations

from typing import Any

from torch import nn

from autoamp import messages as progress
from autoamp.passes.decide import devices
from autoamp.passes.decide.cost import Prices
from autoamp.passes.speeds import clock, prices, speeds, store
from autoamp.tools import tune

AUTOCAST, FP32 = tune.AUTOCAST, tune.FP32
MEASURED, PREDICTED = tune.MEASURED, tune.PREDICTED
Runner, Timed, Tuning = tune.Runner, tune.Timed, tune.Tuning
MeasuredPrices, Specimen = prices.MeasuredPrices, prices.Specimen
op_specimen, replaced = prices.op_specimen, prices._replaced
surely_less, described = clock.surely_less, clock.described
FOLDER, Store = store.FOLDER, store.Store
Probe = speeds.Probe
told = progress.told

__all__ = ["Prices", "devices", "speeds"]


def engine_of(model: nn.Module) -> Any:
    """The engine of a converted model, whose prices a test sets."""
    from autoamp.runtime.conversion import conversion_of

    state = conversion_of(model)
    assert state is not None
    assert state.engine is not None
    return state.engine
