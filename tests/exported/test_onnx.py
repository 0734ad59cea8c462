"""ONNX files: valid, with the plan inside, and as true as the converted model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import autoamp
from autoamp.exported import files, onnx_files
from autoamp.exported.targets import target_of
from tests.exported.test_export import X, two
from tests.models import BY_NAME, LARGE
from tests.small_models import BF16

FP16: dict[str, Any] = {"precision": "fp16", "do_no_harm": False}


ONNX = target_of("onnx")


@pytest.fixture(scope="module")
def program() -> torch.export.ExportedProgram:
    """Takes batches of any size."""
    sizes = ({0: torch.export.Dim("batch")},)
    return autoamp.export(two(), (X,), dynamic_shapes=sizes, target="onnx", **FP16)


@pytest.fixture(scope="module")
def written(
    program: torch.export.ExportedProgram, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("onnx") / "m.onnx"
    files.write(program, ONNX, path)
    return path


def run(path: Path, *values: Tensor) -> list[Any]:
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, settings)
    names = [each.name for each in session.get_inputs()]
    given = dict(zip(names, (v.numpy() for v in values), strict=True))
    return list(session.run(None, given))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*sorted(LARGE - {"nn_transformer"}), "bert"])
def test_onnx_runtime_is_as_true_as_the_converted_model(
    name: str, tmp_path: Path
) -> None:
    case = BY_NAME[name]
    model = case.model().eval()
    args, kwargs = case.inputs(0)
    converted = autoamp.convert(copy.deepcopy(model), **FP16)
    path = tmp_path / "m.onnx"
    autoamp.export(converted, args, kwargs, target="onnx", out=path)
    values = [v for v in pytree.tree_leaves((args, kwargs)) if torch.is_tensor(v)]
    given = {i.name for i in onnx.load(path).graph.input}
    assert len(given) == len(values)

    def wide(value: Any) -> Any:
        is_float = torch.is_tensor(value) and value.is_floating_point()
        return value.double() if is_float else value

    with torch.no_grad():
        exact = copy.deepcopy(model).double()(
            *pytree.tree_map(wide, args), **pytree.tree_map(wide, kwargs)
        )
        ours = converted(*args, **kwargs)
    theirs = run(path, *values)
    triples = zip(
        *(pytree.tree_leaves(each) for each in (exact, ours, theirs)), strict=True
    )
    for true, one, other in triples:
        # The error of one number, such as a loss, is chance.
        is_float = isinstance(true, Tensor) and true.is_floating_point()
        if is_float and true.numel() > 1:
            errors = [float((torch.as_tensor(e) - true).norm()) for e in (one, other)]
            assert errors[1] <= 1.1 * errors[0]


@pytest.mark.thorough
def test_the_file_holds_low_weights_and_the_callers_types(written: Path) -> None:
    model = onnx.load(written)
    kinds = {i.name: i.data_type for i in model.graph.initializer}
    assert kinds["0.weight"] == onnx.TensorProto.FLOAT16
    assert kinds["2.weight"] == onnx.TensorProto.FLOAT
    for value in (*model.graph.input, *model.graph.output):
        assert value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    (result,) = run(written, X)
    assert result.dtype == np.float32
    with torch.no_grad():
        exact = two().double()(X.double())
        ours = autoamp.convert(two(), **FP16)(X)
    errors = [float((torch.as_tensor(e) - exact).norm()) for e in (ours, result)]
    assert errors[1] <= 1.1 * errors[0]


@pytest.mark.thorough
def test_bf16_takes_an_opset_whose_ops_take_it(tmp_path: Path) -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3), torch.nn.GroupNorm(4, 16), torch.nn.ReLU()
    ).eval()
    path = tmp_path / "m.onnx"
    x = torch.randn(2, 3, 8, 8)
    autoamp.export(model, (x,), target="onnx", out=path, **BF16)
    made = onnx.load(path)
    onnx.checker.check_model(made, full_check=True)
    assert made.opset_import[0].version == 22
    kinds = {i.data_type for i in made.graph.initializer}
    assert onnx.TensorProto.BFLOAT16 in kinds


def test_any_batch_in_one_file(written: Path) -> None:
    model = autoamp.convert(two(), **FP16)
    for rows in (3, 8, 20):
        x = torch.randn(rows, 64)
        with torch.no_grad():
            expected = model(x)
            exact = two().double()(x.double())
        errors = [
            float((torch.as_tensor(each) - exact).norm())
            for each in (run(written, x)[0], expected)
        ]
        assert errors[0] <= 1.1 * errors[1]


def edited(path: Path, to: Path, edit: Any) -> Path:
    model = onnx.load(path)
    edit(model)
    onnx.save(model, to)
    return to


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


def test_a_file_that_was_changed_is_refused(written: Path, tmp_path: Path) -> None:
    with pytest.raises(autoamp.ExportError, match=r"refuses its types|not compute"):
        autoamp.load(edited(written, tmp_path / "cast.onnx", widen_a_cast))
    with pytest.raises(autoamp.ExportError, match="does not compute what its plan"):
        autoamp.load(edited(written, tmp_path / "wide.onnx", widen_all))

    def without(model: Any) -> None:
        del model.metadata_props[:]

    with pytest.raises(autoamp.ExportError, match="holds no plan"):
        autoamp.load(edited(written, tmp_path / "none.onnx", without))
    (tmp_path / "junk.onnx").write_bytes(b"\xff" * 100)
    with pytest.raises(autoamp.ExportError, match="onnx cannot load it"):
        autoamp.load(tmp_path / "junk.onnx")


def test_the_plan_names_the_ops_of_the_report(written: Path) -> None:
    loaded, plan, report = files.opened(written)
    assert isinstance(loaded, onnx.ModelProto)
    names = {op.name: op.precision for op in report.graphs[0].ops}
    of = {op: dtypes for dtypes, op in plan.nodes.values() if op in names}
    assert of["linear"] == ("float16",)
    assert names["linear"] == "fp16"


@pytest.mark.thorough
def test_a_large_model_is_two_files(
    program: torch.export.ExportedProgram,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(onnx_files, "_LARGE", 1000)
    path = tmp_path / "m.onnx"
    files.write(program, ONNX, path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]
    autoamp.load(path)
    assert run(path, X)[0].shape == (8, 64)


@pytest.mark.thorough
def test_what_onnx_refuses_is_not_written(
    program: torch.export.ExportedProgram,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise onnx.checker.ValidationError("node_x: no such type")

    monkeypatch.setattr(onnx.checker, "check_model", refuses)
    with pytest.raises(autoamp.ExportError, match="node_x: no such type"):
        files.write(program, ONNX, tmp_path / "m.onnx")
    assert [*tmp_path.iterdir()] == []
