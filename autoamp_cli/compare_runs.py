"""`autoamp compare RUN_A RUN_B`: where two recorded trainings part."""

from __future__ import annotations

import json
import sys

import click

from autoamp_cli.problem import Problem


def compare_runs(
    a: str, b: str, *, rank: int | None, tolerance: float | None, as_json: bool
) -> int:
    """Prints where two runs part; returns the exit status.

    Raises:
        Problem: a folder holds no run, or the runs cannot be compared.
    """
    from autoamp.errors import AutoampError
    from autoamp.runs.compare import compare

    try:
        found = compare(a, b, rank=rank, tolerance=tolerance)
    except AutoampError as error:
        raise Problem(str(error)) from None
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=1))
        return found.status
    from rich.console import Console

    from autoamp_cli.runs_table import table_of

    # A pipe or a file gets lines of one width, whatever terminal there is.
    console = Console(width=None if sys.stdout.isatty() else 120)
    for part in table_of(found):
        console.print(part)
    return found.status
