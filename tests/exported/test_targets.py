"""The runtimes: what each takes, what it refuses, and which ops stay fp32 there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp import compat
from autoamp.dtypes import LOW_DTYPES
from autoamp.exported import program as programs
from autoamp.exported.targets import targets
from autoamp.op_names import parse_op_name
from autoamp.place.devices import named_device
from autoamp_cli.words import TARGETS
from tests.exported.test_export import X, two
from tests.small_models import BF16


def test_the_table_is_whole() -> None:
    assert tuple(targets()) == TARGETS
    for name, target in targets().items():
        assert target.name == name
        assert target.source
        for dtype, low in LOW_DTYPES.items():
            assert (dtype in target.dtypes) != (dtype in target.refused)
            if target.kind == "onnx" and dtype in target.dtypes:
                assert target.opsets[dtype] >= 20
            if target.device is not None:
                assert named_device(target.device, low).pays
        for kept in target.fp32.values():
            for op in kept:
                parse_op_name(op)


def test_a_runtime_refuses_what_it_cannot_run(tmp_path: Any) -> None:
    out = tmp_path / "out.onnx"
    with pytest.raises(autoamp.ExportError) as told:
        autoamp.export(two(), (X,), target="onnxruntime-cpu", out=out, **BF16)
    text = str(told.value)
    assert "cannot run bf16" in text
    assert "no bf16 kernel for a matrix product" in text
    assert "precision='fp16'" in text
    assert [*tmp_path.iterdir()] == []


@pytest.mark.thorough
def test_a_runtime_that_gains_nothing_gets_fp32(
    caplog: pytest.LogCaptureFixture,
) -> None:
    program = autoamp.export(two(), (X,), target="onnxruntime-cpu", precision="fp16")
    assert {t.dtype for t in program.state_dict.values()} == {torch.float32}
    assert "CPU provider has few kernels in fp16" in caplog.text
    forced = {"precision": "fp16", "do_no_harm": False}
    program = autoamp.export(two(), (X,), target="onnxruntime-cpu", **forced)
    assert torch.float16 in {t.dtype for t in program.state_dict.values()}


class Picks(nn.Module):
    """Ends in ops of which ONNX has no kernel in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("bi,bj->bij", self.line(x), self.line(x))
        return self.line(y)


def ops_of(program: Any) -> dict[str, dict[str, Any]]:
    return {op["op"]: op for op in compat.plan_in(program)["report"]["ops"]}


@pytest.mark.thorough
def test_ops_that_a_runtime_lacks_stay_fp32_with_its_reason() -> None:
    allowed = ops_of(autoamp.export(Picks().eval(), (X,), **BF16))
    assert allowed["aten::einsum.default"]["precision"] == "bf16"
    kept = ops_of(autoamp.export(Picks().eval(), (X,), target="onnx", **BF16))
    einsum = kept["aten::einsum.default"]
    assert einsum["precision"] == "fp32"
    assert einsum["reason"].startswith("Einsum of ONNX takes no bfloat16")
    assert "onnx" in einsum["origin"]
    assert kept["aten::linear.default"]["precision"] == "bf16"
    denied = {**BF16, "deny": ["linear"], "target": "onnx"}  # beside the target's rules
    found = ops_of(autoamp.export(Picks().eval(), (X,), **denied))
    assert {op["precision"] for op in found.values()} == {"fp32"}


@pytest.mark.thorough
def test_a_device_that_is_not_here_places_the_casts() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()).eval()
    x = torch.randn(512, 2048)
    program = autoamp.export(model, (x,), target="tensorrt")
    plan = compat.plan_in(program)
    assert plan["report"]["compute_dtype"] == "fp16"
    assert {op["precision"] for op in plan["report"]["ops"]} == {"fp16"}
    assert plan["target"] == "tensorrt"


def test_another_spelling_that_computes_something_else_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(programs, "_widened", lambda t: t * 1.1)
    with pytest.raises(autoamp.VerificationError, match="another spelling of its norm"):
        autoamp.export(two(), (X,), target="onnx", **BF16)


@pytest.mark.thorough
def test_norms_have_one_dtype_where_a_runtime_asks_for_it() -> None:
    def dtypes(target: str) -> list[set[torch.dtype]]:
        program = autoamp.export(two(), (X,), target=target, **BF16)
        norms = [n for n in program.graph.nodes if "layer_norm" in str(n.target)]
        assert len(norms) == 1
        return [{o.meta["val"].dtype for o in n.all_input_nodes} for n in norms]

    assert dtypes("onnx") == [{torch.float32}]
    assert len(dtypes("pt2")[0]) == 2
