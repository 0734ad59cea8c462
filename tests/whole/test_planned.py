"""A placement for another device runs on this CPU, in the dtypes of that device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoamp
from tests.planned import planned_for
from tests.small_models import BF16, Of


def placed(device: str) -> autoamp.Report:
    # A returned `exp`, which saves its result, would be fp32 on any device.
    model = Of(lambda m, x: 2 * m.fc(x).exp(), fc=nn.Linear(8, 8))
    with planned_for(device):
        converted = autoamp.convert(model, strict=True, **BF16)
        converted(torch.randn(4, 8)).sum().backward()
    assert model.fc.weight.grad is not None
    return autoamp.report(converted)


@pytest.mark.parametrize(("device", "is_low"), [("h100", False), ("cpu", True)])
def test_rules_and_prices_are_those_of_the_device(device: str, is_low: bool) -> None:
    report = placed(device)
    low = {op.name: op.is_low for op in report.ops}
    assert (low["linear"], low["exp"]) == (True, is_low)
