"""Tables of models, each measured in a process of its own and kept as soon as it is."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import track

from . import report
from .report import commit
from .setting import Setting, add_arguments, capability, setting_of

LIMIT_S = 900
"""Seconds that all ways of one model may take together."""

Row = dict[str, Any]
"""A model's name, its figures way by way, and the errors of the ways that failed."""


def new_row(name: str, **more: Any) -> Row:
    """A row without figures."""
    return {"name": name, "commit": commit(), "ways": {}, "failures": {}, **more}


def ratio(row: Row, kind: str) -> float | None:
    """Autoamp's figure over autocast's; None where one is missing or 0."""
    ours, theirs = (row["ways"].get(w, {}).get(kind) for w in ("autoamp", "autocast"))
    return ours / theirs if ours and theirs else None


def mean(rows: Sequence[Row], kind: str) -> float | None:
    """The geometric mean of the ratios that there are; None of none."""
    found = [value for row in rows if (value := ratio(row, kind)) is not None]
    return statistics.geometric_mean(found) if found else None


def ratio_text(value: float | None) -> str:
    """A ratio in a cell of a table."""
    return "-" if value is None else f"{value:.3f}"


def in_a_process(
    name: str, module: str, arguments: Sequence[str] = (), limit: float = LIMIT_S
) -> Row:
    """`python -m MODULE --one NAME`: whatever happens to it, a row comes back."""
    command = [sys.executable, "-m", module, "--one", name, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return new_row(name, failures={"all": f"it took more than {limit:g} s"})
    if done.returncode == 0:
        row: Row = json.loads(done.stdout.splitlines()[-1])
        return row
    last = (done.stderr.strip() or "no message").splitlines()[-1][:200]
    return new_row(name, failures={"all": f"exit {done.returncode}: {last}"})


def kept(path: Path) -> dict[str, Row]:
    """The rows of a file of results by model; none where there is no such file."""
    if not path.exists():
        return {}
    return {row["name"]: row for row in json.loads(path.read_text())["models"]}


def finished(path: Path) -> set[str]:
    """The models of a file of results of which no way failed."""
    return {name for name, row in kept(path).items() if not row["failures"]}


def page(rows: Sequence[Row], machine: str, *parts: str) -> str:
    """A page: where and when its rows were measured, its parts, and what failed."""
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    failed = [
        f"- {row['name']}, {way}: {why}"
        for row in rows
        for way, why in row["failures"].items()
    ]
    text = "\n\n".join([f"{machine}; commit {commits}", *parts, "\n".join(failed)])
    return text.rstrip() + "\n"


@dataclass(frozen=True)
class ModelTable:
    """A table with a row for each model.

    Attributes:
        name: the name of its module, and the start of the names of its files.
        names: the models of a setting; all are measured where none is named.
        measured: measures one model in a setting, in this process.
        text: the page of rows that were measured in a setting, on a machine.
        brief: a row in one line, for the terminal.
        fake: whether it measures no GPU, but fake tensors of one, on any machine.
    """

    name: str
    names: Callable[[Setting], Sequence[str]]
    measured: Callable[[str, Setting], Row]
    text: Callable[[Sequence[Row], Setting, str], str]
    brief: Callable[[Row], str]
    fake: bool = False

    def write(self, rows: Sequence[Row], folder: Path, setting: Setting) -> str:
        """Writes the page and its rows to `folder`; returns the page."""
        machine = capability("cpu" if setting.fake else setting.device)
        stem = folder / setting.stem(self.name)
        text = self.text(rows, setting, machine)
        report.write(stem, text, {"capability": machine, "models": list(rows)})
        return text

    def fill(
        self,
        names: Sequence[str],
        folder: Path,
        setting: Setting,
        take: Callable[[str], Row],
        *,
        again: bool = False,
    ) -> str:
        """Measures the models named of which `folder` has no whole row; the page.

        The results are written after every model, so that a run that was ended goes on
        where it was.  A row of which a way failed is measured anew.

        Args:
            take: measures one model.
            again: models are measured that have a row.
        """
        path = folder / f"{setting.stem(self.name)}.json"
        rows, done = kept(path), finished(path)
        text = ""
        todo = [name for name in names if again or name not in done]
        for name in track(todo, path.stem):
            rows[name] = take(name)
            print(f"{name}: {self.brief(rows[name])}", flush=True)
            text = self.write(list(rows.values()), folder, setting)
        return text or self.write(list(rows.values()), folder, setting)

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Measures what is asked and not yet there; 1 if a way failed."""
        parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{self.name}")
        add_arguments(parser)
        parser.add_argument("names", nargs="*", help="models (all)")
        parser.add_argument("--again", action="store_true", help="finished models too")
        parser.add_argument("--out", type=Path, default=report.RESULTS)
        parser.add_argument("--one", metavar="NAME", help="one model, printed as JSON")
        parser.add_argument(
            "--limit", type=float, default=LIMIT_S, help="seconds a model"
        )
        given = parser.parse_args(arguments)
        setting = setting_of(parser, given, fake=self.fake)
        if given.one:
            print(json.dumps(self.measured(given.one, setting)))
            return 0
        take = partial(
            in_a_process,
            module=f"benchmarks.{self.name}",
            arguments=setting.arguments(),
            limit=given.limit,
        )
        names = given.names or self.names(setting)
        print(self.fill(names, given.out, setting, take, again=given.again))
        rows = kept(given.out / f"{setting.stem(self.name)}.json").values()
        return int(any(row["failures"] for row in rows))
