"""`autoamp diff`: which ops changed precision between two reports."""

from __future__ import annotations

import json
import sys

import click

from autoamp_cli.problem import Problem


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the differences as JSON.")
@click.option(
    "--full", is_flag=True, help="Print every row, not the first of each kind."
)
@click.argument("old")
@click.argument("new")
@click.pass_context
def diff(ctx: click.Context, old: str, new: str, as_json: bool, full: bool) -> None:
    """Shows which ops changed precision from report OLD to report NEW.

    OLD and NEW are files that `autoamp explain --json` or report.to_json() wrote.  Exit
    status: 1 if an op changed precision, 0 if none did, 2 if a file is no report.

    \b
    Example:
      autoamp explain models.resnet:example --json new.json
      autoamp diff precision.json new.json
    """
    from autoamp.errors import OptionError
    from autoamp.saved.diff import diff as compared
    from autoamp.saved.load import load

    try:
        found = compared(load(old), load(new))
    except OptionError as error:
        raise Problem(str(error)) from None
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=1))
    else:
        from rich.console import Console

        from autoamp_cli.diff_table import table_of

        # A pipe or a file gets lines of one width, whatever terminal there is.
        console = Console(width=None if sys.stdout.isatty() else 120)
        for part in table_of(found, full=full):
            console.print(part)
    ctx.exit(1 if found.changed else 0)
