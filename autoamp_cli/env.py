"""`autoamp env`: a block of text to paste in an issue."""

from __future__ import annotations

import os

import click

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


@click.command()
def env() -> None:
    """Prints text to paste in an issue: versions, devices, gains to expect here.

    \b
    Example:
      autoamp env
    """
    from autoamp_cli.devices import devices, versions

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
    from autoamp.auto import environment
    from autoamp.errors import AutoampError
    from autoamp.messages import printable_line

    given = sorted(k for k in os.environ if k.startswith("AUTOAMP_"))
    lines = [f"{printable_line(name)}={os.environ[name]!r}" for name in given]
    try:
        environment.read(os.environ)
    except AutoampError as error:
        lines.append(f"unusable, so autoamp stays off: {error}")
    lines += environment.remarks(os.environ)
    if os.environ.get(_AUTOLOAD, "1") != "1":
        lines.append(
            f"{_AUTOLOAD}={os.environ[_AUTOLOAD]}: AUTOAMP_ENABLE has no effect"
        )
    return lines or ["no AUTOAMP_ variable is set"]
