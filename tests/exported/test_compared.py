"""An export beside the converted model: the same bits, or what differs is said."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.exported.test_export import FP16
from tests.exported.test_in_range import Heads
from tests.small_models import BF16


class UNet(nn.Module):
    """Convolutions with a skip connection, whose images are worth permuting."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.down = nn.Conv2d(16, 32, 3, padding=1)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.last = nn.Conv2d(32, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        skip = self.norm(self.first(x)).relu()
        y = self.up(self.down(nn.functional.max_pool2d(skip, 2)).relu())
        return self.last(torch.cat([skip, y], 1))


@pytest.mark.thorough(but=["False"])
@pytest.mark.usefixtures("bf16_units")  # where a layout pays
@pytest.mark.parametrize("training", [False, True])
def test_an_export_lays_images_as_the_converted_model_does(
    training: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, x = UNet().train(training), torch.randn(2, 3, 32, 32)
    autoamp.convert(model, **BF16)
    program = autoamp.export(model, (x,), out=tmp_path / "m.pt2")
    assert "differs" not in caplog.text
    laid = [
        name
        for name, t in program.state_dict.items()
        if t.dim() == 4 and not t.is_contiguous()
    ]
    assert laid
    loaded = torch.export.load(tmp_path / "m.pt2")
    assert {n: t.stride() for n, t in loaded.state_dict.items()} == {
        n: t.stride() for n, t in program.state_dict.items()
    }
    with torch.no_grad():
        assert torch.equal(loaded.module()(x), model(x))


@pytest.mark.thorough
def test_a_difference_is_told_by_what_differs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    converted = autoamp.convert(UNet().eval(), **BF16)
    x = torch.randn(2, 3, 16, 16)
    with caplog.at_level(logging.WARNING):
        autoamp.export(converted, (x,), deny=["conv2d"])
    (line,) = [r.message for r in caplog.records if "converted model" in r.message]
    assert "output 0 of the exported UNet differs by up to " in line
    assert "only the model calls " in line
    assert "conv2d in bf16 (3 times)" in line
    assert "conv2d in fp32 (3 times)" in line
    assert "autoamp diff" not in line


@pytest.mark.thorough
def test_a_rule_that_the_model_lacks_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 32)
    autoamp.export(autoamp.convert(Heads().eval(), **FP16), (x,))
    (line,) = [r.message for r in caplog.records if "converted model" in r.message]
    assert "is finite in places, unlike that of the converted model" in line
    assert 'the program has keep=["b"], without which' in line
    strict = autoamp.convert(Heads().eval(), strict=True, **FP16)
    with pytest.raises(autoamp.ExportError, match=r'left the .*with keep=\["b"\]'):
        autoamp.export(strict, (x,))
