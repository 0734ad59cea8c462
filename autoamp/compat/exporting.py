"""Private and new parts of `torch.export`."""

from __future__ import annotations

import io
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import fx

PLAN_KEY = "autoamp"
"""The key of the plan in the metadata that `torch.export.save` keeps."""


def flat_graph(program: torch.export.ExportedProgram) -> fx.GraphModule:
    """The graph of a program, with flat inputs and a tuple of flat outputs.

    The guards on inputs are left out: the program that is exported in the end has its
    own.
    """
    gm = program.module(check_guards=False)
    assert isinstance(gm, fx.GraphModule)
    gm.graph.set_codegen(fx.graph.CodeGen())
    gm.recompile()
    return gm


def with_note(node: fx.Node | fx.GraphModule, note: dict[str, Any]) -> dict[str, Any]:
    """The metadata of `node` with a note, which `torch.export` keeps in files."""
    return {**node.meta, "custom": {**node.meta.get("custom", {}), **note}}


def note_of(node: fx.Node | fx.GraphModule, key: str) -> Any:
    """What `with_note` has noted of a node under `key`; None if nothing."""
    return (node.meta.get("custom") or {}).get(key)


def set_plan(program: torch.export.ExportedProgram, plan: dict[str, Any]) -> None:
    """Keeps a plan, of plain values, in a program and in the files saved of it."""
    gm = program.graph_module
    gm.meta.update(with_note(gm, {PLAN_KEY: plan}))


def plan_in(program: torch.export.ExportedProgram) -> Any:
    """The plan kept in a program; None if there is none."""
    return note_of(program.graph_module, PLAN_KEY)


def compile_package(
    program: torch.export.ExportedProgram, path: Path, notes: dict[str, str]
) -> None:
    """Compiles a program to a package of AOTInductor's, with notes in its metadata."""
    held = io.BytesIO()  # torch's writer of files ends the process on a full disk
    torch._inductor.aoti_compile_and_package(
        program,
        package_path=held,
        inductor_configs={"aot_inductor.metadata": notes},
    )
    path.write_bytes(held.getbuffer())


def open_package(path: str) -> tuple[Any, Any]:
    """A package of AOTInductor's, and the plan in its metadata; None for no plan."""
    package = torch._inductor.aoti_load_package(path)
    return package, package.get_metadata().get(PLAN_KEY)


def onnx_program(program: torch.export.ExportedProgram, opset: int | None) -> Any:
    """A program as torch's ONNX exporter exports it: a `torch.onnx.ONNXProgram`.

    The exporter's lines about packages that it does not need are left out.
    """
    chosen: dict[str, Any] = {} if opset is None else {"opset_version": opset}
    told = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = told.level
    told.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            made = torch.onnx.export(program, dynamo=True, verbose=False, **chosen)
    finally:
        told.setLevel(level)
    assert made is not None
    return made


def classes_of(program: torch.export.ExportedProgram) -> tuple[str, ...]:
    """The classes among a program's arguments and results that torch has to import.

    Torch's loaders find such a class once the module is imported that registers it.
    """
    specs = [program.call_spec.in_spec, program.call_spec.out_spec]
    found: dict[str, None] = {}
    while specs:
        spec = specs.pop()
        if spec is None or spec.is_leaf():
            continue
        specs += spec.children()
        kinds = (spec.type, spec.context)  # a named tuple's class is the context
        for kind in (each for each in kinds if isinstance(each, type)):
            if kind.__module__.partition(".")[0] not in _KNOWN:
                found[f"{kind.__module__}.{kind.__qualname__}"] = None
    return tuple(found)


_KNOWN = frozenset({"builtins", "collections", "torch"})
