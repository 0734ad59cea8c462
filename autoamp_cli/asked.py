"""Shared by the commands on a model: its name, options of `convert`, and errors."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click

from autoamp_cli.problem import Problem
from autoamp_cli.waiting import waiting
from autoamp_cli.words import PLACEMENTS


class Names(click.ParamType):  # type: ignore[type-arg]
    """Names, separated by commas.

    Args:
        known: the names that there are; none for any.
    """

    name = "names"

    def __init__(self, *known: str) -> None:
        self.known = known

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, ...]:
        """The names of a text such as "autocast,autoamp"."""
        if isinstance(value, tuple):
            return value
        names = tuple(part.strip() for part in value.split(","))
        if not all(names):
            self.fail(f"{value!r}: write names such as a,b", param, ctx)
        if wrong := [name for name in names if self.known and name not in self.known]:
            self.fail(f"{wrong[0]!r} is none of {', '.join(self.known)}", param, ctx)
        return names


def _options(*each: Callable[..., Any]) -> Callable[..., Any]:
    """One decorator of several, whose options stand in this order in the help."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(each):
            command = option(command)
        return command

    return add


def _names(flag: str, metavar: str, text: str) -> Callable[..., Any]:
    return click.option(flag, type=Names(), metavar=metavar, help=text)


LISTS = ("allow", "deny", "infer", "clear", "keep")
_NAMED = ("precision", "rules", "placement", *LISTS)

with_convert_options = _options(
    click.option("--precision", metavar="P", help="auto, fp16 or bf16."),
    click.option("--rules", metavar="FILE", help="Rules laid over the built-in ones."),
    _names("--allow", "OPS", "Ops to run low, such as gelu,softmax."),
    _names("--deny", "OPS", "Ops to leave in fp32."),
    _names("--infer", "OPS", "Ops to run low where they read low values."),
    _names("--clear", "OPS", "Ops to run as their neighbours do."),
    _names("--keep", "MODULES", "Modules to leave in fp32: head,encoder.layer.0.*"),
    click.option("--placement", metavar="P", help=", ".join(PLACEMENTS) + "."),
    click.option("--convert-anyway", is_flag=True, help="Convert even without a gain."),
)
"""Adds the options of `convert`; `convert_options` reads them back."""


def convert_options(given: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `convert` that a user gave."""
    options = {name: given[name] for name in _NAMED if given[name]}
    return {**options, "do_no_harm": False} if given["convert_anyway"] else options


_with_sizes = _options(
    click.option(
        "--batch", type=click.IntRange(1), metavar="N", help="Samples; default 1."
    ),
    click.option(
        "--sequence",
        type=click.IntRange(1),
        metavar="N",
        help="Tokens of a sample; at most 1,024 by default.",
    ),
)

with_name = _options(_with_sizes, click.argument("name", metavar="NAME"))
"""Adds the name of a model, and the sizes of a named model of transformers."""

with_device = click.option(
    "--device", metavar="D", help="h100, a100, rtx4090, sm_120, cpu:amx, ..."
)
"""Adds the name of a device, which this machine may lack."""


@contextlib.contextmanager
def asking(name: str, doing: str = "asking about") -> Iterator[None]:
    """Sends a model's prints to stderr, and makes a `Problem` of what it raises.

    Args:
        doing: the word before the name in the sign that the command is at work.
    """
    with waiting(f"{doing} {name}"):
        from autoamp.errors import AutoampError
        from autoamp.messages import on_command_line
        from autoamp.tools.named import place_of, told

        with contextlib.redirect_stdout(sys.stderr), on_command_line():
            try:
                yield
            except Problem:
                raise
            except AutoampError as error:
                # A text that begins with an option of `convert` names the command's.
                names = "|".join((*_NAMED, "device"))
                text = re.sub(rf"^(?=(?:{names})=)", "--", str(error))
                cause = error.__cause__
                place = "" if cause is None else place_of(cause, name)
                if place and place.rpartition(": ")[2] not in text:
                    text += f" ({place})"
                begun = text.startswith((name, repr(name)))
                raise Problem(text if begun else f"{name}: {text}") from None
            except Exception as error:
                problem = told(error, name)
                raise Problem(f"{name}: the model raised {problem}") from error
