"""`autoamp replay`: the step of a snapshot, run again and explained."""

from __future__ import annotations

import math
from typing import Any

import click

from autoamp_cli.asked import asking, convert_options, with_convert_options
from autoamp_cli.commands import command
from autoamp_cli.outputs import answer, as_json, refuse_unwritable, with_json, write
from autoamp_cli.problem import Problem

CURED, NOT_CURED, NOT_REPRODUCED = 0, 1, 3


@command()
@click.option("--model", metavar="NAME", help="The model, as for explain.")
@click.option(
    "--loss", metavar="MODULE:FUNCTION", help="The loss of the model's output."
)
@click.option(
    "--write", "rule_to", metavar="FILE", help="Write the rule; rules= takes the file."
)
@with_json
@with_convert_options
@click.argument("folder")
@click.pass_context
def replay(
    ctx: click.Context,
    /,
    folder: str,
    *,
    model: str | None,
    loss: str | None,
    rule_to: str | None,
    json_to: str | None,
    **given: Any,
) -> None:
    """Runs the step of a snapshot again, and says why its numbers are not finite.

    FOLDER is the folder of record=, whose newest snapshot is taken, or that of one
    snapshot.  A factory may return the model alone.  Options are added to those of the
    snapshot.
    Exit status: 0 if a rule cures the step, 1 if none does, 3 if the step does not die
    again, 2 for bad input.

    \b
    Examples:
      autoamp replay snapshots --model models.gpt:factory
      autoamp replay snapshots --model models.gpt:factory --write cure.toml
    """
    if not model:
        raise Problem(
            "a snapshot holds no code: give --model pkg.module:factory, a function "
            "that returns the model that was trained"
        )
    refuse_unwritable(rule_to, json_to)
    with asking(model, "running again"):
        from autoamp.tools.named import function_of, made_by
        from autoamp.tools.replay import find_overflow_in, rules_text

        made = made_by(model, alone=True)
        loss_fn = function_of(loss) if loss else None
        call, options = (made.args, made.kwargs), convert_options(given)
        found, snapshot = find_overflow_in(made.model, folder, call, options, loss_fn)
    status = NOT_CURED if found.rule is None else CURED
    if not found or found.harmless:
        status = NOT_REPRODUCED
    facts = {name: snapshot.facts[name] for name in ("rank", "step", "cause")}
    told = {"format": 2, **facts, **_as_dict(found), "status": status}
    answer(found, json_to, as_json(told))
    if rule_to and found.rule is not None:
        write(rule_to, rules_text(found.rule, snapshot))
    elif rule_to:
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
