"""Functions stay small enough to see at once, and the library prints nothing."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "autoamp"
FUNCTION_LINES = 60


def functions_of(path: Path, tree: ast.Module) -> list[tuple[int, str]]:
    """(lines of code, `file:line name`) of each function, its docstring not counted."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            first = node.body[0]
            if ast.get_docstring(node) is not None and first.end_lineno is not None:
                lines -= first.end_lineno - first.lineno + 1
            found.append((lines, f"{path.name}:{node.lineno} {node.name}"))
    return found


def prints_of(path: Path, tree: ast.Module) -> list[str]:
    """`file:line` of each call of the built-in `print`."""
    return [
        f"{path.name}:{node.lineno}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]


COMMANDS = PACKAGE.parent / "autoamp_cli"
FILES = sorted([*PACKAGE.rglob("*.py"), *COMMANDS.rglob("*.py")])


def test_functions_are_short_and_silent() -> None:
    long, printed = [], []
    for path in FILES:
        tree = ast.parse(path.read_text(), str(path))
        printed += prints_of(path, tree)
        long += [f for f in functions_of(path, tree) if f[0] > FUNCTION_LINES]
    assert printed == [], "the library prints nothing; it logs"
    assert long == [], "name its parts"


def test_long_functions_and_prints_are_found(tmp_path) -> None:
    path = tmp_path / "planted.py"
    body = "    x = 1\n" * 70
    path.write_text(f'class A:\n  def f():\n    """One\n    two."""\n{body}\nprint(1)')
    tree = ast.parse(path.read_text())
    assert functions_of(path, tree) == [(71, "planted.py:2 f")]
    assert prints_of(path, tree) == ["planted.py:76"]
