"""All commands but `make fuzz` draw the same examples, on every machine and day."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from tests import fuzz

EXAMPLES = {"default": True, "ci": True, "fuzz": False}
"""Whether the examples of a profile are the same in each run."""

FAILS = """
import pytest
from hypothesis import given, strategies as st

@given(st.integers())
def test_it(number):
    assert number < 1000

def test_no_property():
    raise OSError
"""


CONFTEST = """
import hypothesis
hypothesis.settings.register_profile("fuzz", database=None)
"""


def test_every_profile_draws_the_same_examples_but_fuzz() -> None:
    profiles = {n: settings.get_profile(n) for n in settings._profiles}
    assert EXAMPLES.items() <= {n: p.derandomize for n, p in profiles.items()}.items()
    others = [profiles[name] for name in profiles.keys() - {"fuzz"}]
    assert all(profile.derandomize for profile in others)
    assert all(p.database is None and p.deadline is None for p in profiles.values())


def test_no_example_comes_from_the_modules_imported_before() -> None:
    assert not providers._get_local_constants().integers


def test_fuzz_runs_each_file_that_makes_examples() -> None:
    names = {str(path.relative_to(fuzz.TESTS)) for path in fuzz.files()}
    assert {"training/weights/test_machine.py", "conformance/test_hostile.py"} <= names
    for path in fuzz.TESTS.rglob("test_*.py"):
        text = path.read_text()
        if re.search(r"^from hypothesis|import explore|[ ,]explored\b", text, re.M):
            assert str(path.relative_to(fuzz.TESTS)) in names


def test_fuzz_prints_a_failure_and_the_command_that_shows_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz, "TESTS", tmp_path / "tests")
    fuzz.TESTS.mkdir()
    (fuzz.TESTS / "conftest.py").write_text(CONFTEST)
    path = fuzz.TESTS / "test_it.py"
    path.write_text(FAILS)
    said = fuzz.search(path, 3, 100)
    assert "number=1000" in said
    assert "OSError" not in said
    assert "--hypothesis-seed=3" in said.splitlines()[-1]
    path.write_text(FAILS.replace("< 1000", "is not None"))
    assert fuzz.search(path, 3, 100) == ""
