"""The command line: `autoamp run` and `autoamp env`."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import click

from autoamp.auto import environment
from autoamp.errors import AutoampError
from autoamp.inspect.devices import devices, versions
from autoamp.options import PLACEMENTS
from autoamp.plain import plain_line

_LAUNCHED = {"AUTOAMP_ENABLE": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def _lists(function: Any) -> Any:
    """Adds the eight list options: add and remove for each of the four categories."""
    for category in ("clear", "infer", "deny", "allow"):
        for change, verb in (("remove", "to take out of"), ("add", "to put in")):
            function = click.option(
                f"--{category}list-{change}",
                metavar="OPS",
                help=f"Ops, comma-separated, {verb} the {category} list.",
            )(function)
    return function


@click.group()
@click.version_option(package_name="autoamp")
def main() -> None:
    """Automatic mixed precision for PyTorch."""


@main.command(context_settings={"allow_interspersed_args": False})
@click.option("-m", "as_module", is_flag=True, help="SCRIPT is the name of a module.")
@click.option("--precision", metavar="P", help="auto, fp16 or bf16.")
@click.option("--rules", metavar="FILE", help="Rules laid over the built-in ones.")
@_lists
@click.option("--loss-scale", metavar="S", help="auto, dynamic, off or a number.")
@click.option("--backend", metavar="B", help="eager or inductor.")
@click.option("--placement", metavar="P", help=", ".join(PLACEMENTS) + ".")
@click.option("--do-no-harm", metavar="0|1", help="0: convert even what cannot gain.")
@click.option("--strict", is_flag=True, help="Raise where it would fall back to fp32.")
@click.option("--weight-copies", metavar="C", help='kept or "every call".')
@click.option("--report-dir", metavar="DIR", help="Where graphs and reports go.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    as_module: bool,
    strict: bool,
    script: str,
    arguments: tuple[str, ...],
    **given: str | None,
) -> None:
    """Runs SCRIPT as `python SCRIPT ARGUMENTS...`, in mixed precision."""
    changed = {
        f"AUTOAMP_{name.upper()}": value for name, value in given.items() if value
    }
    if strict:
        changed["AUTOAMP_STRICT"] = "1"
    environ = {**os.environ, **_LAUNCHED, **changed}
    try:
        environment.read(environ)
    except AutoampError as error:
        raise click.ClickException(str(error)) from None
    # SCRIPT runs in a new process, so that Python sets `__main__`, argv and sys.path.
    command = [sys.executable, *(["-m"] if as_module else []), script, *arguments]
    if os.name == "nt":  # exec on Windows returns before SCRIPT ends
        sys.exit(subprocess.call(command, env=environ))
    os.execve(sys.executable, command, environ)


@main.command()
def env() -> None:
    """Prints what to paste in an issue: versions, devices, what pays here."""
    for name, value in versions():
        click.echo(f"{name + ':':<20}{value}")
    for name, lines in devices():
        click.echo(f"\n{name}")
        for line in lines:
            click.echo(f"  {line}")
    click.echo("\nenvironment")
    for line in _variables():
        click.echo(f"  {line}")


def _variables() -> list[str]:
    given = sorted(k for k in os.environ if k.startswith("AUTOAMP_"))
    lines = [f"{plain_line(name)}={os.environ[name]!r}" for name in given]
    try:
        environment.read(os.environ)
    except AutoampError as error:
        lines.append(f"unusable, so autoamp stays off: {error}")
    lines += environment.unknown(os.environ)
    if os.environ.get(_AUTOLOAD, "1") != "1":
        lines.append(
            f"{_AUTOLOAD}={os.environ[_AUTOLOAD]}: AUTOAMP_ENABLE has no effect"
        )
    return lines or ["no AUTOAMP_ variable is set"]
