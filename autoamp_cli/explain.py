"""`autoamp explain`: the report of what `convert` would do to a model."""

from __future__ import annotations

from typing import Any

import click

from autoamp_cli.asked import (
    asking,
    convert_options,
    with_convert_options,
    with_device,
    with_name,
)
from autoamp_cli.commands import command
from autoamp_cli.outputs import PATH, refuse_unwritable, show, with_json, write


@command()
@with_json
@click.option("--html", type=PATH, help="Write one page that draws the graphs.")
@click.option("--dot", type=PATH, help="Write the graphs for Graphviz.")
@click.option("--full", is_flag=True, help="Print every op and cast, not a summary.")
@click.option("--why", metavar="NODE", help="Print why NODE, or GRAPH:NODE, is low.")
@with_device
@with_convert_options
@with_name
def explain(
    name: str,
    *,
    batch: int | None,
    sequence: int | None,
    json_to: str | None,
    html: str | None,
    dot: str | None,
    full: bool,
    why: str | None,
    device: str | None,
    **given: Any,
) -> None:
    """Prints the report of what convert would do to a model.

    NAME is pkg.module:factory or file.py:factory, a function that returns (model, args)
    or (model, args, kwargs); a model of transformers, as transformers:gpt2 or
    "transformers:LlamaConfig(num_hidden_layers=2)"; or the path of a config.json.  The
    model is called once, in fp32; what it prints goes to stderr.  - as a path is
    stdout.

    \b
    Examples:
      autoamp explain models/resnet.py:example --html resnet.html
      autoamp explain transformers:gpt2 --device h100 --json precision.json
      autoamp explain models.resnet:example --why conv2d
      autoamp explain models.resnet:example --dot - | dot -Tsvg > resnet.svg
    """
    refuse_unwritable(json_to, html, dot)
    with asking(name, "explaining"):
        from autoamp import api
        from autoamp.passes.decide.devices import full_name
        from autoamp.tools.named import made_by

        if device is not None:
            full_name(device)  # refused before a model is made, which may take long
        made = made_by(name, meta=True, batch=batch, sequence=sequence)
        report = api.explain(
            made.model,
            *made.args,
            kwargs=made.kwargs,
            device=device,
            **convert_options(given),
        )
        written = {json_to: report.to_json, html: report.to_html, dot: report.to_dot}
        texts = {path: make() for path, make in written.items() if path}
        graph, _, node = (why or "").rpartition(":")
        text = report.why(node, graph=graph or None) if why else ""
        text += report.full() if full else ""
    for path, content in texts.items():
        write(path, content)
    if "-" not in texts:
        show(text or report)
