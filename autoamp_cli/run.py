"""`autoamp run`: a script in mixed precision, with nothing changed in the script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from typing import Any

import click

from autoamp_cli.asked import LISTS, with_convert_options
from autoamp_cli.commands import command
from autoamp_cli.problem import Problem
from autoamp_cli.words import CATEGORIES

_LAUNCHED = {"AUTOAMP_ENABLE": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}


def _removals(function: Any) -> Any:
    """Adds an option for each list that takes ops out of the list."""
    for category in reversed(CATEGORIES):
        function = click.option(
            f"--{category}list-remove",
            metavar="OPS",
            help=f"Ops to take out of the {category} list.",
        )(function)
    return function


@command(context_settings={"allow_interspersed_args": False})
@click.option("-m", "as_module", is_flag=True, help="SCRIPT is the name of a module.")
@with_convert_options
@_removals
@click.option("--loss-scale", metavar="S", help="auto, dynamic, off or a number.")
@click.option("--backend", metavar="B", help="eager or inductor.")
@click.option("--hot", metavar="0|1", help="0: capture models at their first call.")
@click.option("--strict", is_flag=True, help="Raise instead of falling back to fp32.")
@click.option(
    "--guard", metavar="0|1", help="0: step with infinite or NaN gradients too."
)
@click.option(
    "--masters", metavar="M", help="Of half weights: auto, split, fp32 or off."
)
@click.option(
    "--fuse/--no-fuse",
    default=None,
    callback=lambda _, __, on: None if on is None else str(int(on)),
    help="Whether kernels replace chains of calls.",
)
@click.option("--exact-casts", flag_value="1", help="Have inductor round at each cast.")
@click.option("--unfused", metavar="NAMES", help="Kernels to switch off.")
@click.option(
    "--calibrate", metavar="0|1", help="0: prices by a table, not measured here."
)
@click.option("--weight-copies", metavar="C", help='kept or "every call".')
@click.option("--report-dir", metavar="DIR", help="The folder for graphs and reports.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    as_module: bool,
    strict: bool,
    script: str,
    arguments: tuple[str, ...],
    *,
    convert_anyway: bool,
    **given: Any,
) -> None:
    """Runs SCRIPT as `python SCRIPT ARGUMENTS...`, in mixed precision.

    \b
    Example:
      autoamp run --precision bf16 train.py --epochs 3
    """
    from autoamp.auto import environment
    from autoamp.errors import AutoampError

    for name in LISTS:
        given[name] = ",".join(given[name] or ())
    changed = {_variable(name): value for name, value in given.items() if value}
    switches = {"STRICT": (strict, "1"), "DO_NO_HARM": (convert_anyway, "0")}
    changed |= {f"AUTOAMP_{name}": to for name, (on, to) in switches.items() if on}
    environ = {**os.environ, **_LAUNCHED, **changed}
    try:
        environment.read(environ)
    except AutoampError as error:
        raise Problem(_by_options(str(error), given)) from None
    # Of a checkout that is merely found (PYTHONPATH) torch would start nothing.
    if not entry_points(group="torch.backends", name="autoamp"):
        raise Problem(
            f"autoamp is not installed for {sys.executable}: torch would start nothing "
            "when SCRIPT imports it, and SCRIPT would run in fp32; install autoamp "
            f"({sys.executable} -m pip install FOLDER_OR_ADDRESS)"
        )
    # SCRIPT runs in a new process, so that Python sets `__main__`, argv and sys.path.
    command = [sys.executable, *(["-m"] if as_module else []), script, *arguments]
    if os.name == "nt":  # exec on Windows returns before SCRIPT ends
        sys.exit(subprocess.call(command, env=environ))
    os.execve(sys.executable, command, environ)


def _variable(option: str) -> str:
    """The variable that stands for an option."""
    return f"AUTOAMP_{option.upper()}{'LIST_ADD' if option in CATEGORIES else ''}"


def _by_options(problem: str, given: dict[str, Any]) -> str:
    """The text of a problem with options in place of the variables that they set."""
    for name, value in given.items():
        if value:
            flag = f"--{name.replace('_', '-')}"
            problem = re.sub(rf"\b{_variable(name)}\b", flag, problem)
    return problem
