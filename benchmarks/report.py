"""Tables in Markdown, results on disk, and the command that measures a table."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .setting import capability, usable

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


def page(data: Data, *parts: str) -> str:
    """A page: where and at which commit its figures were measured, then its parts."""
    told = [data["capability"]]
    if "commit" in data:
        told.append(f"commit {data['commit']}")
    if "note" in data:
        told.append(data["note"])
    return "\n\n".join(["; ".join(told), *parts]) + "\n"


def option(name: str, default: Any = None, told: str = "", **more: Any) -> Data:
    """An option of a command, for `Table.options`."""
    kind = {} if default is None or "action" in more else {"type": type(default)}
    return {"flags": name, "default": default, "help": told or None, **kind, **more}


QUICK = option("--quick", False, "small sizes", action="store_true")
ONLY = option("--only", "", "those whose name contains this")


def rounds(default: int) -> Data:
    """The option of how many rounds are timed."""
    return option("--rounds", default, "timed rounds")


@dataclass(frozen=True)
class Table:
    """A table that a command measures at one go and writes with its figures.

    Attributes:
        name: the name of its module, and of its files unless `stem` says otherwise.
        measure: the figures, for the options given; told the commit and the machine by
            the command.
        text: the page of the figures.
        options: what the command can be told, made by `option`.
        stem: the name of the files, for the options given.
        good: whether the figures are as good as asked.
        keeps: whether the results of these options are written.
    """

    name: str
    measure: Callable[[argparse.Namespace], Mapping[str, Any]]
    text: Callable[[Data], str]
    options: Sequence[Data] = field(default=())
    stem: Callable[[argparse.Namespace], str] | None = None
    good: Callable[[Data], bool] = lambda _: True
    keeps: Callable[[argparse.Namespace], bool] = lambda _: True

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Measures, prints the page and writes it; 1 if figures are not good."""
        parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{self.name}")
        parser.add_argument("--out", type=Path, default=RESULTS)
        for each in self.options:
            told = dict(each)
            parser.add_argument(told.pop("flags"), **told)
        given = parser.parse_args(arguments)
        device = getattr(given, "device", "cpu")
        if not usable(device):
            parser.error("this machine has no GPU that torch can use")
        found = dict(self.measure(given))
        data = {"capability": capability(device), "commit": commit(), **found}
        text = self.text(data)
        if self.keeps(given):
            write(
                given.out / (self.stem(given) if self.stem else self.name), text, data
            )
        print(text)
        return int(not self.good(data))
