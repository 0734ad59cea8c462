"""Quick and thorough tests are told by the measured times that are committed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import levels
from tests.repository.pages import REPO

pytest_plugins = ["pytester"]

JUNIT = """<testsuite>
<testcase classname="test_it" name="test_cases[a]" time="0.3"/>
<testcase classname="test_it" name="test_cases[b]" time="0.5"/>
<testcase classname="test_it" name="test_cases[c]" time="0.2"/>
<testcase classname="test_it" name="test_whole" time="2.0"/>
<testcase classname="test_it" name="test_short" time="0.4"/>
<testcase classname="test_long" name="test_long" time="9.0"/>
</testsuite>"""

TESTS = """
import pytest

@pytest.mark.parametrize(
    "case", ["a", "b", "c", "new", pytest.param("d", marks=pytest.mark.slow)]
)
def test_cases(case): ...

def test_whole(): ...

def test_short(): ...

def test_new(): ...
"""


def test_the_fastest_cases_that_fit_are_quick(
    pytester: pytest.Pytester, monkeypatch
) -> None:
    junit = pytester.path / "times.xml"
    junit.write_text(JUNIT)
    monkeypatch.setattr(levels, "TIMES", pytester.path / "times.json")
    levels.main(junit)
    pytester.makeconftest(
        "import pytest\nfrom tests import levels\n"
        "def pytest_configure(config):\n"
        "    config.addinivalue_line('markers', 'thorough')\n"
        "    config.addinivalue_line('markers', 'slow')\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(items): levels.mark(items, levels.read())\n"
    )
    pytester.makepyfile(test_it=TESTS, test_long="def test_long(): ...")

    def chosen(marks: str) -> list[str]:
        ran = pytester.runpytest_inprocess("--collect-only", "-q", "-m", marks)
        return [line.partition("::")[2] for line in ran.outlines if "::" in line]

    quick = ["test_cases[a]", "test_cases[c]", "test_short", "test_new", "test_long"]
    assert chosen("not slow and not thorough") == quick
    assert chosen("thorough") == ["test_cases[b]", "test_cases[new]", "test_whole"]
    assert chosen("slow") == ["test_cases[d]"]


def test_levels_are_given_by_times_alone() -> None:
    tests = {path: path.read_text("utf-8") for path in (REPO / "tests").rglob("*.py")}
    mark = "mark." + "thorough"
    marked = [path.name for path, text in tests.items() if mark in text]
    assert marked == [Path(levels.__file__).name]


def test_the_functions_that_were_timed_are_there() -> None:
    """Times of a test that has gone say nothing."""
    texts: dict[str, str] = {}
    for name in levels.read():
        file, _, function = name.partition("::")
        if file not in texts:
            path = REPO / file
            texts[file] = path.read_text("utf-8") if path.exists() else ""
        there = f"def {function}(", f"\n{function} = "
        assert any(each in texts[file] for each in there), name
