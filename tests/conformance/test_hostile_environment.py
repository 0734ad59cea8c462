"""Hostile environment: variables and command lines of any content.

A variable never breaks `import torch` nor a script, and is named once.  (What one
variable does by itself is fuzzed by tests/auto/test_environment.py.)
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoamp import cli
from autoamp.auto import environment
from autoamp.errors import AutoampError
from tests.conformance.table import Figures

VARIABLES = sorted(
    {environment.ENABLE, environment.REPORT_DIR, *environment._VARIABLES}
)
HOSTILE = [
    "\x1b[31m\nnot an autoamp line",
    "[red]%s{0}$(touch owned);`touch owned`",
    "../../../../etc/shadow",
    "\udcff\udc80",
    "ﬀ\u202e",
    "x" * 50_000,
]
SCRIPT = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
x = torch.randn(2, 4)
model(x).sum().backward()
print("ran")
"""

# A directory is made where one is asked for: only below /proc.
text = st.text(max_size=20) | st.sampled_from(HOSTILE)
values = st.fixed_dictionaries(
    {}, optional={name: text for name in VARIABLES if name != environment.REPORT_DIR}
)


def is_line(said: str) -> bool:
    return said.isprintable() and len(said) < 1500


@settings(max_examples=100)
@given(values, st.text(max_size=300))
def test_all_variables_at_once(given_: dict[str, str], other: str) -> None:
    environ = {**given_, f"AUTOAMP_{other}": other}
    said = ""
    try:
        environment.read(environ)
    except AutoampError as error:
        said = str(error)
    assert is_line(said)
    assert not said or any(name in said for name in given_)
    for sentence in environment.remarks(environ):
        assert is_line(sentence)


@pytest.mark.parametrize("value", HOSTILE, ids=range(len(HOSTILE)))
def test_a_script_runs_on_and_is_told_once(
    value: str, tmp_path, figures: Figures
) -> None:
    """Every variable is hostile; the first one read is named."""
    environ = {name: value for name in VARIABLES if name != environment.ENABLE}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **environ, environment.ENABLE: "1"},
        cwd=tmp_path,
        capture_output=True,
        check=True,
        timeout=240,
    )
    assert done.stdout == b"ran\n"
    (line,) = done.stderr.decode("utf-8", "backslashreplace").splitlines()
    assert line.startswith("autoamp is off, everything runs in fp32: ")
    assert "AUTOAMP_" in line
    assert is_line(line)
    assert list(tmp_path.iterdir()) == []
    figures.count("scripts")


# -- the command line ------------------------------------------------------------------


def call(*arguments: str, **environ: str) -> Result:
    return CliRunner(env=environ).invoke(cli.main, arguments, prog_name="autoamp")


options = st.sampled_from(
    ["--precision", "--rules", "--loss-scale", "--backend", "--do-no-harm"]
    + [f"--{c}list-{v}" for c in ("allow", "deny") for v in ("add", "remove")]
    + ["--strict", "-m", "--", "-", "--nothing", "--report-dir=/proc/x"]
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(options | text, max_size=6))
def test_any_arguments_of_run(monkeypatch, arguments: list[str]) -> None:
    """Nothing is launched but this Python, with the arguments one by one."""
    launched: list[list[str]] = []

    def execve(path: str, command: list[str], environ: dict[str, str]) -> Any:
        launched.append(command)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execve", execve)
    result = call("run", *arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    if result.exit_code:
        assert "Traceback" not in result.output
        assert not launched
    for command in launched:
        assert command[0] == sys.executable
        assert command[-1] == arguments[-1]
        assert set(command[1:]) <= {*arguments, "-m"}


@pytest.mark.parametrize("value", HOSTILE, ids=range(len(HOSTILE)))
def test_env_shows_variables_on_lines_of_their_own(value: str) -> None:
    given_ = {name: value for name in VARIABLES if name != environment.REPORT_DIR}
    given_["AUTOAMP_\x1b[31m\nX"] = ""
    result = call("env", **given_)
    assert result.exit_code == 0
    _, _, section = result.output.partition("\nenvironment\n")
    lines = section.splitlines()
    assert len(lines) >= len(given_)
    assert all(line.startswith("  ") and line.isprintable() for line in lines)


@pytest.mark.parametrize("arguments", [["env", "x"], ["\x1b[31m"], ["env", "--\udcff"]])
def test_other_arguments_are_refused(arguments: list[str]) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
