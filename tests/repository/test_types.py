"""The types of the public functions: one list of valid values, wrong calls refused."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any, get_args

import pytest

import autoamp
from autoamp import dtypes
from autoamp.passes import options as passes
from autoamp.tools import bench_ways, export_targets
from autoamp.training import options, scale
from tests.says import says

CALLS = Path(__file__).with_name("typed") / "calls.py"
REPO = Path(__file__).parents[2]

TABLES = [
    (dtypes.LowName, dtypes.LOW_DTYPES),
    (export_targets.TargetName, export_targets.targets()),
]
"""Words that have a row in a table, and the table."""

WORDS = {
    "precision": dtypes.Precision,
    "placement": passes.Placement,
    "objective": passes.Objective,
    "backend": passes.Backend,
    "masters": options.Masters,
    "weight_copies": options.WeightCopies,
    "loss_scale": scale.LossScaleName,
}


@pytest.mark.parametrize(("words", "table"), TABLES)
def test_words_are_those_of_the_table(words: Any, table: dict[str, Any]) -> None:
    assert list(get_args(words)) == list(table)


@pytest.mark.parametrize("name", WORDS)
def test_all_words_of_a_type_are_taken_and_named_where_another_is_refused(
    name: str,
) -> None:
    words = get_args(WORDS[name])
    for word in words:
        assert getattr(options.Options(**{name: word}), name) == word
    with pytest.raises(autoamp.AutoampError) as raised:
        options.Options(**{name: "bf61"})
    says(raised, "'bf61'", *map(repr, words), option=name)


def test_convert_has_the_options_of_the_type() -> None:
    hints = typing.get_type_hints(autoamp.convert)
    types = typing.get_type_hints(autoamp.ConvertOptions)
    expert = typing.get_type_hints(autoamp.ExpertOptions)
    given = [
        each.name
        for each in inspect.signature(autoamp.convert).parameters.values()
        if each.kind is each.KEYWORD_ONLY
    ]
    named = {*given} - {"example_inputs"}
    assert not named & expert.keys()
    assert named | expert.keys() == types.keys() == {*options.OPTION_NAMES}
    assert {name: hints[name] for name in named} | expert == types
    assert hints["options"] == typing.Unpack[autoamp.ExpertOptions]


def test_ways_of_a_benchmark_have_a_type() -> None:
    assert get_args(bench_ways.WayName) == bench_ways.KINDS


# -- type checkers ---------------------------------------------------------------------


def refused(command: list[str]) -> None:
    """Asks a type checker: exactly the lines marked `# wrong` may have an error."""
    done = subprocess.run(
        [*command, str(CALLS)], cwd=REPO, capture_output=True, text=True, check=False
    )
    found = re.findall(rf"{CALLS.name}:(\d+):(?:\d+ -)? error", done.stdout)
    lines = CALLS.read_text().splitlines()
    wrong = {n for n, line in enumerate(lines, 1) if line.endswith("  # wrong")}
    assert len(wrong) >= 10
    assert {int(number) for number in found} == wrong, done.stdout + done.stderr


def test_mypy_refuses_wrong_calls() -> None:
    refused([sys.executable, "-m", "mypy", "--strict"])


def test_pyright_refuses_wrong_calls() -> None:
    pyright = shutil.which("pyright")
    if pyright is None:
        pytest.skip("pyright is not installed (npm install -g pyright)")
    refused([pyright, "--pythonpath", sys.executable])
