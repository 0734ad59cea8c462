"""ONNX files of exported programs: written by torch, checked by onnx.

The plan of such a file is about ONNX's values: a value has the name of the node of the
exported program that it stands for, or names that node in its metadata.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autoamp import compat
from autoamp.dtypes import parse_low_dtype, short_name
from autoamp.errors import ExportError
from autoamp.messages import error_line, printable_line
from autoamp.passes.report_rows import SavedReport
from autoamp.tools.export_members import (
    MEMBERS,
    check_members,
    digest_of,
    digest_of_file,
    note_of_members,
)
from autoamp.tools.export_plan import PLAN_KEY, Plan, held_by, plan_from, plan_kept_in
from autoamp.tools.export_targets import Target, check_installed
from autoamp_said import logger_of

logger = logger_of(__name__)

_LARGE = 1 << 30
"""Bytes of weights from which on they go to a second file; protobuf ends at 2 GiB."""

_NODE = "pkg.torch.onnx.fx_node"
"""The metadata in which torch's exporter names the node of the exported program."""


def write(target: Target, program: torch.export.ExportedProgram, path: Path) -> None:
    """Writes the ONNX file of a program, with the plan in its metadata."""
    import onnx

    plan = plan_kept_in(program)
    low = parse_low_dtype(plan.report.get("compute_dtype") or "")
    opset = None if low is None else target.opsets.get(short_name(low))
    onnx_program = compat.onnx_program(program, opset)
    _check_writes(onnx_program.exported_program)
    size = sum(t.numel() * t.element_size() for _, t in held_by(program))
    onnx_program.save(os.fspath(path), external_data=size > _LARGE)
    model = onnx.load(os.fspath(path), load_external_data=False)
    if not model.graph.output:
        raise ExportError("the model returns no tensor, which an ONNX file has to")
    renamed = _with_onnx_names(plan, model)
    model.metadata_props.add(key=PLAN_KEY, value=renamed.to_json())
    note = note_of_members(_members(model, path))
    model.metadata_props.add(key=MEMBERS, value=note)
    path.write_bytes(model.SerializeToString())


def _check_writes(program: torch.export.ExportedProgram) -> None:
    """Checks that a program writes to none of its buffers, which ONNX cannot.

    Torch's exporter leaves such writes out, and of the ops that make them, as batch
    norms in training mode do, it may write ops that compute other results.

    Raises:
        ExportError: the program writes to a buffer.
    """
    signature = program.graph_signature
    written = [*dict.fromkeys(signature.buffers_to_mutate.values())]
    if written:
        shown = ", ".join(written[:3]) + (", ..." if len(written) > 3 else "")
        raise ExportError(
            f"each call of the model writes to {shown}, and a model in ONNX keeps "
            "nothing from call to call. model.eval() before the export ends the writes "
            'of batch norms; other buffers can be arguments and results; target="pt2" '
            "takes the model as it is"
        )
    inputs = [*dict.fromkeys(signature.user_inputs_to_mutate.values())]
    if inputs:
        logger.warning(
            "autoamp: the model writes to %s, which it is given, and a model in ONNX "
            "leaves it as it is; its results are the same",
            ", ".join(inputs),
        )


def _members(model: Any, path: Path) -> dict[str, tuple[int, str]]:
    """The parts of an ONNX model: the model without its note, and its second file.

    The model is hashed as onnx writes it, so that another tool may write it again.
    """
    bare = type(model)()
    bare.CopyFrom(model)
    kept = [each for each in model.metadata_props if each.key != MEMBERS]
    del bare.metadata_props[:]
    bare.metadata_props.extend(kept)
    digests = {"model": digest_of([bare.SerializeToString(deterministic=True)])}
    places = {
        each.value
        for graph in _graphs(model.graph)
        for weight in graph.initializer
        for each in weight.external_data
        if each.key == "location"
    }
    for place in sorted(places):
        try:
            with (path.parent / place).open("rb") as file:
                digests[place] = digest_of_file(file)
        except (OSError, ValueError):
            digests[place] = (0, "")  # as of no file
    return digests


def opened(path: str | os.PathLike[str], shown: str) -> tuple[Any, Plan, SavedReport]:
    """The ONNX model in a file, its plan and its report, after a check.

    Raises:
        ExportError: the file holds no plan, or other dtypes than planned; or onnx finds
            the model invalid, or infers other dtypes than the file has.
    """
    check_installed("onnx", shown)
    import onnx

    try:
        model = onnx.load(os.fspath(path), load_external_data=False)
    except Exception as error:
        text = error_line(error)
        raise ExportError(f"{shown}: onnx cannot load it: {text}") from error
    notes = {each.key: each.value for each in model.metadata_props}
    plan, report = plan_from(shown, notes.get(PLAN_KEY))
    if MEMBERS in notes:  # files of earlier days have none
        check_members(shown, notes[MEMBERS], _members(model, Path(path)))
    try:
        onnx.checker.check_model(os.fspath(path), full_check=True)
    except Exception as error:
        text = printable_line(str(error), 800)
        raise ExportError(
            f"{shown}: onnx refuses the model: {text}. To export it, keep the op named "
            'there in fp32 (deny=["..."]), or try the other precision'
        ) from error
    made = {name: (dtype,) for name, dtype, _ in _typed(model)}
    plan.check(shown, "value", made, dict(_weights(model)))
    return model, plan, report


def _with_onnx_names(plan: Plan, model: Any) -> Plan:
    """The plan about the values of an ONNX model, as torch's exporter typed them."""
    nodes: dict[str, tuple[tuple[str, ...], str]] = {}
    outside = {name for node in model.graph.node for name in node.output}
    for name, dtype, node in _typed(model):
        if name not in outside:  # no report has the ops of bodies by name
            nodes[name] = ((dtype,), "")
            continue
        notes = {each.key: each.value for each in node.metadata_props}
        of = re.match(r"%(\w+) ", notes.get(_NODE, ""))
        node_plan = plan.nodes.get(name) or plan.nodes.get(of[1] if of else "")
        nodes[name] = ((dtype,), node_plan[1] if node_plan else "")
    weights = {
        name: (plan.weights.get(name, ("", ""))[0], dtype)
        for name, dtype in _weights(model)
    }
    return replace(plan, nodes=nodes, weights=weights)


def _typed(model: Any) -> Iterator[tuple[str, str, Any]]:
    """The name and the dtype of each tensor that a node makes, and the node."""
    for graph in _graphs(model.graph):
        typed = (*graph.value_info, *graph.output)
        kinds = {each.name: each.type.tensor_type.elem_type for each in typed}
        for node in graph.node:
            for name in node.output:
                if kinds.get(name):  # none is known of a sequence
                    yield name, _named(kinds[name]), node


def _weights(model: Any) -> Iterator[tuple[str, str]]:
    """The name and the dtype of each weight."""
    for graph in _graphs(model.graph):
        for tensor in graph.initializer:
            yield tensor.name, _named(tensor.data_type)


def _graphs(graph: Any) -> Iterator[Any]:
    """A graph, and the bodies of its branches and loops, at any depth.

    Torch's exporter gives each value of all of them a name of its own.
    """
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            bodies = [attribute.g] if attribute.HasField("g") else attribute.graphs
            for body in bodies:
                yield from _graphs(body)


def _named(number: int) -> str:
    """The name of an element type as torch names it: 10 is "float16"."""
    import onnx

    name: str = onnx.TensorProto.DataType.Name(number).lower()
    return {"float": "float32", "double": "float64"}.get(name, name)
