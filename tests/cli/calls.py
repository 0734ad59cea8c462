"""Calls of the command `autoamp` in this process."""

from __future__ import annotations

import os
import re
import shlex

import pytest
from click.testing import CliRunner, Result

import autoamp_cli

FORCED = "--precision bf16 --convert-anyway"
"""Whatever may run in bf16 does."""


def call(line: str) -> Result:
    """What `autoamp LINE` does."""
    runner = CliRunner(env={"COLUMNS": "150", "TERM": "dumb"})
    return runner.invoke(autoamp_cli.main, shlex.split(line), prog_name="autoamp")


def timeless(text: str) -> str:
    """`text` without the times that the pass took, which fill one line or two."""
    return re.sub(r"\bpass\s+took\s.*?(\n\n|$)", r"\1", text, flags=re.DOTALL)


class Launched(Exception):  # noqa: N818 (what happened, not an error)
    """What would have taken this process's place."""


Programs = list[tuple[list[str], dict[str, str]]]
"""The words after Python's name, and the variables, of each program launched."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Programs:
    """What `autoamp run` launches, which does not run."""
    found: Programs = []

    def execve(path: str, command: list[str], environ: dict[str, str]) -> None:
        assert path == command[0]
        found.append((command[1:], environ))
        raise Launched

    monkeypatch.setattr(os, "execve", execve)
    return found
