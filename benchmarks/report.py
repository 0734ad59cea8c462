"""Tables in Markdown, and results on disk."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
"""Where results are written unless told otherwise."""

COMMIT = "BENCHMARK_COMMIT"
"""The variable that names the commit where files were copied without their history."""

Data = dict[str, Any]
"""The figures of a table, as its JSON holds them."""


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, padded to be read as it is; all but the first column right."""
    cells = [list(header), *(list(row) for row in rows)]
    if any(len(row) != len(header) for row in cells):
        message = f"every row needs {len(header)} cells, one for each of {header}"
        raise ValueError(message)
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(header), line(rule), *(line(row) for row in rows)])


def write(stem: Path, text: str, data: Data) -> None:
    """Writes `text` to `stem`.md and `data` to `stem`.json."""
    put(stem.with_suffix(".md"), text)
    put(stem.with_suffix(".json"), json.dumps(data, indent=1) + "\n")


def put(path: Path, text: str) -> None:
    """Writes a file whole or not at all: a benchmark may be ended at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    os.replace(part, path)


def commit() -> str:
    """The commit checked out, with "+" where what is measured differs from it."""
    if given := os.environ.get(COMMIT):
        return given
    if shutil.which("git") is None:
        return "unknown"

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )

    found = git("rev-parse", "--short", "HEAD").stdout.strip()
    if not found:
        return "unknown"
    counted = ("autoamp", "rules", "benchmarks/*.py", "tests/zoo")
    return found + "+" * (git("diff", "--quiet", "HEAD", "--", *counted).returncode > 0)


def said(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
