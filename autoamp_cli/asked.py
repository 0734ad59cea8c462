"""Shared by the commands on a model: options of `convert`, and errors on one line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click

from autoamp_cli.problem import Problem
from autoamp_cli.words import PLACEMENTS


def with_convert_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of `convert`; `convert_options` reads them back."""
    for option in reversed(
        (
            click.option("--precision", metavar="P", help="auto, fp16 or bf16."),
            click.option(
                "--rules", metavar="FILE", help="Rules laid over the built-in ones."
            ),
            click.option("--placement", metavar="P", help=", ".join(PLACEMENTS) + "."),
            click.option(
                "--no-do-no-harm", is_flag=True, help="Convert even without a gain."
            ),
        )
    ):
        command = option(command)
    return command


def convert_options(given: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `convert` that a user gave."""
    options = {k: v for k, v in given.items() if v and k != "no_do_no_harm"}
    return {**options, "do_no_harm": False} if given["no_do_no_harm"] else options


@contextlib.contextmanager
def asking(factory: str) -> Iterator[None]:
    """Sends a model's prints to stderr, and makes a `Problem` of what it raises."""
    from autoamp.errors import AutoampError
    from autoamp.messages import on_command_line
    from autoamp_cli.factory import told

    with contextlib.redirect_stdout(sys.stderr), on_command_line():
        try:
            yield
        except Problem:
            raise
        except AutoampError as error:
            raise Problem(f"{factory}: {error}") from None
        except Exception as error:
            raise Problem(f"{factory}: the model raised {told(error)}") from error


def show(printed: Any) -> None:
    """Prints a report: in colour in a terminal, as text elsewhere."""
    from autoamp.messages import on_command_line

    with on_command_line():
        if sys.stdout.isatty():
            from rich.console import Console

            Console().print(printed)
        else:
            click.echo(str(printed))
