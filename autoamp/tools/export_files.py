"""Writes the files of exported programs, whole or not at all, and reads them back."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import sys
import uuid
import warnings
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autoamp import compat
from autoamp.errors import ExportError, OptionError
from autoamp.messages import error_line, printable_line
from autoamp.passes.report_rows import SavedReport
from autoamp.tools import export_onnx as onnx_files
from autoamp.tools.export_members import check_archive, seal_archive
from autoamp.tools.export_plan import (
    PLAN_KEY,
    Plan,
    check_program,
    noted_plan,
    plan_from,
    plan_kept_in,
)
from autoamp.tools.export_targets import SUFFIXES, Kind, Target
from autoamp_said import logger_of

logger = logger_of(__name__)

Path_ = str | os.PathLike[str]


def check_path(target: Target, out: Path_) -> Path:
    """The file to write, with links followed.

    Raises:
        OptionError: no file can be written there.
    """
    suffix = SUFFIXES[target.kind]
    shown = printable_line(repr(out), 300)
    try:
        path = Path(os.fspath(out)).resolve()
        is_folder, has_folder = path.is_dir(), path.parent.is_dir()
    except (TypeError, ValueError, OSError, RuntimeError) as error:
        raise OptionError(f"out={shown} is not a file path: {error}") from None
    if path.suffix != suffix:
        raise OptionError(
            f"out={shown}: the file for target={target.name!r} ends in {suffix}"
        )
    if is_folder:
        raise OptionError(f"out={shown} is a folder; give the path of a file")
    if not has_folder or not os.access(path.parent, os.W_OK):
        raise OptionError(
            f"out={shown}: no file can be written there. Pass a path in a folder that "
            "exists and is writable"
        )
    return path


def write(program: torch.export.ExportedProgram, target: Target, out: Path_) -> None:
    """Writes the file of a program, with its plan in it, and reads it back.

    Raises:
        ExportError: the file cannot be made, or does not hold its plan; an older file
            is left unchanged.  Or it cannot be written, as on a full disk.
        OptionError: `out` is no path of a file.
    """
    path = check_path(target, out)
    writers: dict[Kind, Callable[[torch.export.ExportedProgram, Path], None]] = {
        "pt2": _save,
        "aoti": _compile,
        "onnx": partial(onnx_files.write, target),
    }
    with _draft(path) as draft:
        try:
            writers[target.kind](program, draft)
        except (ExportError, OSError):
            raise
        except Exception as error:
            text = error_line(error, 1500)
            raise ExportError(
                f"the file for target={target.name!r} cannot be made: {text}"
            ) from error
        if path.suffix == ".pt2":
            seal_archive(draft)
        opened(draft)
    classes = plan_kept_in(program).classes
    if classes and SUFFIXES[target.kind] == ".pt2":
        modules = sorted({name.rpartition(".")[0] for name in classes})
        logger.warning(
            "autoamp: %s takes or returns %s: a process that loads it, by "
            "torch.export.load too, has to import %s before",
            *(path.name, ", ".join(classes), ", ".join(modules)),
        )


def load(path: Path_) -> Any:
    """What a file holds, after a check against its plan; see `autoamp.load`."""
    return opened(path)[0]


def plan_in(path: Path_) -> tuple[Plan, SavedReport]:
    """The plan in a file, after the same check, and its report."""
    return opened(path)[1:]


_OF_PROGRAMS = ("archive_format", "serialized_exported_program.json")
"""The parts by one of which torch knows an archive of a program."""


def opened(path: Path_) -> tuple[Any, Plan, SavedReport]:
    """What a file holds, with its plan and its report.

    Raises:
        OptionError: the file cannot be read.
        ExportError: it holds no plan, or not what its plan says.
    """
    shown = printable_line(str(path), 300)
    try:
        there, suffix = Path(path).is_file(), Path(path).suffix
    except (OSError, ValueError, TypeError) as error:
        raise OptionError(f"{shown}: cannot be read ({error})") from None
    if not there:
        is_folder = Path(path).is_dir()
        why = "it is a directory" if is_folder else "there is no such file"
        raise OptionError(f"{shown}: {why}")
    if suffix == SUFFIXES["onnx"]:
        return onnx_files.opened(path, shown)
    try:
        names = check_archive(shown, Path(path))
    except OSError as error:
        raise OptionError(f"{shown}: cannot be read ({error})") from None
    try:
        if any("/data/aotinductor/" in name for name in names):
            package = compat.open_package(os.fspath(path))
            return package, *plan_from(shown, package.get_metadata().get(PLAN_KEY))
        # Torch would log its own errors on 25 lines.
        if not any(name.endswith(_OF_PROGRAMS) for name in names):
            saved = any(re.fullmatch(r"[^/]+/data\.pkl", name) for name in names)
            raise OptionError(
                f"{shown}: it holds no exported program. "
                + ("torch.save wrote it, and torch.load reads it. " if saved else "")
                + "Give a file that autoamp.export wrote"
            )
        with warnings.catch_warnings():
            # Torch 2.11 says so of the bytes that it has read itself, for reading only.
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            program = torch.export.load(path)
    except (ExportError, OptionError):
        raise
    except Exception as error:
        text = error_line(error, 800)
        kinds = _kinds_unknown_in(path)
        hint = (
            f" It takes or returns {', '.join(kinds)}: import the module that defines "
            f"{'it' if len(kinds) == 1 else 'them'} before the file is loaded"
        )
        raise OptionError(
            f"{shown}: torch cannot load it: {text}{hint if kinds else ''}"
        ) from error
    plan, report = plan_from(shown, noted_plan(program))
    check_program(shown, plan, program)
    return program, plan, report


def _kinds_unknown_in(path: Path_) -> list[str]:
    """The classes of arguments and results of a file that no module here defines."""
    with zipfile.ZipFile(path) as archive:
        models = [name for name in archive.namelist() if name.endswith(".json")]
        text = b"".join(map(archive.read, models)).decode(errors="replace")
    named = dict.fromkeys(re.findall(r'\\"type\\": \\"(\w[\w.]*\.\w+)\\"', text))
    modules = {name: name.rpartition(".")[0] for name in named}
    return [name for name, module in modules.items() if module not in sys.modules]


def _save(program: torch.export.ExportedProgram, draft: Path) -> None:
    if not program.graph_signature.output_specs:
        raise ExportError(
            "the model returns an empty container, and torch writes no file of a "
            "program without results: return a tensor or None from the model, or leave "
            "out= away and use the program that export returns"
        )
    archive = io.BytesIO()  # torch's writer of files ends the process on a full disk
    with warnings.catch_warnings():
        # Torch warns of each weight with its channels last, and writes it all the same.
        warnings.filterwarnings("ignore", "No complete tensor found")
        torch.export.save(program, archive)
    draft.write_bytes(archive.getbuffer())


def _compile(program: torch.export.ExportedProgram, draft: Path) -> None:
    note = {PLAN_KEY: plan_kept_in(program).to_json()}
    compat.compile_package(program, draft, note)


@contextlib.contextmanager
def _draft(path: Path) -> Iterator[Path]:
    """A path in a new folder; what is written there takes the place of `path`.

    A large ONNX model is two files, which carry their final names in the folder.
    """
    folder = path.with_name(f".autoamp.{uuid.uuid4().hex}")
    try:
        folder.mkdir()
        yield folder / path.name
        for file in sorted(folder.iterdir(), key=lambda p: p.name == path.name):
            os.replace(file, path.with_name(file.name))
    except OSError as error:
        raise ExportError(
            f"out={str(path)!r}: the file cannot be written there, and an older one "
            f"is unchanged: {error.strerror or error}"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
