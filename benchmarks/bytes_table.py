"""The table of `python -m benchmarks.bytes`: one process a model, resumable."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.progress import track

from . import report
from .bytes_models import case_of
from .bytes_plot import svg
from .bytes_rows import KINDS, Row, mean, ratio
from .bytes_step import WARM_UP, WAYS, count_step
from .capability import capability

STEM = "bytes"
LIMIT_S = 900
"""Seconds that the four ways of one model may take together."""

HEADER = (
    "model",
    *(f"{way}, MB" for way in WAYS),
    *(f"autoamp / autocast, {kind}" for kind in KINDS),
)

NOTE = f"""\
Bytes that kernels read and write in one training step, forward and backward, without
the optimizer, counted at the dispatcher; 1 MB is 10^6 bytes. Views count nothing, a
broadcast dimension counts once, a fused kernel counts its inputs and outputs. Every
column has the same batch and the model's own loss; dropout is 0. The step counted
comes after {WARM_UP} steps of an optimizer, which changed all weights: the refresh of
autoamp's low copies of the weights is included (in the forward), as autocast's casts
are.
"saved" is the bytes saved for the backward. "_written" has its attention written out,
as transformers' `attn_implementation="eager"` has it."""


def measured(name: str) -> Row:
    """The figures of one model, way by way; a way that fails has its error instead."""
    row: Row = {"name": name, "commit": commit(), "ways": {}, "failures": {}}
    for way in WAYS:
        torch._dynamo.reset()
        try:
            row["ways"][way] = count_step(case_of(name), way).as_json()
        except Exception as error:  # noqa: BLE001 - the other ways are still counted
            row["failures"][way] = said(error)
    return row


def said(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def commit() -> str:
    """The commit checked out, with "+" where what is counted differs from it."""

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["git", *words],
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
            check=False,
        )

    found = git("rev-parse", "--short", "HEAD").stdout.strip() or "unknown"
    counted = ("autoamp", "rules", "benchmarks/*.py", "tests/zoo")
    return found + "+" * (git("diff", "--quiet", "HEAD", "--", *counted).returncode > 0)


def in_a_process(name: str, module: str = "benchmarks.bytes") -> Row:
    """`measured`, in a process of its own: whatever happens to it, a row comes back."""
    command = [sys.executable, "-m", module, "--one", name]
    failed: Row = {"name": name, "commit": commit(), "ways": {}}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {**failed, "failures": {"all": f"it took more than {LIMIT_S} s"}}
    if done.returncode == 0:
        row: Row = json.loads(done.stdout.splitlines()[-1])
        return row
    last = (done.stderr.strip() or "no message").splitlines()[-1][:200]
    return {**failed, "failures": {"all": f"exit {done.returncode}: {last}"}}


def fill(
    names: Sequence[str],
    folder: Path,
    *,
    again: bool = False,
    take: Callable[[str], Row] = in_a_process,
) -> str:
    """Measures the models named that `folder` has no whole row of; returns the table.

    The results are written after every model, so that a run that was ended goes on
    where it was.  A row of which a way failed is measured anew.
    """
    path = (folder / STEM).with_suffix(".json")
    rows: dict[str, Row] = {}
    if path.exists():
        rows = {row["name"]: row for row in json.loads(path.read_text())["models"]}
    todo = [n for n in names if again or n not in rows or rows[n]["failures"]]
    text = ""
    for name in track(todo, "counting bytes"):
        rows[name] = take(name)
        print(f"{name}: {_brief(rows[name])}", flush=True)
        text = write(list(rows.values()), folder)
    return text or write(list(rows.values()), folder)


def write(rows: Sequence[Row], folder: Path) -> str:
    """Writes bytes.md, bytes.json and bytes.svg to `folder`; returns the text."""
    rows = sorted(rows, key=lambda row: row["name"].startswith("zoo/"))
    written = [row for row in rows if row["name"].endswith("_written")]
    rest = [row for row in rows if row not in written]
    paper = [row for row in rest if not row["name"].startswith("zoo/")]
    zoo = [row for row in rows if row["name"].startswith("zoo/")]
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    parts = [f"{capability('cpu')}; commit {commits}", "", NOTE]
    for part in (paper, written, zoo):
        if part:
            parts += ["", table(part)]
    failures = [
        f"- {row['name']}, {way}: {why}"
        for row in rows
        for way, why in row["failures"].items()
    ]
    parts += ["", "Not counted:", "", *failures] * bool(failures)
    text = "\n".join(parts) + "\n"
    report.write(
        folder / STEM, text, {"capability": capability("cpu"), "models": list(rows)}
    )
    (folder / STEM).with_suffix(".svg").write_text(svg(paper, zoo))
    return text


def table(rows: Sequence[Row]) -> str:
    """The Markdown table, with the geometric means of its ratios at the foot."""
    cells = [
        [
            row["name"],
            *(_megabytes(row, way) for way in WAYS),
            *(_ratio(ratio(row, kind)) for kind in KINDS),
        ]
        for row in rows
    ]
    means = [_ratio(mean(rows, kind)) for kind in KINDS]
    return report.markdown(
        HEADER, [*cells, ["geometric mean", *("" for _ in WAYS), *means]]
    )


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _megabytes(row: Row, way: str) -> str:
    if way not in row["ways"]:
        return "failed"
    value = row["ways"][way]["step"] / 1e6
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _brief(row: Row) -> str:
    figures = ", ".join(f"{way} {_megabytes(row, way)}" for way in WAYS)
    failures = "".join(f"; {way}: {why}" for way, why in row["failures"].items())
    return f"{figures} MB; autoamp / autocast {_ratio(ratio(row, 'step'))}{failures}"
