"""Each row of the table of docs/distributed.md has a test behind it."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.repository.pages import REPO

PAGE = REPO / "docs" / "distributed.md"
TESTS = REPO / "tests" / "distributed"

_MESH = "tensor parallel (parallelize_module), all DTensors, FSDP2 round them"

ELSEWHERE = {
    "FSDP1": REPO / "tests" / "trainers" / "distributed.py",
    _MESH: TESTS / "test_tensor_parallel.py",
}
"""Rows whose test is a whole file, and what these rows are called in it."""

NAMED = {
    "FSDP1": "FullyShardedDataParallel(",
    _MESH: "parallelize_module(",
}


def rows_of(text: str) -> list[str]:
    """The first cells of the first table of a page, as plain text."""
    lines = text.splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("|---"))
    found = []
    for line in lines[first + 1 :]:
        if not line.startswith("|"):
            break
        cell = line.split("|")[1].replace("`", "").strip()
        found.append(cell.removeprefix("\N{EM DASH} "))
    return found


def marks_of(text: str) -> set[str]:
    """The rows that a file's marks `row("...")` name."""
    return {
        str(call.args[0].value)
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) in ("row", "pytest.mark.row")
        and isinstance(call.args[0], ast.Constant)
    }


def all_marks(folder: Path) -> set[str]:
    return {m for path in folder.glob("test_*.py") for m in marks_of(path.read_text())}


def test_every_row_has_a_test() -> None:
    rows = rows_of(PAGE.read_text())
    assert len(rows) == len(set(rows))
    assert set(rows) == all_marks(TESTS) | set(ELSEWHERE)


def test_the_files_of_other_rows_name_them() -> None:
    for row, path in ELSEWHERE.items():
        assert NAMED[row] in path.read_text()


def test_rows_and_marks_are_found() -> None:
    page = "| | runs |\n|---|---|\n| `DDP` | x |\n| \N{EM DASH} `a=1` | y |\n\n| no |"
    assert rows_of(page) == ["DDP", "a=1"]
    assert marks_of('@pytest.mark.row("a=1")\ndef test_a(): ...') == {"a=1"}
    assert marks_of("x = [row('DDP')]; other('b')") == {"DDP"}
