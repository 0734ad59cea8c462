"""Files of models with branches and loops: the dtypes in all bodies are planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp.exported import files
from tests.exported.test_onnx import FP16, edited, run

loops: Any = pytest.importorskip("torch._higher_order_ops.while_loop")
scans: Any = pytest.importorskip("torch._higher_order_ops.scan")


class Body(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.a, self.b, self.c = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = getattr(self, self.name)(x)
        return self.c(made)

    def cond(self, x: Tensor) -> Any:
        one, other = (lambda z: self.a(z).relu()), (lambda z: self.b(z).tanh())
        return torch.cond(x.sum() > 0, one, other, (x,))

    def nested(self, x: Tensor) -> Any:
        return torch.cond(x.mean() > 0, self.cond, lambda z: self.b(z).tanh(), (x,))

    def while_loop(self, x: Tensor) -> Any:
        def step(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return i + 1, self.a(x).relu()

        start = torch.tensor(0), x
        return loops.while_loop(lambda i, _: i < 3, step, start)[1]

    def scan(self, x: Tensor) -> Any:
        def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            state = (self.a(row) + state).tanh()
            return state, self.b(state)

        return scans.scan(step, torch.zeros(32), x)[1]


def widen_a_body(model: Any) -> None:
    for node in model.graph.node:
        for body in (a.g for a in node.attribute if a.HasField("g")):
            for cast in (n for n in body.node if n.op_type == "Cast"):
                cast.attribute[0].i = onnx.TensorProto.FLOAT


@pytest.mark.thorough(but=["cond"])
@pytest.mark.parametrize("name", ["cond", "nested", "while_loop", "scan"])
def test_bodies_are_planned_and_checked(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Body(name).eval(), torch.randn(4, 32).abs()
    path = tmp_path / "m.onnx"
    program = autoamp.export(model, (x,), target="onnx", out=path, **FP16)
    with torch.no_grad():
        ours = program.module()(x)
    step = torch.finfo(torch.float16).eps * float(ours.abs().max())
    assert float((torch.as_tensor(run(path, x)[0]) - ours).abs().max()) <= 2 * step
    with pytest.raises(autoamp.ExportError, match=r"refuses its types|not compute"):
        autoamp.load(edited(path, tmp_path / "other.onnx", widen_a_body))
    torch.export.save(program, tmp_path / "m.pt2")
    plan, _ = files.plan_in(tmp_path / "m.pt2")
    inner = {n.rpartition(".")[2]: dtypes for n, (dtypes, _) in plan.nodes.items()}
    assert any("." in each for each in plan.nodes)
    assert inner["linear"] == ("float16",)
