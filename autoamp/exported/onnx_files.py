"""ONNX files of exported programs: written by torch, checked by onnx.

The plan of such a file is about ONNX's values: a value has the name of the node of the
exported program that it stands for, or names that node in its metadata.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autoamp import compat
from autoamp.dtypes import parse_low_dtype, short_name
from autoamp.errors import ExportError
from autoamp.exported.plan import Plan, check_dtypes, plan_from, plan_kept_in
from autoamp.exported.targets import Target, check_installed
from autoamp.printable import printable_line
from autoamp.saved.document import SavedReport

_NODE = "pkg.torch.onnx.fx_node"
"""The metadata in which torch's exporter names the node of the exported program."""


def write(program: torch.export.ExportedProgram, target: Target, path: Path) -> None:
    """Writes the ONNX file of a program, with the plan in its metadata.

    Raises:
        ExportError: onnx finds the model invalid.
    """
    plan = plan_kept_in(program)
    low = parse_low_dtype(plan.report.get("compute_dtype") or "")
    opset = None if low is None else target.opsets.get(short_name(low))
    made = compat.onnx_program(program, opset)
    model = made.model
    own = _with_onnx_names(plan, model)
    model.metadata_props[compat.PLAN_KEY] = own.to_json()
    made.save(os.fspath(path), external_data=_is_large(program))
    _check(path)


def opened(path: str | os.PathLike[str], shown: str) -> tuple[Any, Plan, SavedReport]:
    """The ONNX model in a file, its plan and its report, after a check.

    Raises:
        ExportError: the file holds no plan, or other dtypes than planned.
    """
    check_installed("onnx", shown)
    import onnx

    try:
        model = onnx.load(os.fspath(path), load_external_data=False)
    except Exception as error:
        text = printable_line(f"{type(error).__name__}: {error}", 300)
        raise ExportError(f"{shown}: onnx cannot load it: {text}") from error
    notes = {each.key: each.value for each in model.metadata_props}
    plan, report = plan_from(shown, notes.get(compat.PLAN_KEY))
    planned = {name: dtypes for name, (dtypes, _) in plan.nodes.items()}
    check_dtypes(shown, planned, dict(_inferred(model, shown)), "value")
    meant = {name: (dtype,) for name, (_, dtype) in plan.weights.items()}
    there = {i.name: (_named(i.data_type),) for i in model.graph.initializer}
    check_dtypes(shown, meant, there, "weight")
    return model, plan, report


def _with_onnx_names(plan: Plan, model: Any) -> Plan:
    """The plan about the values of an ONNX model, as torch's exporter typed them."""
    nodes: dict[str, tuple[tuple[str, ...], str]] = {}
    for node in model.graph.all_nodes():
        for value in node.outputs:
            if value.dtype is None or not value.name:
                continue
            of = re.match(r"%(\w+) ", node.metadata_props.get(_NODE, ""))
            known = plan.nodes.get(value.name) or plan.nodes.get(of[1] if of else "")
            dtype = _named(int(value.dtype))
            nodes[value.name] = ((dtype,), known[1] if known else "")
    weights = {
        name: (plan.weights.get(name, ("", ""))[0], _named(int(value.dtype)))
        for name, value in model.graph.initializers.items()
        if value.dtype is not None
    }
    return replace(plan, nodes=nodes, weights=weights)


def _inferred(model: Any, shown: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The dtype of each value, inferred anew from inputs, weights and attributes."""
    import onnx

    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    del bare.graph.value_info[:]
    try:
        typed = onnx.shape_inference.infer_shapes(bare, check_type=True)
    except Exception as error:
        text = printable_line(str(error), 500)
        raise ExportError(f"{shown}: onnx refuses its types: {text}") from error
    makes = {name for node in bare.graph.node for name in node.output}
    for value in (*typed.graph.value_info, *typed.graph.output):
        if value.name in makes:
            yield value.name, (_named(value.type.tensor_type.elem_type),)


def _check(path: Path) -> None:
    """Checks a file as onnx does, with the types of all values.

    Raises:
        ExportError: the file is no valid model.
    """
    import onnx

    try:
        onnx.checker.check_model(os.fspath(path), full_check=True)
    except Exception as error:
        text = printable_line(str(error), 800)
        raise ExportError(
            f"torch's ONNX exporter made a model that onnx refuses: {text}. Keep the "
            'op named there in fp32 (deny=["..."]), or try the other precision'
        ) from error


def _named(number: int) -> str:
    """The name of an element type as torch names it: 10 is "float16"."""
    import onnx

    name: str = onnx.TensorProto.DataType.Name(number).lower()
    return {"float": "float32", "double": "float64"}.get(name, name)


_LARGE = 1 << 30
"""Bytes of weights from which on they go to a second file; protobuf ends at 2 GiB."""


def _is_large(program: torch.export.ExportedProgram) -> bool:
    held: Mapping[str, Any] = {**program.state_dict, **program.constants}
    tensors = [t for t in held.values() if isinstance(t, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors) > _LARGE
