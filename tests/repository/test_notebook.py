"""The notebook of the examples runs, and each answer in it shows itself as HTML.

Its cells are run as IPython runs them: as source lines that `inspect` finds again, with
the value of a last expression displayed.  Jupyter itself is not needed.
"""

from __future__ import annotations

import ast
import json
import linecache
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.ipynb"))


def shown_by(source: str, name: str, names: dict[str, Any]) -> Any:
    """The value of a cell's last expression, or None where the cell ends otherwise."""
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    tree = ast.parse(source, name)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), names)
    if last is None:
        return None
    return eval(compile(ast.Expression(last.value), name, "eval"), names)


def run(path: Path) -> list[str]:
    """The HTML that the cells of a notebook show, in order."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    main = types.ModuleType("notebook")
    pages = []
    sys.modules[main.__name__] = main
    try:
        for number, cell in enumerate(cells):
            if cell["cell_type"] == "code":
                name = f"<cell {number} of {path.name}>"
                value = shown_by("".join(cell["source"]), name, vars(main))
                if value is not None:
                    pages.append(value._repr_html_())
    finally:
        del sys.modules[main.__name__]
    return pages


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_its_answers(path) -> None:
    pages = run(path)
    for words in ("autoamp report", "autoamp compare", "autoamp bench"):
        assert any(words in page for page in pages), words
    assert any("left the range of fp16" in page for page in pages)
    assert any("<details" in page for page in pages)
    # The page that opens is small: a category of rules is hidden until it is asked for.
    assert all(page.startswith(("<div", "<pre")) for page in pages)


def test_there_is_a_notebook_with_the_outputs_of_one_run() -> None:
    assert NOTEBOOKS
    for path in NOTEBOOKS:
        text = path.read_text("utf-8")
        assert len(text) < 60_000, "leave out the longest outputs"
        assert re.findall(r"/(?:home|root|tmp|usr|work)/\S*", text) == []
        cells = [c for c in json.loads(text)["cells"] if c["cell_type"] == "code"]
        assert [c["execution_count"] for c in cells] == [*range(1, len(cells) + 1)]
        assert all(cell["outputs"] for cell in cells)
        (machine,) = cells[0]["outputs"][0]["text"]
        assert machine.startswith("torch 2.")


def test_a_cell_that_fails_is_found(tmp_path) -> None:
    cell = {"cell_type": "code", "source": ["import autoamp\n", "autoamp.no_such"]}
    path = tmp_path / "broken.ipynb"
    path.write_text(json.dumps({"cells": [cell]}))
    with pytest.raises(AttributeError, match="no_such"):
        run(path)
