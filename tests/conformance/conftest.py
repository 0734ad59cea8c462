"""Marks every test here `conformance`, and gathers what they measured into one table.

`make conformance` runs them all and writes benchmarks/results/trust.md.  A test says
what it counted or measured by the fixture `figures`; a part is one file.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.terminal import TerminalReporter

from benchmarks import report
from benchmarks.setting import capability
from tests.conformance import table

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--trust-table",
        type=Path,
        metavar="STEM",
        help="write the table of the conformance tests to STEM.md and STEM.json",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("conformance")
            # Reports carry these from a worker to the process that writes the table.
            item.user_properties.append((table.PART, part_of(item)))


def part_of(item: pytest.Item) -> str:
    """The first line of the docstring of the file a test is in."""
    module = item.getparent(pytest.Module)
    assert module is not None, f"{item.nodeid} is in no file"
    return (module.obj.__doc__ or item.path.stem).splitlines()[0].rstrip(".")


@pytest.fixture
def figures(record_property: Callable[[str, Any], None]) -> table.Figures:
    """Counts, added up over a part's tests, and worst cases, of which one is kept."""
    return table.Figures(record_property)


@pytest.fixture
def torch_quiet() -> Iterator[None]:
    """For torch's own database of ops: its warnings, and what it leaves unwritten.

    The warnings are of deprecated ops and of layouts in beta.  In deterministic mode
    `empty` fills its memory, so that two runs of it can be compared.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    with warnings.catch_warnings():
        for kind in (UserWarning, FutureWarning, DeprecationWarning):
            warnings.simplefilter("ignore", kind)
        yield
    torch.use_deterministic_algorithms(False)


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    stem = terminalreporter.config.getoption("--trust-table")
    if stem is None:
        return
    parts = table.gather(terminalreporter.stats)
    line = capability("cpu")
    text = f"{line}\n\n{table.markdown(parts)}\n"
    data = {name: dataclasses.asdict(part) for name, part in parts.items()}
    report.write(stem, text, {"capability": line, "parts": data})
    terminalreporter.section("trust")
    terminalreporter.write_line(text)
