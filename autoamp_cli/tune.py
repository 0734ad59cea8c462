"""`autoamp tune`: the fastest way to run a model on this machine, by measurement."""

from __future__ import annotations

from typing import Any

import click

from autoamp_cli.asked import (
    asking,
    convert_options,
    with_convert_options,
    with_name,
)
from autoamp_cli.commands import command
from autoamp_cli.outputs import answer, refuse_unwritable, with_json


@command()
@click.option("--inference", is_flag=True, help="Time calls in eval mode.")
@with_json
@with_convert_options
@with_name
def tune(
    name: str,
    *,
    batch: int | None,
    sequence: int | None,
    inference: bool,
    json_to: str | None,
    **given: Any,
) -> None:
    """Measures which way to run a model is fastest on this machine.

    NAME is as for explain.  Each op and cast of the model is timed in both precisions,
    and whole calls in fp32, under autocast, and with casts placed by either.  The times
    of ops are kept, so that autoamp.tune in a script begins with them.

    \b
    Examples:
      autoamp tune models.resnet:example
      autoamp tune transformers:gpt2 --sequence 128 --inference --json tuning.json
    """
    refuse_unwritable(json_to)
    with asking(name, "tuning"):
        from autoamp import api
        from autoamp.tools.named import made_by

        made = made_by(name, batch=batch, sequence=sequence, trains=not inference)
        model = made.model.eval() if inference else made.model
        options = convert_options(given)
        found = api.tune(model, *made.args, kwargs=made.kwargs, **options)
    answer(found, json_to)
