"""`autoamp compare`: the ops of a model by their error, mixed precision beside fp32."""

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
from autoamp_cli.outputs import as_json, refuse_unwritable, show, with_json, write


@command()
@click.option("--tolerance", type=float, help="Find modules to keep for this error.")
@click.option("--to-rules", metavar="FILE", help="Write those modules as a rules file.")
@with_json
@with_convert_options
@with_name
def compare(
    name: str,
    *,
    batch: int | None,
    sequence: int | None,
    tolerance: float | None,
    to_rules: str | None,
    json_to: str | None,
    **given: Any,
) -> None:
    """Ranks the ops of a model by their error.

    NAME is as for explain.  The model is called in fp32 and in mixed precision; in
    training mode the backward runs too.  Exit status: 1 if no set of modules reaches
    the tolerance, 2 for bad input, else 0.

    \b
    Examples:
      autoamp compare models.resnet:example --precision bf16
      autoamp compare models.resnet:example --tolerance 1e-3 --to-rules keep.toml
    """
    if to_rules and tolerance is None:
        raise click.UsageError("--to-rules needs --tolerance")
    refuse_unwritable(to_rules, json_to)
    with asking(name, "comparing"):
        from autoamp import api
        from autoamp.tools.named import made_by

        made = made_by(name, batch=batch, sequence=sequence)
        comparison = api.compare(
            made.model,
            *made.args,
            kwargs=made.kwargs,
            tolerance=tolerance,
            **convert_options(given),
        )
    if json_to:
        write(json_to, as_json(comparison))
    if json_to != "-":
        show(comparison)
    missed = tolerance is not None and comparison.keep is None
    if to_rules and not missed:
        comparison.to_rules(to_rules)
    if missed:
        raise SystemExit(1)
