"""Files of exported programs: whole or not at all, checked when they are read."""

from __future__ import annotations

import copy
import operator
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import autoamp
from autoamp import compat
from autoamp.exported import files
from autoamp.exported.plan import plan_from, plan_kept_in
from autoamp.exported.targets import target_of
from autoamp.options import Options
from tests.exported.test_export import X, two
from tests.small_models import BF16


@pytest.fixture(scope="module")
def program() -> Any:
    return autoamp.export(two(), (X,), **BF16)


@pytest.mark.thorough
def test_a_file_is_read_and_run_without_our_modules(
    tmp_path: Path, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quick one of two: whoever asks for a module of ours fails."""
    expected = autoamp.convert(two(), **BF16)(X)
    files.write(program, target_of("pt2"), tmp_path / "m.pt2")
    ours = pickle.dumps(Options())
    for name in [name for name in sys.modules if name.startswith("autoamp")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError):
        pickle.loads(ours)
    read = torch.export.load(tmp_path / "m.pt2")
    assert torch.equal(read.module()(X), expected)
    targets = {n.target for n in read.graph.nodes if n.op == "call_function"}
    ops = targets - {operator.getitem}
    assert {op.namespace for op in ops} == {"aten"}


def test_what_torch_saves_is_loaded_and_checked(tmp_path: Path, program: Any) -> None:
    path = tmp_path / "m.pt2"
    torch.export.save(program, path)
    loaded = autoamp.load(path)
    assert torch.equal(loaded.module()(X), program.module()(X))
    plan, report = files.plan_in(path)
    assert report.model == "Sequential"
    assert report.low_ops == 4
    assert plan.to_json() == plan_kept_in(program).to_json()


def changed_plan(program: Any, **changes: Any) -> Any:
    plan = copy.deepcopy(compat.plan_in(program))
    for key, change in changes.items():
        plan[key] = change(plan[key]) if callable(change) else change
    return plan


@pytest.mark.thorough(
    but=[
        "changes0-node linear is bfloat16 and was planned as float32",
        "changes3-schema is not",
        "changes5-version is no number",
        "changes7-nodes.linear is no object",
        "changes9-target is no string",
    ]
)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"nodes": lambda n: {**n, "linear": {"dtypes": ["float32"], "op": ""}}},
            "node linear is bfloat16 and was planned as float32",
        ),
        ({"nodes": lambda n: dict([*n.items()][1:])}, "is in no plan"),
        (
            {"weights": lambda w: {**w, "x": {"source": "", "dtype": "float32"}}},
            "weight x is gone",
        ),
        ({"schema": "other"}, "schema is not"),
        ({"version": 9}, "upgrade autoamp"),
        ({"version": "1"}, "version is no number"),
        ({"nodes": []}, "nodes is no object"),
        ({"nodes": {"linear": 3}}, "nodes.linear is no object"),
        ({"weights": {"x": {"source": 1, "dtype": ""}}}, "source is no string"),
        ({"target": None}, "target is no string"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(
    tmp_path: Path, program: Any, changes: dict[str, Any], message: str
) -> None:
    meta = program.graph_module.meta
    kept = meta["custom"]
    path = tmp_path / "m.pt2"
    try:
        compat.set_plan(program, changed_plan(program, **changes))
        torch.export.save(program, path)
    finally:
        meta["custom"] = kept
    with pytest.raises(autoamp.ExportError, match=message):
        autoamp.load(path)


def test_a_report_in_a_plan_is_checked_as_a_report_is(program: Any) -> None:
    with pytest.raises(autoamp.OptionError, match=r"m\.pt2: no report of autoamp"):
        plan_from("m.pt2", changed_plan(program, report={"schema": "autoamp.report"}))
    with pytest.raises(autoamp.OptionError, match="no report"):
        plan_from("m.pt2", changed_plan(program, report=None))
    with pytest.raises(autoamp.ExportError, match="is not JSON"):
        plan_from("m.pt2", "[" * 100_000)


def test_files_that_are_none(tmp_path: Path) -> None:
    for name, content, error in (
        ("a.pt2", b"", "no .pt2"),
        ("b.pt2", b"\x00\xff" * 50, "no .pt2"),
        ("c.json", b"{}", "no .pt2"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(autoamp.OptionError, match=error):
            autoamp.load(tmp_path / name)
    with zipfile.ZipFile(tmp_path / "d.pt2", "w") as archive:
        archive.writestr("x", "y")
    with pytest.raises(autoamp.OptionError, match="torch cannot load it"):
        autoamp.load(tmp_path / "d.pt2")
    for path in (tmp_path / "none.pt2", tmp_path, "a\0b.pt2"):
        with pytest.raises(autoamp.OptionError):
            autoamp.load(path)


def test_a_program_of_another_tool_has_no_plan(tmp_path: Path) -> None:
    plain = torch.export.export(two(), (X,))
    torch.export.save(plain, tmp_path / "m.pt2")
    with pytest.raises(autoamp.ExportError, match="holds no plan of autoamp"):
        autoamp.load(tmp_path / "m.pt2")


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("m.onnx", r"ends in \.pt2"),
        ("nowhere/m.pt2", "a folder that exists"),
        ("folder.pt2", "is a folder"),
        ("a\0b.pt2", "is not a file path"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused_at_once(
    tmp_path: Path, out: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder.pt2").mkdir()
    monkeypatch.setattr(torch.export, "export", None)  # not reached
    with pytest.raises(autoamp.OptionError, match=message):
        autoamp.export(two(), (X,), out=f"{tmp_path}/{out}", **BF16)
    assert [p.name for p in tmp_path.iterdir()] == ["folder.pt2"]


def test_an_older_file_stays_where_writing_fails(
    tmp_path: Path, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.pt2"
    path.write_bytes(b"older")

    def fails(_: Any, to: Any) -> None:
        to.write(b"half")
        raise RuntimeError("no space")

    def full(_: Any, to: Any) -> None:
        raise OSError(28, "No space left on device")

    def other(_: Any, to: Any) -> None:
        real(plain, to)

    plain = torch.export.export(two(), (X,))
    real = torch.export.save
    for broken, error in (
        (fails, autoamp.ExportError),
        (full, autoamp.ExportError),
        (other, autoamp.ExportError),
    ):
        monkeypatch.setattr(torch.export, "save", broken)
        with pytest.raises(error):
            files.write(program, target_of("pt2"), path)
        assert path.read_bytes() == b"older"
        assert [*tmp_path.iterdir()] == [path]


@pytest.mark.thorough
def test_a_full_disk_is_an_error_and_no_end_of_the_process(tmp_path: Path) -> None:
    code = (
        "import resource, signal, torch, autoamp\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "model, x = torch.nn.Linear(256, 256).eval(), torch.randn(4, 256)\n"
        "options = {'precision': 'bf16', 'do_no_harm': False}\n"
        "try:\n"
        "    autoamp.export(model, (x,), out='m.pt2', **options)\n"
        "except autoamp.ExportError as error:\n"
        "    assert 'm.pt2' in str(error), error\n"
        "else:\n"
        "    raise AssertionError\n"
    )
    environment = {**os.environ, "AUTOAMP_CALIBRATE": "0"}
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        check=True,
        timeout=120,
    )
    assert [*tmp_path.iterdir()] == []


def test_a_name_as_long_as_a_file_system_takes(tmp_path: Path, program: Any) -> None:
    path = tmp_path / ("\u65e5" * 80 + ".pt2")  # 244 bytes
    files.write(program, target_of("pt2"), path)
    autoamp.load(path)


@pytest.mark.parametrize("out", [3, [], b"m.pt2"])
def test_what_is_no_path_is_named(out: Any) -> None:
    with pytest.raises(autoamp.OptionError, match=r"out=.* is not a file path"):
        autoamp.export(two(), (X,), out=out, **BF16)
    with pytest.raises(autoamp.OptionError, match="cannot be read"):
        autoamp.load(out)


@pytest.mark.thorough
def test_a_file_whose_classes_are_unknown_says_what_to_import(tmp_path: Path) -> None:
    (tmp_path / "results.py").write_text(
        "import torch\n"
        "class Result(dict): pass\n"
        "torch.utils._pytree.register_pytree_node(Result,\n"
        "    lambda r: ([*r.values()], [*r]),\n"
        "    lambda values, keys: Result(zip(keys, values)),\n"
        "    serialized_type_name='results.Result')\n"
    )
    made = (
        "import torch, autoamp, results\n"
        "class Model(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return results.Result(y=super().forward(x))\n"
        "options = {'precision': 'bf16', 'do_no_harm': False, 'out': 'm.pt2'}\n"
        "autoamp.export(Model(64, 64).eval(), (torch.randn(4, 64),), **options)\n"
    )
    environment = {**os.environ, "AUTOAMP_CALIBRATE": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (".", *sys.path)))
    command = [sys.executable, "-c", made]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=120)
    with pytest.raises(autoamp.OptionError, match=r"returns results\.Result: import"):
        autoamp.load(tmp_path / "m.pt2")


def test_classes_of_other_packages_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class Encoder(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return [outputs.BaseModelOutput(last_hidden_state=super().forward(x))]

    name = "transformers.modeling_outputs.BaseModelOutput"
    path = tmp_path / "m.pt2"
    with caplog.at_level("WARNING"):
        autoamp.export(Encoder(8, 8), (torch.ones(2, 8),), out=path, **BF16)
    assert f"m.pt2 takes or returns {name}: a process" in caplog.text
    plan, _ = files.plan_in(path)
    assert plan.classes == (name,)
    assert plan_from("m", {**plan.to_dict(), "classes": []})[0].classes == ()
    older = {key: value for key, value in plan.to_dict().items() if key != "classes"}
    assert plan_from("m", older)[0].classes == ()
