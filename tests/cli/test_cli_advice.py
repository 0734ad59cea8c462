"""Advice on the command line: flags that the commands have, rules that load."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import autoamp_cli
from autoamp.messages import advice, on_command_line
from autoamp.options import Options
from autoamp.rules import Rules
from autoamp_cli.export import export
from tests.cli import test_cli_export as exporting

run: Callable[..., Iterator[exporting.Run]] = exporting.run
_KEYWORDS = "|".join(field.name for field in dataclasses.fields(Options))
KEYWORD = re.compile(rf"\b({_KEYWORDS})=(?![^\n]* in Python)")
"""An option as Python writes it, without the word that it is Python's."""


@pytest.mark.parametrize("by_variables", [False, True])
def test_each_option_is_advised_as_the_commands_take_it(
    by_variables: bool, tmp_path: Path
) -> None:
    assert isinstance(export, click.Command)
    flags = {name for each in export.params for name in each.opts}
    path = tmp_path / "mine.toml"
    lists = ("keep", "allow", "deny", "infer", "clear")
    for option in (field.name for field in dataclasses.fields(Options)):
        value = ["aten::gelu"] if option in lists else False
        with on_command_line():
            text = advice(option, value, by_variables=by_variables)
        assert not KEYWORD.search(text), text
        assert set(re.findall(r"--[\w-]+", text)) <= flags, text
        assert ("--" in text) != ("in Python" in text), text
        if option in lists:
            entry = text.removeprefix("--rules FILE with ").removesuffix(
                " in that file"
            )
            path.write_text(f'{entry}\n[meta]\ndtype = "any"\ndescription = "x"\n')
            Rules.load(path)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "command",
    [
        ("explain", "--full"),
        ("explain", "--why", "linear"),
        ("compare", "--tolerance", "1e-9"),
        ("export", "--target", "onnxruntime-cpu", "--out", "a.onnx"),
        ("plan",),
    ],
)
def test_no_command_advises_keywords(
    run: exporting.Run, command: tuple[str, ...]
) -> None:
    name, *rest = command
    of = "exported_models:example"
    for flags in ((), exporting.FORCED, ("--precision", "bf16")):
        told = CliRunner().invoke(autoamp_cli.main, [name, of, *rest, *flags])
        assert told.exit_code in (0, 2), told.output
        assert not KEYWORD.search(told.output), told.output
