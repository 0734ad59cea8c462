"""Models to export, the plan in a program or a file, and how files are run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
from torch import Tensor, nn

from autoamp.tools.export_plan import noted_plan

X = torch.randn(8, 64)
FP16: dict[str, Any] = {"precision": "fp16", "do_no_harm": False}


def two(bias: bool = True) -> nn.Sequential:
    """Two linear layers, with a GELU and a norm between."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 128, bias), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64)
    ).eval()


class Heads(nn.Module):
    """Results that are infinite or NaN in fp32 too, and one of integers."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
        with torch.no_grad():
            self.b.weight[3, 5] = 9e4 * factor

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.b(self.a(x) * 1e-3)
        hidden = torch.ones(32, 32, dtype=torch.bool).triu(1)[:4]
        return y.masked_fill(hidden, -torch.inf), y.abs().log() * 0 / 0, y.argmax(1)


def plan_of(loaded: Any) -> dict[str, Any]:
    """The plan in a program, or in what `autoamp.load` gives of a file."""
    if isinstance(loaded, onnx.ModelProto):
        notes = {each.key: each.value for each in loaded.metadata_props}
        found: dict[str, Any] = json.loads(notes["autoamp"])
        return found
    return noted_plan(loaded)  # type: ignore[no-any-return]


def ops_of(loaded: Any) -> dict[str, dict[str, Any]]:
    """The rows of the report in a plan, by their ops."""
    return {op["op"]: op for op in plan_of(loaded)["report"]["ops"]}


def dtypes_in(program: torch.export.ExportedProgram) -> set[torch.dtype]:
    return {tensor.dtype for tensor in program.state_dict.values()}


def run(path: Path, *values: Tensor) -> list[Tensor]:
    """What ONNX Runtime answers."""
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, settings)
    names = [each.name for each in session.get_inputs()]
    given = dict(zip(names, (v.numpy() for v in values), strict=True))
    return [torch.as_tensor(each) for each in session.run(None, given)]


def edited(path: Path, to: Path, edit: Any) -> Path:
    """A copy of an ONNX file, which `edit` has changed."""
    model = onnx.load(path)
    edit(model)
    onnx.save(model, to)
    return to
