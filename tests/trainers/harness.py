"""Runs a script of this folder as it is, and tells what the automatic mode did."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate.state import AcceleratorState

import autoamp
from autoamp.auto import switch
from autoamp.inspect.report import Report
from autoamp.model.children import inside

FOLDER = Path(__file__).resolve().parent
ROUNDING = torch.finfo(torch.bfloat16).eps / 2


@dataclass
class Ran:
    """What one run of a script left.

    Attributes:
        result: its `RESULT`.
        warned: the warnings it gave, as (category, message).
        lines: what autoamp logged, as (level, message).
        reports: of each model that was converted, at the end.
        boundaries: which of its "optimizer" and the trainer's "wrapper" of that had a
            boundary of ours at the end.
    """

    result: dict[str, Any]
    warned: set[tuple[str, str]]
    lines: list[tuple[int, str]]
    reports: list[Report]
    boundaries: list[str]

    @property
    def losses(self) -> torch.Tensor:
        return torch.tensor(self.result["losses"], dtype=torch.float64)

    @property
    def moved(self) -> list[bool]:
        """For each step of the optimizer, whether any weight moved."""
        sums = self.result["weights"]
        return [a != b for a, b in itertools.pairwise(sums)]


def run(script: str, precision: str = "", **arguments: Any) -> Ran:
    """Runs `script`, with the automatic mode on where a precision is given."""
    _forget_what_is_global()
    arguments.setdefault("folder", tempfile.mkdtemp())
    argv = [script, *(f"{name}={value}" for name, value in arguments.items())]
    with (
        mock.patch("sys.argv", argv),
        warnings.catch_warnings(record=True) as caught,
        _lines_of("autoamp") as lines,
        _enabled(precision),
    ):
        warnings.simplefilter("always")
        result = runpy.run_path(str(FOLDER / f"{script}.py"))["RESULT"]
        reports = _reports() if precision else []
        boundaries = [
            name
            for name in ("optimizer", "wrapper")
            if "_autoamp" in vars(result.get(name, object))
        ]
    warned = {(w.category.__name__, str(w.message)) for w in caught}
    return Ran(result, warned, lines, reports, boundaries)


@functools.cache
def reference(script: str, **arguments: Any) -> Ran:
    """The same in fp32, or with what `arguments` ask for; run once."""
    return run(script, **arguments)


def _forget_what_is_global() -> None:
    torch._dynamo.reset()
    AcceleratorState._reset_state(reset_partial_state=True)


@contextlib.contextmanager
def _enabled(precision: str) -> Iterator[None]:
    if precision:
        autoamp.enable(precision=precision, do_no_harm=False)
    try:
        yield
    finally:
        autoamp.disable()


@contextlib.contextmanager
def _lines_of(name: str) -> Iterator[list[tuple[int, str]]]:
    """What is logged at INFO and above meanwhile."""
    lines: list[tuple[int, str]] = []
    handler = logging.Handler()
    handler.emit = lambda r: lines.append((r.levelno, r.getMessage()))
    logger = logging.getLogger(name)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _reports() -> list[Report]:
    """Of the models the mode has met and converted."""
    met = [each for each in switch._mode._known.values() if each.converted]
    return [autoamp.report(inside(each.module())) for each in met]


def bound(plain: torch.Tensor, autocast: torch.Tensor) -> float:
    """How far losses may be from fp32's: three times as far as under autocast.

    Which may be near by luck.  Outputs rounded once move a loss by about the same share
    of itself as they are moved by.
    """
    deviation = float((autocast - plain).abs().max())
    return max(3 * deviation, ROUNDING * float(plain.abs().max()))


# -- in processes of their own ---------------------------------------------------------


def environment(precision: str, folder: Path) -> dict[str, str]:
    ours = {
        "AUTOAMP_ENABLE": "1",
        "AUTOAMP_PRECISION": precision,
        "AUTOAMP_DO_NO_HARM": "0",
        "AUTOAMP_REPORT_DIR": str(folder / "reports"),
    }
    plain = {k: v for k, v in os.environ.items() if not k.startswith("AUTOAMP_")}
    threads = {"OMP_NUM_THREADS": "1", "AUTOAMP_CALIBRATE": "0"}
    return plain | threads | (ours if precision else {})


def run_apart(folder: Path, precision: str, *command: str) -> tuple[str, list[Any]]:
    """What a process says on stderr, and the reports it leaves; it must succeed."""
    process = subprocess.Popen(
        [sys.executable, *command, f"folder={folder}"],
        env=environment(precision, folder),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said = process.communicate(timeout=90)[1]
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun, killed, would leave its processes behind
        process.communicate()
        raise
    assert process.returncode == 0, said[-3000:]
    files = sorted((folder / "reports").glob("*/report.json"))
    return said, [json.loads(file.read_text()) for file in files]
