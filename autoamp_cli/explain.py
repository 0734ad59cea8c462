"""`autoamp explain`: the report of what `convert` would do to a model."""

from __future__ import annotations

from typing import Any

import click

from autoamp_cli.asked import asking, convert_options, show, with_convert_options
from autoamp_cli.mesh import mesh_options, planned_for, with_mesh_options
from autoamp_cli.problem import Problem

_PATH = click.Path(dir_okay=False, allow_dash=True)


@click.command()
@click.option("--json", type=_PATH, help="Write the report as JSON, to commit or diff.")
@click.option("--html", type=_PATH, help="Write one page that draws the graphs.")
@click.option("--dot", type=_PATH, help="Write the graphs for Graphviz.")
@click.option("--text", is_flag=True, help="Print the report beside written files.")
@click.option("--full", is_flag=True, help="Print every op and cast, not a summary.")
@click.option("--why", metavar="NODE", help="Print why NODE, or GRAPH:NODE, is low.")
@click.option("--device", metavar="NAME", help="Explain for cuda:sm_90, cpu:amx, ...")
@with_mesh_options
@with_convert_options
@click.argument("factory", metavar="MODULE:FACTORY")
def explain(
    factory: str,
    *,
    json: str | None,
    html: str | None,
    dot: str | None,
    text: bool,
    full: bool,
    why: str | None,
    device: str | None,
    **given: Any,
) -> None:
    """Prints or writes the report of a model that MODULE:FACTORY makes.

    FACTORY() returns (model, args) or (model, args, kwargs); the model is called once,
    in fp32, and is not converted.  Without a path the report is printed; - as a path is
    stdout.  The model's own output goes to stderr.  With --mesh the answer is that of
    autoamp plan --mesh, which takes names of models of transformers too.

    \b
    Examples:
      autoamp explain models.resnet:example
      autoamp explain models.resnet:example --device cuda:sm_90 --json precision.json
      autoamp explain models.resnet:example --html resnet.html
      autoamp explain models.resnet:example --why conv2d
      autoamp explain models.resnet:example --dot - | dot -Tsvg > resnet.svg
      autoamp explain transformers:llama --mesh dp=16,tp=8,pp=4 --device cuda:sm_90
    """
    from autoamp import api
    from autoamp_cli.factory import made_by

    mesh = mesh_options(given)
    options = convert_options(given)
    if mesh:
        if html or dot or full or why:
            raise Problem("--mesh shows tables, and writes --json: leave out the rest")
        _mesh(factory, json, text=text, device=device, options=options, **mesh)
        return
    with asking(factory):
        made = made_by(factory)
        report = api.explain(
            made.model, *made.args, kwargs=made.kwargs, device=device, **options
        )
        written = (
            (json, report.to_json),
            (html, report.to_html),
            (dot, report.to_dot),
        )
        texts = [(path, make()) for path, make in written if path]
        graph, _, node = (why or "").rpartition(":")
        answer = report.why(node, graph=graph or 0) if why else ""
        everything = report.full() if full else ""
    for path, content in texts:
        _write(path, content)
    if full:
        click.echo(everything)
    if answer:
        click.echo(answer)
    elif not full and (text or not texts):
        show(report)


def _mesh(model: str, json: str | None, *, text: bool, **wanted: Any) -> None:
    with asking(model):
        found = planned_for(model, **wanted)
    if json:
        _write(json, found.to_json())
    if text or not json:
        show(found)


def _write(path: str, content: str) -> None:
    try:
        with click.open_file(path, "w", encoding="utf-8") as file:
            file.write(content)
    except OSError as error:
        raise Problem(f"{path} cannot be written: {error.strerror}") from None
