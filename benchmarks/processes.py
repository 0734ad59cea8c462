"""Rows of a table, each measured in a process of its own and kept as soon as it is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.progress import track

from .ratios import Row

ROOT = Path(__file__).parents[1]
LIMIT_S = 900
"""Seconds that all ways of one model may take together."""


def said(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


COMMIT = "BENCHMARK_COMMIT"
"""The variable that names the commit where files were copied without their history."""


def commit() -> str:
    """The commit checked out, with "+" where what is measured differs from it."""
    if given := os.environ.get(COMMIT):
        return given
    if shutil.which("git") is None:
        return "unknown"

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["git", *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )

    found = git("rev-parse", "--short", "HEAD").stdout.strip()
    if not found:
        return "unknown"
    counted = ("autoamp", "rules", "benchmarks/*.py", "tests/zoo")
    return found + "+" * (git("diff", "--quiet", "HEAD", "--", *counted).returncode > 0)


def in_a_process(
    name: str, module: str, arguments: Sequence[str] = (), limit: float = LIMIT_S
) -> Row:
    """`python -m MODULE --one NAME`: whatever happens to it, a row comes back."""
    command = [sys.executable, "-m", module, "--one", name, *arguments]
    failed: Row = {"name": name, "commit": commit(), "ways": {}}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return {**failed, "failures": {"all": f"it took more than {limit:g} s"}}
    if done.returncode == 0:
        row: Row = json.loads(done.stdout.splitlines()[-1])
        return row
    last = (done.stderr.strip() or "no message").splitlines()[-1][:200]
    return {**failed, "failures": {"all": f"exit {done.returncode}: {last}"}}


def fill(
    names: Sequence[str],
    stem: Path,
    *,
    take: Callable[[str], Row],
    write: Callable[[Sequence[Row], Path], str],
    brief: Callable[[Row], str],
    again: bool = False,
) -> str:
    """Measures the models named that `stem`.json has no whole row of.

    The results are written after every model, so that a run that was ended goes on
    where it was.  A row of which a way failed is measured anew.

    Args:
        take: measures one model.
        write: writes rows to a folder, and returns the table.
        brief: a row in one line, for the terminal.
        again: models are measured that have a row.

    Returns:
        The table.
    """
    path = stem.with_suffix(".json")
    rows, done = kept(path), finished(path)
    todo = [name for name in names if again or name not in done]
    text = ""
    for name in track(todo, stem.name):
        rows[name] = take(name)
        print(f"{name}: {brief(rows[name])}", flush=True)
        text = write(list(rows.values()), stem.parent)
    return text or write(list(rows.values()), stem.parent)


def kept(path: Path) -> dict[str, Row]:
    """The rows of a file of results by model; none where there is no such file."""
    if not path.exists():
        return {}
    return {row["name"]: row for row in json.loads(path.read_text())["models"]}


def finished(path: Path) -> set[str]:
    """The models of a file of results of which no way failed."""
    return {name for name, row in kept(path).items() if not row["failures"]}


def failures(rows: Sequence[Row]) -> list[str]:
    """A line for each way to run a model that failed."""
    return [
        f"- {row['name']}, {way}: {why}"
        for row in rows
        for way, why in row["failures"].items()
    ]


def commits(rows: Sequence[Row]) -> str:
    """The commits that rows were measured at."""
    return ", ".join(sorted({row["commit"] for row in rows}))
