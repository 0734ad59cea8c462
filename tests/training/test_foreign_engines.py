"""A model with an engine of another library inside is left to the engine."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from torch import nn

from autoamp.training.foreign_engines import engine_of
from tests.says import says


@pytest.mark.parametrize("place", ["itself", "inside"])
def test_an_engine_is_named(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    kind = type("DeepSpeedEngine", (nn.Module,), {"__module__": "deepspeed.runtime"})
    engine = kind()
    model = engine if place == "itself" else nn.Sequential(nn.Linear(2, 2), engine)
    says(engine_of(model, around=False), "DeepSpeed", "DeepSpeedEngine")
    assert engine_of(nn.Linear(2, 2), around=False) == ""
