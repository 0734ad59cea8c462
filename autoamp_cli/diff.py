"""`autoamp diff`: which ops changed precision between two reports."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from autoamp_cli.commands import command
from autoamp_cli.outputs import as_json, refuse_unwritable, with_json, write
from autoamp_cli.problem import Problem
from autoamp_cli.waiting import waiting


@command()
@with_json
@click.option(
    "--exit-code",
    is_flag=True,
    help="Exit with 1 where an op appeared or vanished, too.",
)
@click.option(
    "--full", is_flag=True, help="Print every row, not the first of each kind."
)
@click.argument("old")
@click.argument("new", nargs=-1, required=True)
@click.pass_context
def diff(
    ctx: click.Context,
    old: str,
    new: tuple[str, ...],
    *,
    json_to: str | None,
    full: bool,
    exit_code: bool,
) -> None:
    """Shows which ops changed precision from OLD to NEW, or to each of several NEW.

    OLD and NEW are reports that `autoamp explain --json` or `--html` wrote, or files
    that `autoamp export` wrote, whose plans are checked against the files first.
    Exit status: 1 if an op changed precision, 0 if none did, 2 if a file is neither.
    With --exit-code it is 1 wherever the two place other ops, or ops otherwise.

    \b
    Examples:
      autoamp explain models.resnet:example --json new.json
      autoamp diff precision.json new.json --exit-code
      autoamp diff old.html new.html
      autoamp diff resnet.pt2 resnet.onnx precision.json
    """
    refuse_unwritable(json_to)
    with waiting("comparing"):
        from autoamp.errors import AutoampError
        from autoamp.passes.saved_reports import diff as compared

        try:
            _refuse_to_replace(json_to)
            first = _report(old)
            diffs = [compared(first, _report(path)) for path in new]
        except AutoampError as error:
            raise Problem(str(error)) from None
    if json_to:
        each = [one.to_dict() for one in diffs]
        write(json_to, as_json(each if len(each) > 1 else each[0]))
    if json_to != "-":
        from rich.console import Console

        from autoamp_cli.diff_table import table_of

        # A pipe or a file gets lines of one width, whatever terminal there is.
        console = Console(width=None if sys.stdout.isatty() else 120)
        for one in diffs:
            for part in table_of(one, full=full):
                console.print(part)
    differ = any(one.places_otherwise if exit_code else one.changed for one in diffs)
    ctx.exit(int(differ))


def _refuse_to_replace(path: str | None) -> None:
    """Refuses to write over a report, which `--json OLD NEW NEW` would do."""
    if path is None or not os.path.isfile(path):
        return
    from autoamp.errors import AutoampError

    try:
        _report(path)
    except AutoampError:
        return
    raise click.UsageError(
        f"{path} would write over a report: give --json after OLD and NEW"
    )


def _report(path: str) -> Any:
    """The report in a file: a report itself, or the plan of an exported model."""
    if path.endswith((".pt2", ".onnx")):
        from autoamp.tools.export_files import plan_in

        return plan_in(path)[1]
    if path.endswith((".html", ".htm")):
        from autoamp.reports.page.read import page_at, report_of_page

        return report_of_page(path, page_at(path))
    from autoamp.passes.saved_reports import load

    return load(path)
