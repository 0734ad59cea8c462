"""Recurrent layers in files, whose kernels choose the dtype of their results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.exported.test_onnx import FP16, run
from tests.small_models import BF16


class Recurrent(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        size = layer.hidden_size * (1 + getattr(layer, "bidirectional", False))
        self.layer, self.head = layer, nn.Linear(size, 3)

    def forward(self, x: Tensor) -> Any:
        made = self.layer(x)
        return self.head(made[0]), made[1]


LAYERS: dict[str, Any] = {
    "lstm": lambda: nn.LSTM(8, 16, 2, batch_first=True, bidirectional=True),
    "gru": lambda: nn.GRU(8, 16),
    "lstm_cell": lambda: nn.LSTMCell(8, 16),
    "rnn": lambda: nn.RNN(8, 16, nonlinearity="relu"),
}


@pytest.mark.thorough(but=["lstm"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_program_gives_what_the_converted_model_gives(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = Recurrent(LAYERS[name]()).eval()
    x = torch.randn(7, 8) if name == "lstm_cell" else torch.randn(2, 7, 8)
    converted = autoamp.convert(model, **BF16)
    autoamp.export(converted, (x,), out=tmp_path / "m.pt2")
    assert "of the converted model" not in caplog.text
    with torch.no_grad():
        given = torch.export.load(tmp_path / "m.pt2").module()(x)
        torch.testing.assert_close(given, converted(x), rtol=0, atol=0)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gru", "lstm_cell", "rnn"])
def test_an_onnx_file_has_one_dtype_for_each_call(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Recurrent(LAYERS[name]()).eval()
    x = torch.randn(7, 8) if name == "lstm_cell" else torch.randn(2, 7, 8)
    path = tmp_path / "m.onnx"
    program = autoamp.export(model, (x,), target="onnx", out=path, **FP16)
    with torch.no_grad():
        ours = program.module()(x)[0]
    step = torch.finfo(torch.float16).eps * max(1.0, float(ours.abs().max()))
    assert float((torch.as_tensor(run(path, x)[0]) - ours).abs().max()) <= 2 * step


@pytest.mark.thorough
def test_an_lstm_in_fp16_runs_whatever_kernels_this_machine_has(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model, x = Recurrent(LAYERS["lstm"]()).eval(), torch.randn(2, 7, 8)
    bound = 8 * torch.finfo(torch.float16).eps  # results are below one
    with torch.no_grad():
        exact = model(x)[0]
        converted = autoamp.convert(model, **FP16)
        assert float((converted(x)[0] - exact).abs().max()) <= bound
        autoamp.export(converted, (x,), out=tmp_path / "m.pt2")
        given = torch.export.load(tmp_path / "m.pt2").module()(x)[0]
    assert float((given - exact).abs().max()) <= bound
