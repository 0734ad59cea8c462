"""ExecuTorch files of exported programs; the plan is a method that returns its JSON."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import torch

from autoamp import compat
from autoamp.errors import ExportError
from autoamp.exported.plan import Plan, plan_from, plan_kept_in
from autoamp.exported.targets import check_installed
from autoamp.printable import printable_line
from autoamp.saved.rows import SavedReport

_MAGIC = b"ET"
"""The identifier at byte 4 of a file begins so (ExecuTorch, schema/program.fbs)."""

_METHOD = f"{compat.PLAN_KEY}_plan"


def write(program: torch.export.ExportedProgram, path: Path) -> None:
    """Lowers a program to ExecuTorch, with XNNPACK's kernels where it has them."""
    exir = importlib.import_module("executorch.exir")
    xnnpack = importlib.import_module(
        "executorch.backends.xnnpack.partition.xnnpack_partitioner"
    )
    plan = plan_kept_in(program)
    lowered = exir.to_edge_transform_and_lower(
        program,
        partitioner=[xnnpack.XnnpackPartitioner()],
        constant_methods={_METHOD: plan.to_json()},
    )
    path.write_bytes(lowered.to_executorch().buffer)


def opened(path: str | os.PathLike[str], shown: str) -> tuple[Any, Plan, SavedReport]:
    """The program in a file for ExecuTorch's runtime, its plan and its report.

    Raises:
        ExportError: the file holds no plan, or ExecuTorch cannot load it.
    """
    check_installed("executorch", shown)
    with open(path, "rb") as file:
        head = file.read(8)
    if head[4:6] != _MAGIC:  # which ends the process in ExecuTorch's runtime
        raise ExportError(f"{shown}: it is no file of ExecuTorch's")
    runtime = importlib.import_module("executorch.runtime").Runtime.get()
    try:
        program = runtime.load_program(Path(path))
        has_plan = _METHOD in program.method_names
        note = program.load_method(_METHOD).execute([])[0] if has_plan else None
    except Exception as error:
        text = printable_line(f"{type(error).__name__}: {error}", 300)
        raise ExportError(f"{shown}: ExecuTorch cannot load it: {text}") from error
    return program, *plan_from(shown, note)
