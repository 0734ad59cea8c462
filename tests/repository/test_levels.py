"""Quick, thorough and slow tests: marks name what is there; each file has one quick."""

from __future__ import annotations

import ast

import pytest

from tests import levels
from tests.repository.pages import REPO

TESTS = REPO / "tests"

pytest_plugins = ["pytester"]


def marks_of(node: ast.AST) -> list[str]:
    """The names of pytest's marks in an expression."""
    return [
        mark.attr
        for mark in ast.walk(node)
        if isinstance(mark, ast.Attribute) and ast.unparse(mark.value) == "pytest.mark"
    ]


def wrong_marks(text: str) -> list[str]:
    """Functions marked both slow and thorough, and whole files that are thorough."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            tops = [
                d.func if isinstance(d, ast.Call) else d for d in node.decorator_list
            ]
            marks = [name for top in tops for name in marks_of(top)]
            if marks.count("thorough") + marks.count("slow") > 1:
                found.append(f"{node.name} has two levels")
        elif (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "pytestmark"
            and "thorough" in marks_of(node.value)
        ):
            found.append("a whole file is thorough")
    return found


def test_each_function_has_one_level() -> None:
    texts = {path.name: path.read_text() for path in TESTS.rglob("test_*.py")}
    marked = {name: text for name, text in texts.items() if "mark.thorough" in text}
    wrong = {name: wrong_marks(text) for name, text in marked.items()}
    assert {name: found for name, found in wrong.items() if found} == {}


def test_every_case_that_stays_quick_exists(request: pytest.FixtureRequest) -> None:
    if any("::" in argument for argument in request.config.args):
        pytest.skip("only some tests were asked for")
    stash = request.config.stash
    cases = {of: dict(found) for of, found in stash[levels.CASES].items()}
    named = stash[levels.EXCEPTED]
    assert [(of, case) for of, case in named if case not in cases.get(of, {})] == []


def test_each_file_keeps_a_quick_test(request: pytest.FixtureRequest) -> None:
    if any("::" in argument for argument in request.config.args):
        pytest.skip("only some tests were asked for")
    quick: dict[str, bool] = {}
    for function, cases in request.config.stash[levels.CASES].items():
        file = function.partition("::")[0]
        quick[file] = quick.get(file, False) or any(quick for _, quick in cases)
    assert [file for file, some in quick.items() if not some] == []


PLANTED = """
import pytest
from tests import levels

@pytest.mark.thorough(but=["a", "c"])
@pytest.mark.parametrize(
    "case", ["a", "b", pytest.param("c", marks=pytest.mark.slow),
             pytest.param("d", marks=pytest.mark.slow)]
)
def test_cases(case): ...

@pytest.mark.thorough
def test_whole(): ...

@pytest.mark.parametrize("case", ["a", pytest.param("b", marks=pytest.mark.thorough)])
def test_marked_in_the_parameter(case): ...
"""


def test_what_each_level_runs(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "import pytest\nfrom tests import levels\n"
        "def pytest_configure(config):\n"
        "    config.addinivalue_line('markers', 'thorough')\n"
        "    config.addinivalue_line('markers', 'slow')\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(items): levels.settle(items)\n"
    )
    pytester.makepyfile(PLANTED)

    def chosen(marks: str) -> list[str]:
        lines = pytester.runpytest_inprocess(
            "--collect-only", "-q", "-m", marks
        ).outlines
        return [line.partition("::")[2] for line in lines if "::" in line]

    assert chosen("not slow and not thorough") == [
        "test_cases[a]",
        "test_marked_in_the_parameter[a]",
    ]
    assert chosen("thorough") == [
        "test_cases[b]",
        "test_whole",
        "test_marked_in_the_parameter[b]",
    ]
    assert chosen("slow") == ["test_cases[c]", "test_cases[d]"]
