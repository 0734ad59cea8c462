"""Functions stay small enough to see at once, and the library prints nothing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "autoamp"
FUNCTION_LINES = 60
WANTED_FUNCTION_LINES = 40


def functions_of(path: Path) -> list[tuple[int, str]]:
    """(lines of code, `file:line name`) of each function, its docstring not counted."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            first = node.body[0]
            if ast.get_docstring(node) is not None and first.end_lineno is not None:
                lines -= first.end_lineno - first.lineno + 1
            found.append((lines, f"{path.name}:{node.lineno} {node.name}"))
    return found


def prints_of(path: Path) -> list[str]:
    """`file:line` of each call of the built-in `print`."""
    return [
        f"{path.name}:{node.lineno}"
        for node in ast.walk(ast.parse(path.read_text(), str(path)))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]


COMMANDS = PACKAGE.parent / "autoamp_cli"
FILES = sorted([*PACKAGE.rglob("*.py"), *COMMANDS.rglob("*.py")])


@pytest.mark.parametrize(
    "path", FILES, ids=lambda p: str(p.relative_to(PACKAGE.parent))
)
def test_functions_are_short_and_silent(path: Path) -> None:
    assert prints_of(path) == [], "the library prints nothing; it logs"
    functions = sorted(functions_of(path), reverse=True)
    for lines, name in functions:
        if lines > WANTED_FUNCTION_LINES:
            print(f"{name}: {lines} lines, {WANTED_FUNCTION_LINES} wanted")
    assert [f for f in functions if f[0] > FUNCTION_LINES] == [], "name its parts"


def test_the_walk_found_the_package() -> None:
    assert PACKAGE / "errors.py" in FILES


def test_long_functions_and_prints_are_found(tmp_path) -> None:
    path = tmp_path / "planted.py"
    body = "    x = 1\n" * 70
    path.write_text(f'class A:\n  def f():\n    """One\n    two."""\n{body}\nprint(1)')
    assert functions_of(path) == [(71, "planted.py:2 f")]
    assert prints_of(path) == ["planted.py:76"]
