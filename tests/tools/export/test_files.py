"""Files of exported programs: whole or not at all, checked when they are read."""

from __future__ import annotations

import copy
import operator
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import autoamp
from autoamp.tools.export_plan import keep_plan
from tests.logs import warned
from tests.says import says
from tests.small_models import BF16, Of
from tests.tools.export.programs import FP16, X, edited, plan_of, run, two


def export(path: Path, target: str = "pt2", **options: Any) -> Any:
    return autoamp.export(two(), (X,), target=target, out=path, **BF16, **options)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ONNX file that takes batches of any size."""
    path = tmp_path_factory.mktemp("onnx") / "m.onnx"
    sizes = ({0: torch.export.Dim("batch")},)
    given = {"dynamic_shapes": sizes, "target": "onnx", "out": path}
    autoamp.export(two(), (X,), **given, **FP16)
    return path


# -- what a file holds --------------------------------------------------------------


def test_a_file_is_read_and_run_without_our_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quick one of two: whoever asks for a module of ours fails."""
    expected = autoamp.convert(two(), **BF16)(X)
    program = export(tmp_path / "m.pt2")
    assert plan_of(autoamp.load(tmp_path / "m.pt2")) == plan_of(program)
    ours = pickle.dumps(autoamp.Rules.default("bf16"))
    for name in [name for name in sys.modules if name.startswith("autoamp")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError):
        pickle.loads(ours)
    read = torch.export.load(tmp_path / "m.pt2")
    assert torch.equal(read.module()(X), expected)
    targets = {n.target for n in read.graph.nodes if n.op == "call_function"}
    assert {op.namespace for op in targets - {operator.getitem}} == {"aten"}


def test_an_onnx_file_holds_low_weights_and_the_callers_types(written: Path) -> None:
    model = autoamp.load(written)
    kinds = {i.name: i.data_type for i in model.graph.initializer}
    assert kinds["0.weight"] == onnx.TensorProto.FLOAT16
    assert kinds["2.weight"] == onnx.TensorProto.FLOAT
    for value in (*model.graph.input, *model.graph.output):
        assert value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    plan = plan_of(model)
    names = {op["name"]: op["precision"] for op in plan["report"]["ops"]}
    of = {n["op"]: n["dtypes"] for n in plan["nodes"].values() if n["op"] in names}
    assert (of["linear"], names["linear"]) == (["float16"], "fp16")


@pytest.mark.parametrize("rows", [3, 8, 20])
def test_any_batch_in_one_onnx_file(rows: int, written: Path) -> None:
    x = torch.randn(rows, 64)
    with torch.no_grad():
        exact = two().double()(x.double())
        ours = autoamp.convert(two(), **FP16)(x)
    (result,) = run(written, x)
    assert result.dtype == torch.float32
    errors = [float((each - exact).norm()) for each in (result, ours)]
    assert errors[0] <= 1.1 * errors[1]


def test_a_large_onnx_model_is_two_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoamp.tools.export_onnx._LARGE", 1000)
    path = tmp_path / "m.onnx"
    export(path, "onnx")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]
    assert autoamp.load(path)


# -- what is not as planned, or no file of ours, is refused ---------------------------

PLANS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "another dtype": (
        {"nodes": lambda n: {**n, "linear": {"dtypes": ["float32"], "op": ""}}},
        ["linear", "bfloat16", "float32"],
    ),
    "a node more": ({"nodes": lambda n: dict([*n.items()][1:])}, ["no plan"]),
    "a weight less": (
        {"weights": lambda w: {**w, "x": {"source": "", "dtype": "float32"}}},
        ["weight x"],
    ),
    "schema": ({"schema": "other"}, ["schema"]),
    "newer": ({"version": 9}, ["upgrade autoamp"]),
    "version": ({"version": "1"}, ["version"]),
    "nodes": ({"nodes": []}, ["nodes"]),
    "a node": ({"nodes": {"linear": 3}}, ["nodes.linear"]),
    "source": ({"weights": {"x": {"source": 1, "dtype": ""}}}, ["source"]),
    "target": ({"target": None}, ["target"]),
    "report": ({"report": {"schema": "autoamp.report"}}, ["no report"]),
    "no report": ({"report": None}, ["no report"]),
}


@pytest.fixture(scope="module")
def program() -> Any:
    return autoamp.export(two(), (X,), **BF16)


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_that_does_not_fit_is_refused(
    name: str, tmp_path: Path, program: Any
) -> None:
    changes, named = PLANS[name]
    plan = copy.deepcopy(plan_of(program))
    for key, change in changes.items():
        plan[key] = change(plan[key]) if callable(change) else change
    given, path = copy.copy(program.graph_module.meta), tmp_path / "m.pt2"
    try:
        keep_plan(program, plan)
        torch.export.save(program, path)
    finally:
        program.graph_module.meta.update(given)
    with pytest.raises(autoamp.AutoampError) as raised:
        autoamp.load(path)
    says(raised, "m.pt2", *named)


def widen_a_cast(model: Any) -> None:
    cast = next(n for n in model.graph.node if n.op_type == "Cast")
    cast.attribute[0].i = onnx.TensorProto.FLOAT


def widen_all(model: Any) -> None:
    """Makes a model in fp32 of the file, which is valid and not as planned."""
    for node in model.graph.node:
        if node.op_type == "Cast":
            node.attribute[0].i = onnx.TensorProto.FLOAT
    for each in model.graph.initializer:
        if each.data_type == onnx.TensorProto.FLOAT16:
            value = onnx.numpy_helper.to_array(each).astype(np.float32)
            each.CopyFrom(onnx.numpy_helper.from_array(value, each.name))
    del model.graph.value_info[:]


def drop_the_plan(model: Any) -> None:
    del model.metadata_props[:]


def spoil_the_plan(model: Any) -> None:
    model.metadata_props[0].value = "[" * 100_000


@pytest.mark.parametrize(
    "edit", [widen_a_cast, widen_all, drop_the_plan, spoil_the_plan]
)
def test_an_onnx_file_that_was_changed_is_refused(
    edit: Callable[[Any], None], written: Path, tmp_path: Path
) -> None:
    with pytest.raises(autoamp.ExportError) as raised:
        autoamp.load(edited(written, tmp_path / "other.onnx", edit))
    says(raised, "other.onnx")


def test_a_program_of_another_tool_has_no_plan(tmp_path: Path) -> None:
    torch.export.save(torch.export.export(two(), (X,)), tmp_path / "m.pt2")
    with pytest.raises(autoamp.ExportError) as raised:
        autoamp.load(tmp_path / "m.pt2")
    says(raised, "m.pt2", "no plan")


@pytest.mark.parametrize(
    "name", ["a.pt2", "b.pt2", "c.json", "zip.pt2", "d.onnx", "none.pt2", "", "a\0b"]
)
def test_files_that_are_none(name: str, tmp_path: Path) -> None:
    contents = {"a.pt2": b"", "b.pt2": b"\x00\xff" * 50, "c.json": b"{}"}
    contents["d.onnx"] = b"\xff" * 100
    for each, content in contents.items():
        (tmp_path / each).write_bytes(content)
    with zipfile.ZipFile(tmp_path / "zip.pt2", "w") as archive:
        archive.writestr("x", "y")
    with pytest.raises((autoamp.OptionError, autoamp.ExportError)) as raised:
        autoamp.load(f"{tmp_path}/{name}")
    says(raised, name.partition("\0")[0])


# -- where no file can be written, none is, and an older one stays --------------------


@pytest.mark.parametrize(
    ("out", "named"),
    [
        ("m.onnx", ".pt2"),
        ("nowhere/m.pt2", "folder that exists"),
        ("folder.pt2", "is a folder"),
        ("a\0b.pt2", "not a file path"),
        (3, "out=3"),
        ([], "out=[]"),
        (b"m.pt2", "out=b'm.pt2'"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused_at_once(
    tmp_path: Path, out: Any, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder.pt2").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.export, "export", None)  # not reached
    with pytest.raises(autoamp.OptionError) as raised:
        export(out)
    says(raised, named)
    assert [p.name for p in tmp_path.iterdir()] == ["folder.pt2"]
    if not isinstance(out, str):
        with pytest.raises(autoamp.OptionError):
            autoamp.load(out)


def fails_halfway(_: Any, to: Any) -> None:
    to.write(b"half")
    raise RuntimeError("no space")


def disk_is_full(_: Any, to: Any) -> None:
    raise OSError(28, "No space left on device")


def saves_another(_: Any, to: Any, real: Any = torch.export.save) -> None:
    real(torch.export.export(two(), (X,)), to)


@pytest.mark.parametrize("broken", [fails_halfway, disk_is_full, saves_another])
def test_an_older_file_stays_where_writing_fails(
    broken: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.pt2"
    path.write_bytes(b"older")
    monkeypatch.setattr(torch.export, "save", broken)
    with pytest.raises(autoamp.ExportError):
        export(path)
    assert path.read_bytes() == b"older"
    assert [*tmp_path.iterdir()] == [path]


def test_what_onnx_refuses_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise onnx.checker.ValidationError("node_x: no such type")

    monkeypatch.setattr(onnx.checker, "check_model", refuses)
    with pytest.raises(autoamp.ExportError) as raised:
        export(tmp_path / "m.onnx", "onnx")
    says(raised, "node_x: no such type")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("empty", [(), {}])
def test_a_model_without_results_is_told_of(empty: Any, tmp_path: Path) -> None:
    layer = nn.Linear(8, 8)

    def forward(_: Any, x: torch.Tensor) -> Any:
        layer(x)
        return empty

    model = Of(forward, layer=layer)
    with pytest.raises(autoamp.ExportError) as raised:
        autoamp.export(model, (torch.ones(2, 8),), out=tmp_path / "m.pt2", **BF16)
    says(raised, "empty", option="out=")
    assert [*tmp_path.iterdir()] == []


def in_a_process(code: str, folder: Path) -> None:
    environment = {**os.environ, "AUTOAMP_CALIBRATE": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (".", *sys.path)))
    command = [sys.executable, "-c", code]
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=120)


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
    in_a_process(code, tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_a_name_as_long_as_a_file_system_takes(tmp_path: Path) -> None:
    path = tmp_path / ("\u65e5" * 80 + ".pt2")  # 244 bytes
    export(path)
    assert autoamp.load(path)


# -- classes of others, which a process that loads the file has to import -------------


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
    in_a_process(made, tmp_path)
    with pytest.raises(autoamp.OptionError) as raised:
        autoamp.load(tmp_path / "m.pt2")
    says(raised, "m.pt2", "results.Result", option="import")


def test_classes_of_other_packages_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class Encoder(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return [outputs.BaseModelOutput(last_hidden_state=super().forward(x))]

    path, older = tmp_path / "m.pt2", tmp_path / "older.pt2"
    program = autoamp.export(Encoder(8, 8), (torch.ones(2, 8),), out=path, **BF16)
    name = "transformers.modeling_outputs.BaseModelOutput"
    says(warned(caplog), "m.pt2", name, option="import")
    assert plan_of(autoamp.load(path))["classes"] == [name]
    keep_plan(program, {k: v for k, v in plan_of(program).items() if k != "classes"})
    torch.export.save(program, older)
    assert autoamp.load(older), "files of older versions name no classes"
