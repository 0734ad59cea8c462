"""`autoamp compare RUN_A RUN_B` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import autoamp_cli
from tests.runs.recorded import made


def compared(*arguments: str | Path) -> Result:
    return CliRunner().invoke(autoamp_cli.main, ["compare", *map(str, arguments)])


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    ops = [{"loss": 1.0, "ops": {"fc:linear": [2.0, n]}} for n in (1.0, 1.0, 1.0, 5.0)]
    one = made(tmp_path / "a", [*ops[:3], ops[2]])
    return one, made(tmp_path / "b", [*ops[:3], {**ops[3], "loss": 1.5}], torch="3")


def test_runs_that_part(runs: tuple[Path, Path]) -> None:
    result = compared(*runs)
    assert result.exit_code == 1, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("A: ")
    assert "The runs part at step 4: the difference is beyond rounding." in lines
    assert any(line.startswith("  loss: 1 in A, 1.5 in B, 3.3e-01") for line in lines)
    assert "parts there: fc:linear (mean): 1 in A, 5 in B, 8.0e-01" in result.stdout
    assert "torch: 2 in A, 3 in B" in lines
    assert any(line.split()[:3] == ["4", "1", "1.5"] for line in lines)


def test_runs_that_agree(runs: tuple[Path, Path]) -> None:
    result = compared(runs[0], runs[0])
    assert result.exit_code == 0
    assert "Steps 1 to 4 agree to the bit." in result.stdout
    near = compared(*runs, "--tolerance", "0.9")
    assert near.exit_code == 0
    assert "agree within rounding" not in near.stdout
    assert "Steps 1 to 4 agree within the tolerance." in near.stdout


def test_json(runs: tuple[Path, Path]) -> None:
    result = compared(*runs, "--json", "--rank", "0")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["parted"], found["why"]) == (1, 4, "numbers")
    assert found["op"]["name"] == "fc:linear (mean)"
    assert found["changed"] == {"torch": ["2", "3"]}
    assert found["beyond"][0]["name"] == "loss"


def test_bad_input(runs: tuple[Path, Path], tmp_path: Path) -> None:
    for bad in (
        (runs[0], tmp_path / "missing"),
        (*runs, "--rank", "7"),
        (*runs, "--tolerance", "-1"),
        (*runs, "--precision", "bf16"),
        (*runs, "--to-rules", "a.toml"),
        (*runs, runs[0]),
        ("nets:small", "--json"),
        ("nets:small", "--rank", "0"),
    ):
        result = compared(*bad)
        assert (result.exit_code, result.stdout) == (2, ""), result.output
        assert "Error: " in result.stderr


def test_text_of_a_ring_cannot_steer_the_terminal(tmp_path: Path) -> None:
    bad = "\x1b[31m[red]x"
    one = made(tmp_path / "a", [1.0], label=bad, torch=bad)
    other = made(tmp_path / "b", [{"loss": 2.0, "ops": {bad: [1, 2]}}], label=bad)
    result = compared(one, other)
    assert result.exit_code == 1
    assert "\x1b" not in result.stdout
    assert "[red]x" in result.stdout
