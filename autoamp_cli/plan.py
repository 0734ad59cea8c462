"""`autoamp plan`: time and memory of a model by name, without its weights."""

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
from autoamp_cli.mesh import mesh_options, with_mesh_options
from autoamp_cli.outputs import answer, refuse_unwritable, with_json
from autoamp_cli.problem import Problem


@command()
@with_device
@click.option("--inference", is_flag=True, help="Plan calls without a backward.")
@click.option(
    "--optimizer",
    type=click.Choice(["adamw", "sgd", "none"]),
    default="adamw",
    show_default=True,
    help="The optimizer; sgd has momentum.",
)
@with_json
@with_mesh_options
@with_convert_options
@with_name
def plan(
    name: str,
    *,
    device: str | None,
    batch: int | None,
    sequence: int | None,
    inference: bool,
    optimizer: Any,
    json_to: str | None,
    **given: Any,
) -> None:
    """Predicts time and peak memory of a step in fp32, autocast and autoamp.

    NAME is as for explain.  The model is made on the meta device: it has no weights,
    and nothing is downloaded.

    \b
    Examples:
      autoamp plan transformers:gpt2 --batch 8
      autoamp plan "transformers:LlamaConfig(num_hidden_layers=16)" --device h100
      autoamp plan llama/config.json --inference --sequence 2048
      autoamp plan models.resnet:example --optimizer sgd --json plan.json
      autoamp plan transformers:llama --device h100 --mesh dp=16,tp=8,pp=4
    """
    mesh = mesh_options(given)
    if mesh and inference:
        raise Problem("--mesh plans training steps: leave out --inference")
    refuse_unwritable(json_to)
    with asking(name, "planning"):
        from autoamp.tools import plan as plans

        found = plans.plan(
            name,
            batch=batch,
            sequence=sequence,
            device=device,
            inference=inference,
            optimizer=optimizer,
            **mesh,
            **convert_options(given),
        )
    answer(found, json_to, found.to_json())
