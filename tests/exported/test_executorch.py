"""Files for ExecuTorch: `make test-executorch`, in an environment that has it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import autoamp
from autoamp.exported import files, targets
from tests.exported.test_export import FP16, X, two
from tests.small_models import BF16

needs_executorch = pytest.mark.skipif(
    importlib.util.find_spec("executorch") is None, reason="make test-executorch"
)


@needs_executorch
@pytest.mark.filterwarnings("ignore")  # of packages that ExecuTorch imports
def test_a_file_runs_and_carries_its_plan(tmp_path: Path) -> None:
    path = tmp_path / "m.pte"
    program = autoamp.export(two(), (X,), target="executorch", out=path, **FP16)
    loaded, plan, report = files.opened(path)
    assert plan.target == "executorch"
    assert report.low_ops == 4
    (result,) = loaded.load_method("forward").execute([X])
    with torch.no_grad():
        exact = two().double()(X.double())
        ours = program.module()(X)
    errors = [float((each - exact).norm()) for each in (result, ours)]
    assert errors[0] <= 1.1 * errors[1]
    weights = path.stat().st_size - len(plan.to_json())
    assert weights < 0.6 * sum(p.numel() * 4 for p in two().parameters())


@needs_executorch
@pytest.mark.filterwarnings("ignore")
def test_why_bf16_is_refused(tmp_path: Path) -> None:
    program = autoamp.export(two(), (X,), target="onnx", **BF16)
    files.write(program, targets.target_of("executorch"), tmp_path / "m.pte")
    loaded, _, _ = files.opened(tmp_path / "m.pte")
    (result,) = loaded.load_method("forward").execute([X])
    with torch.no_grad():
        exact = two().double()(X.double())
        ours = program.module()(X)
    errors = [float((each - exact).norm()) for each in (result, ours)]
    assert errors[0] > 2 * errors[1]  # "several times": lift the refusal where it fails


@needs_executorch
def test_junk_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.pte").write_bytes(b"\xff" * 100)
    with pytest.raises(autoamp.ExportError, match="no file of ExecuTorch's"):
        autoamp.load(tmp_path / "m.pte")


def test_without_executorch_nothing_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda _: None)
    (tmp_path / "m.pte").write_bytes(b"")
    install = r"pip install 'autoamp\[executorch\]'"

    def exported(**given: Any) -> None:
        autoamp.export(two(), (X,), target="executorch", **given, **FP16)

    with pytest.raises(autoamp.ExportError, match=install):
        exported(out=tmp_path / "other.pte")
    with pytest.raises(autoamp.ExportError, match=install):
        autoamp.load(tmp_path / "m.pte")
    exported()  # the program alone needs no package
    with pytest.raises(autoamp.ExportError, match=r"several times as large"):
        autoamp.export(two(), (X,), target="executorch", **BF16)
