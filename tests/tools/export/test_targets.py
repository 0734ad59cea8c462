"""The runtimes: what each takes, what it refuses, and which ops stay fp32 there."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp_cli.words import TARGETS
from tests.logs import warned
from tests.says import says
from tests.small_models import BF16
from tests.tools.export.programs import FP16, X, dtypes_in, ops_of, plan_of, two


@pytest.mark.parametrize("options", [FP16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("target", TARGETS)
def test_a_runtime_takes_a_precision_or_names_another(
    target: str, options: dict[str, Any]
) -> None:
    try:
        program = autoamp.export(two(), (X,), target=target, **options)
    except autoamp.ExportError as error:
        other = {"fp16": "bf16", "bf16": "fp16"}[options["precision"]]
        says(error, target, options["precision"], option=f"precision={other!r}")
        assert autoamp.export(two(), (X,), target=target, precision=other)
        return
    assert plan_of(program)["target"] == target
    assert {op["precision"] for op in ops_of(program).values()} >= {
        options["precision"]
    }


def test_a_runtime_refuses_what_it_cannot_run(tmp_path: Any) -> None:
    out = tmp_path / "out.onnx"
    with pytest.raises(autoamp.ExportError) as raised:
        autoamp.export(two(), (X,), target="onnxruntime-cpu", out=out, **BF16)
    says(raised, "no bf16 kernel for a matrix product", option="precision='fp16'")
    assert [*tmp_path.iterdir()] == []


def test_a_runtime_that_gains_nothing_gets_fp32(
    caplog: pytest.LogCaptureFixture,
) -> None:
    program = autoamp.export(two(), (X,), target="onnxruntime-cpu", precision="fp16")
    assert dtypes_in(program) == {torch.float32}
    says(warned(caplog), "few kernels in fp16")
    program = autoamp.export(two(), (X,), target="onnxruntime-cpu", **FP16)
    assert torch.float16 in dtypes_in(program)


class Picks(nn.Module):
    """Ends in an op of which ONNX has no kernel in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("bi,ij->bj", self.line(x), self.line.weight)
        return self.line(y)


def test_ops_that_a_runtime_lacks_stay_fp32_with_its_reason() -> None:
    allowed = ops_of(autoamp.export(Picks().eval(), (X,), **BF16))
    assert allowed["aten::einsum.default"]["precision"] == "bf16"
    kept = ops_of(autoamp.export(Picks().eval(), (X,), target="onnx", **BF16))
    einsum = kept["aten::einsum.default"]
    assert einsum["precision"] == "fp32"
    says(einsum["reason"], "Einsum of ONNX takes no bfloat16")
    says(einsum["origin"], "onnx")
    assert kept["aten::linear.default"]["precision"] == "bf16"
    denied = {**BF16, "deny": ["linear"], "target": "onnx"}  # beside the target's rules
    found = ops_of(autoamp.export(Picks().eval(), (X,), **denied))
    assert {op["precision"] for op in found.values()} == {"fp32"}


def test_every_op_that_a_runtime_lacks_is_one_of_torchs() -> None:
    (path,) = Path(autoamp.__file__).parent.rglob("targets.toml")
    table = tomllib.loads(path.read_text("utf-8"))
    kept = [each.get("fp32", {}) for each in table.values()]
    ops = {op for by_dtype in kept for named in by_dtype.values() for op in named}
    assert "aten::topk" in ops
    assert [op for op in ops if not hasattr(torch.ops.aten, op[6:])] == []


def test_a_device_that_is_not_here_places_the_casts() -> None:
    model = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()).eval()
    program = autoamp.export(model, (torch.randn(512, 2048),), target="tensorrt")
    assert plan_of(program)["report"]["compute_dtype"] == "fp16"
    assert {op["precision"] for op in ops_of(program).values()} == {"fp16"}


def test_norms_have_one_dtype_where_a_runtime_asks_for_it() -> None:
    def dtypes(target: str) -> set[torch.dtype]:
        program = autoamp.export(two(), (X,), target=target, **BF16)
        (norm,) = [n for n in program.graph.nodes if "layer_norm" in str(n.target)]
        return {operand.meta["val"].dtype for operand in norm.all_input_nodes}

    assert dtypes("onnx") == {torch.float32}
    assert len(dtypes("pt2")) == 2
