"""What commands print and write: a result in a terminal, as text, as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from autoamp_cli.problem import Problem

PATH = click.Path(dir_okay=False, allow_dash=True)

with_json = click.option(
    "--json",
    "json_to",
    is_flag=False,
    flag_value="-",
    metavar="[FILE]",
    type=PATH,
    help="Write the result as JSON; without FILE, print that alone.",
)
"""Adds `--json [FILE]`: "-" where no file is named, None where it is not given."""


def refuse_unwritable(*paths: str | None) -> None:
    """Refuses paths that cannot be written, before anything is run.

    Raises:
        Problem: a path cannot be written, or two paths are the same.
    """
    files = [path for path in paths if path]
    if len(set(files)) < len(files):
        raise Problem("two outputs go to the same place; give each its own path")
    for path in files:
        if path == "-":
            continue
        folder = Path(path).parent
        place = path if os.path.exists(path) else folder
        if not folder.is_dir():
            raise Problem(f"{path} cannot be written: there is no folder {folder}")
        if not os.access(place, os.W_OK):
            raise Problem(f"{path} cannot be written: no permission")


def write(path: str, text: str) -> None:
    """Writes a file whole or not at all; "-" is stdout.

    Raises:
        Problem: the file cannot be written.
    """
    if path == "-":
        click.echo(text, nl=not text.endswith("\n"))
        return
    # Not above: the package imports torch, and `--help` needs none of it.
    from autoamp.errors import OptionError
    from autoamp.files import write_whole

    try:
        write_whole(path, text)
    except OptionError as error:
        raise Problem(str(error)) from None


def as_json(result: Any) -> str:
    """A result as JSON: a dataclass, a dict or a list of plain values.

    Dtypes become their names, and NaN and infinity become null.
    """
    if dataclasses.is_dataclass(result):
        fields = dataclasses.fields(result)
        result = {"schema": 1, **{f.name: getattr(result, f.name) for f in fields}}
    return json.dumps(_plain(result), indent=2, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    if dataclasses.is_dataclass(value):
        names = (field.name for field in dataclasses.fields(value))
        return {name: _plain(getattr(value, name)) for name in names}
    return str(value).removeprefix("torch.")


def show(printed: Any) -> None:
    """Prints a result: in colour in a terminal, as text elsewhere."""
    from autoamp.messages import on_command_line

    with on_command_line():
        if sys.stdout.isatty():
            from rich.console import Console

            Console().print(printed)
        else:
            click.echo(str(printed))
