"""Private and new parts of `torch.export`."""

from __future__ import annotations

import io
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import fx


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


def open_package(path: str) -> Any:
    """A package of AOTInductor's, which can be called."""
    return torch._inductor.aoti_load_package(path)


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
