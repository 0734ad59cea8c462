"""The examples in docstrings run, and print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest
import torch

import autoamp

NAMES = {"autoamp": autoamp, "torch": torch}


def examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = []
    for each in pkgutil.walk_packages(autoamp.__path__, "autoamp."):
        if not each.name.endswith("__main__"):
            module = importlib.import_module(each.name)
            found += finder.find(module, each.name, module, extraglobs=NAMES)
    return [test for test in found if test.examples]


@pytest.mark.parametrize("test", examples(), ids=lambda test: test.name)
def test_example_runs(test: doctest.DocTest) -> None:
    torch.manual_seed(0)
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    assert runner.run(test, out=said.append).failed == 0, "".join(said)


def test_public_questions_have_an_example() -> None:
    told = {test.name.rpartition(".")[2] for test in examples()}
    assert {"explain", "compare", "Report"} <= told
