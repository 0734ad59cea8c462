"""`autoamp plan`: time and memory of a model by name, without its weights."""

from __future__ import annotations

from typing import Any

import click

from autoamp_cli.asked import asking, convert_options, show, with_convert_options
from autoamp_cli.mesh import mesh_options, planned_for, with_mesh_options
from autoamp_cli.problem import Problem

_PATH = click.Path(dir_okay=False, allow_dash=True)


@click.command()
@click.option("--device", metavar="NAME", help="Plan for cuda:sm_90, ...")
@click.option(
    "--batch", type=click.IntRange(1), metavar="N", help="Samples; default 1."
)
@click.option(
    "--sequence",
    type=click.IntRange(1),
    metavar="N",
    help="Tokens of a sample; at most 1,024 by default.",
)
@click.option("--infer", is_flag=True, help="Plan calls without a backward.")
@click.option(
    "--optimizer",
    type=click.Choice(["adamw", "sgd", "none"]),
    default="adamw",
    show_default=True,
    help="The optimizer; sgd has momentum.",
)
@click.option("--json", type=_PATH, help="Write the figures as JSON.")
@with_mesh_options
@with_convert_options
@click.argument("model", metavar="NAME")
def plan(
    model: str,
    *,
    device: str | None,
    batch: int | None,
    sequence: int | None,
    infer: bool,
    optimizer: str,
    json: str | None,
    **given: Any,
) -> None:
    """Predicts time and peak memory of a step in fp32, autocast and autoamp.

    NAME is a configuration of transformers with literal arguments, a type of model of
    transformers, the path of a config.json, or MODULE:FACTORY as for explain.  The
    model is made on the meta device: it has no weights, and nothing is downloaded.

    \b
    Examples:
      autoamp plan transformers:gpt2 --batch 8
      autoamp plan "transformers:LlamaConfig(num_hidden_layers=16)" --device cuda:sm_90
      autoamp plan llama/config.json --infer --sequence 2048
      autoamp plan models.resnet:example --optimizer sgd --json plan.json
      autoamp plan transformers:llama --device cuda:sm_90 --mesh dp=16,tp=8,pp=4
    """
    mesh = mesh_options(given)
    if mesh and infer:
        raise Problem("--mesh plans training steps: leave out --infer")
    with asking(model):
        found = planned_for(
            model,
            batch=batch,
            sequence=sequence,
            device=device,
            infer=infer,
            optimizer=optimizer,
            options=convert_options(given),
            **mesh,
        )
    if json:
        try:
            with click.open_file(json, "w", encoding="utf-8") as file:
                file.write(found.to_json())
        except OSError as error:
            raise Problem(f"{json} cannot be written: {error.strerror}") from None
    if json != "-":
        show(found)
