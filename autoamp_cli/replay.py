"""`autoamp replay`: the step of a snapshot, run again and explained."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import click

from autoamp_cli.asked import asking, show
from autoamp_cli.problem import Problem

CURED, NOT_CURED, NOT_REPRODUCED = 0, 1, 3


@click.command()
@click.option("--model", metavar="MODULE:FACTORY", help="Makes the model.")
@click.option("--loss", metavar="MODULE:FN", help="The loss of the model's output.")
@click.option("--write", metavar="FILE", help="Write the rule; rules= takes the file.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@click.argument("folder")
@click.pass_context
def replay(
    ctx: click.Context,
    folder: str,
    *,
    model: str | None,
    loss: str | None,
    write: str | None,
    as_json: bool,
) -> None:
    """Runs the step of a snapshot again, and says why its numbers are not finite.

    FOLDER is the folder of record=, whose newest snapshot is taken, or that of one
    snapshot.  FACTORY() returns the model, (model, args) or (model, args, kwargs).
    Exit status: 0 if a rule cures the step, 1 if none does, 3 if the step does not die
    again, 2 for bad input.

    \b
    Examples:
      autoamp replay snapshots --model models.gpt:factory
      autoamp replay snapshots --model models.gpt:factory --write cure.toml
    """
    from autoamp.tools.replay import find_overflow_in, rules_text
    from autoamp_cli.factory import function_of, made_by

    if not model:
        raise Problem(
            "a snapshot holds no code: give --model module:factory, a function that "
            "returns the model that was trained"
        )
    with asking(model):
        made = made_by(model, alone=True)
        loss_fn = function_of(loss) if loss else None
        call = made.args, made.kwargs
        found, snapshot = find_overflow_in(made.model, folder, call, None, loss_fn)
    status = NOT_CURED if found.rule is None else CURED
    if not found or found.harmless:
        status = NOT_REPRODUCED
    if as_json:
        facts = {name: snapshot.facts[name] for name in ("rank", "step", "cause")}
        told = {"format": 2, **facts, **_as_dict(found), "status": status}
        click.echo(json.dumps(told, indent=2))
    else:
        show(found)
    if write and found.rule is not None:
        try:
            Path(write).write_text(rules_text(found.rule, snapshot), encoding="utf-8")
        except OSError as error:
            raise Problem(f"{write} cannot be written: {error.strerror}") from None
    elif write:
        click.echo("There is no rule to write.", err=True)
    ctx.exit(status)


def _as_dict(found: Any) -> dict[str, Any]:
    from autoamp.dtypes import short_name

    names = ("label", "headline", "direction", "kind", "op", "name", "module", "source")
    rule, size = found.rule, found.largest
    return {
        **{name: getattr(found, name) for name in names},
        "reproduced": found.found and not found.harmless,
        "dtype": short_name(found.dtype),
        "magnitude": size if math.isfinite(size) else str(size),
        "in_fp32": found.in_fp32,
        "rule": rule and {"deny": [*rule.deny], "keep": [*rule.keep]},
        "notes": [*found.notes],
    }
