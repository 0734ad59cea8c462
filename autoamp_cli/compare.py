"""`autoamp compare`: the ops of a model by their error, mixed precision beside fp32."""

from __future__ import annotations

from typing import Any

import click

from autoamp_cli.asked import asking, convert_options, show, with_convert_options
from autoamp_cli.problem import Problem


@click.command()
@click.option("--tolerance", type=float, help="Find modules to keep for this error.")
@click.option("--to-rules", metavar="FILE", help="Write those modules as a rules file.")
@with_convert_options
@click.argument("factory", metavar="MODULE:FACTORY")
def compare(
    factory: str, *, tolerance: float | None, to_rules: str | None, **given: Any
) -> None:
    """Ranks the ops of a model by their error.

    FACTORY() returns (model, args) or (model, args, kwargs).  The model is called in
    fp32 and in mixed precision; in training mode the backward runs too.  Exit status: 1
    if no set of modules reaches the tolerance, 2 for bad input, else 0.

    \b
    Examples:
      autoamp compare models.resnet:example --precision bf16
      autoamp compare models.resnet:example --tolerance 1e-3 --to-rules keep.toml
    """
    from autoamp import api
    from autoamp_cli.factory import made_by

    if to_rules and tolerance is None:
        raise click.UsageError("--to-rules needs --tolerance")
    with asking(factory):
        made = made_by(factory)
        found = api.compare(
            made.model,
            *made.args,
            kwargs=made.kwargs,
            tolerance=tolerance,
            **convert_options(given),
        )
    show(found)
    missed = tolerance is not None and found.keep is None
    if to_rules and not missed:
        try:
            found.to_rules(to_rules)
        except OSError as error:
            raise Problem(f"{to_rules} cannot be written: {error.strerror}") from None
    if missed:
        raise SystemExit(1)
