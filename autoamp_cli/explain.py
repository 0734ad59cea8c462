"""`autoamp explain`: the report of what `convert` would do to a model."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import click

from autoamp_cli.problem import Problem
from autoamp_cli.words import PLACEMENTS

if TYPE_CHECKING:
    from autoamp.inspect.report import Report

_PATH = click.Path(dir_okay=False, allow_dash=True)


@click.command()
@click.option("--json", type=_PATH, help="Write the report as JSON, to commit or diff.")
@click.option("--dot", type=_PATH, help="Write the graphs for Graphviz.")
@click.option("--text", is_flag=True, help="Print the report, whatever is written.")
@click.option("--full", is_flag=True, help="Print every op and cast, not a summary.")
@click.option("--device", metavar="NAME", help="Explain for cuda:sm_90, cpu:amx, ...")
@click.option("--precision", metavar="P", help="auto, fp16 or bf16.")
@click.option("--rules", metavar="FILE", help="Rules laid over the built-in ones.")
@click.option("--placement", metavar="P", help=", ".join(PLACEMENTS) + ".")
@click.option("--no-do-no-harm", is_flag=True, help="Convert even what cannot gain.")
@click.argument("factory", metavar="MODULE:FACTORY")
def explain(
    factory: str,
    *,
    json: str | None,
    dot: str | None,
    text: bool,
    full: bool,
    device: str | None,
    no_do_no_harm: bool,
    **given: str | None,
) -> None:
    """Prints or writes the report of a model that MODULE:FACTORY makes.

    FACTORY() returns (model, args) or (model, args, kwargs); the model is called once,
    in fp32, and is not converted.  Without a path the report is printed; - as a path is
    stdout.  What the model itself prints goes to stderr.

    \b
    Examples:
      autoamp explain models.resnet:example
      autoamp explain models.resnet:example --device cuda:sm_90 --json precision.json
      autoamp explain models.resnet:example --dot - | dot -Tsvg > resnet.svg
    """
    options: dict[str, Any] = {key: value for key, value in given.items() if value}
    if no_do_no_harm:
        options["do_no_harm"] = False
    with contextlib.redirect_stdout(sys.stderr):
        report = _report(factory, options, device)
        written = ((json, report.to_json), (dot, report.to_dot))
        texts = [(path, make()) for path, make in written if path]
    for path, content in texts:
        _write(path, content)
    if text or full or not texts:
        _show(report, full=full)


def _report(factory: str, options: dict[str, Any], device: str | None) -> Report:
    from autoamp import api
    from autoamp.errors import AutoampError
    from autoamp_cli.factory import made_by, told

    made = made_by(factory)
    try:
        return api.explain(
            made.model, *made.args, options=options, device=device, **made.kwargs
        )
    except AutoampError as error:
        raise Problem(f"{factory}: {error}") from None
    except Exception as error:
        raise Problem(f"{factory}: the model raised {told(error)}") from error


def _write(path: str, content: str) -> None:
    try:
        with click.open_file(path, "w", encoding="utf-8") as file:
            file.write(content)
    except OSError as error:
        raise Problem(f"{path} cannot be written: {error.strerror}") from None


def _show(report: Report, *, full: bool) -> None:
    if full:
        click.echo(report.full())
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(report)
    else:
        click.echo(str(report))
