"""Files for ExecuTorch: `make test-executorch`, in an environment that has it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import autoamp
from tests.says import says
from tests.small_models import BF16
from tests.tools.export.programs import FP16, X, two

needs_executorch = pytest.mark.skipif(
    importlib.util.find_spec("executorch") is None, reason="make test-executorch"
)


@needs_executorch
@pytest.mark.filterwarnings("ignore")  # of packages that ExecuTorch imports
def test_a_file_runs_and_is_as_true_as_its_program(tmp_path: Path) -> None:
    path = tmp_path / "m.pte"
    program = autoamp.export(two(), (X,), target="executorch", out=path, **FP16)
    loaded = autoamp.load(path)
    plan = json.loads(loaded.load_method("autoamp_plan").execute([])[0])
    assert plan["target"] == "executorch"
    assert {op["precision"] for op in plan["report"]["ops"]} == {"fp16"}
    (result,) = loaded.load_method("forward").execute([X])
    with torch.no_grad():
        exact = two().double()(X.double())
        ours = program.module()(X)
    errors = [float((each - exact).norm()) for each in (result, ours)]
    assert errors[0] <= 1.1 * errors[1]
    weights = path.stat().st_size - len(json.dumps(plan))
    assert weights < 0.6 * sum(p.numel() * 4 for p in two().parameters())


@needs_executorch
def test_junk_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.pte").write_bytes(b"\xff" * 100)
    with pytest.raises(autoamp.ExportError):
        autoamp.load(tmp_path / "m.pte")


def test_without_executorch_nothing_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    (tmp_path / "m.pte").write_bytes(b"")
    install = "pip install 'autoamp[executorch]'"

    def exported(**given: Any) -> None:
        autoamp.export(two(), (X,), target="executorch", **given, **FP16)

    with pytest.raises(autoamp.ExportError) as raised:
        exported(out=tmp_path / "other.pte")
    says(raised, option=install)
    with pytest.raises(autoamp.ExportError) as raised:
        autoamp.load(tmp_path / "m.pte")
    says(raised, "m.pte", option=install)
    exported()  # the program alone needs no package
    with pytest.raises(autoamp.ExportError) as raised:
        autoamp.export(two(), (X,), target="executorch", **BF16)
    says(raised, "executorch", "bf16", option="precision='fp16'")
