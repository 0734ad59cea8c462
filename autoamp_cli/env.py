"""`autoamp env`: a block of text to paste in an issue."""

from __future__ import annotations

import os
from importlib.metadata import metadata
from typing import Any

import click

from autoamp_cli.commands import command
from autoamp_cli.outputs import as_json, refuse_unwritable, with_json, write
from autoamp_cli.waiting import waiting

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


@command()
@with_json
def env(json_to: str | None) -> None:
    """Prints text to paste in an issue: versions, devices, gains to expect here.

    \b
    Example:
      autoamp env
    """
    refuse_unwritable(json_to)
    with waiting("looking at this machine"):
        from autoamp_cli.devices import devices, versions

        facts: dict[str, Any] = {
            "versions": dict(versions()),
            "devices": dict(devices()),
            "environment": _variables(),
        }
    if json_to:
        write(json_to, as_json({"schema": 1, **facts}))
    if json_to == "-":
        return
    for name, value in facts["versions"].items():
        click.echo(f"{name + ':':<20}{value}")
    for name, lines in (
        *facts["devices"].items(),
        ("environment", facts["environment"]),
    ):
        click.echo(f"\n{name}")
        for line in lines:
            click.echo(f"  {line}")
    # pyproject.toml alone holds the address of the repository, once that is public.
    named = metadata("autoamp").get_all("Project-URL") or []
    pairs = (pair.partition(", ")[::2] for pair in named)
    address = next((url for name, url in pairs if name == "Repository"), "")
    where = f": {address}/issues/new" if address else ""
    click.echo(f"\nPaste this in a new issue{where}", err=True)


def _variables() -> list[str]:
    from autoamp.auto import environment
    from autoamp.errors import AutoampError
    from autoamp.messages import printable_line

    names = sorted(k for k in os.environ if f"{k}_".startswith("AUTOAMP_"))
    lines = [f"{printable_line(name)}={os.environ[name]!r}" for name in names]
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
