"""`autoamp compare`: mixed precision beside fp32, or two recorded runs."""

from __future__ import annotations

from typing import Any

import click

from autoamp_cli.asked import asking, convert_options, show, with_convert_options
from autoamp_cli.problem import Problem


@click.command()
@click.option(
    "--tolerance",
    type=float,
    help="Find modules to keep for this error; of runs, allow this difference.",
)
@click.option("--to-rules", metavar="FILE", help="Write those modules as a rules file.")
@with_convert_options
@click.option("--rank", metavar="N", type=int, help="Of two runs, this rank alone.")
@click.option("--json", "as_json", is_flag=True, help="Of two runs, print JSON.")
@click.argument("first", metavar="MODULE:FACTORY|RUN_A")
@click.argument("other", metavar="[RUN_B]", required=False)
def compare(
    first: str,
    other: str | None,
    *,
    tolerance: float | None,
    to_rules: str | None,
    rank: int | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Ranks the ops of a model by their error, or finds where two recorded runs part.

    FACTORY() returns (model, args) or (model, args, kwargs).  The model is called in
    fp32 and in mixed precision; in training mode the backward runs too.  Exit status: 1
    if no set of modules reaches the tolerance, 2 for bad input, else 0.

    RUN_A and RUN_B are folders of record=.  The answer is the first step, and op where
    AUTOAMP_RECORD_OPS noted ops, at which they differ by more than rounding.  Exit
    status: 1 if they part, 2 for bad input, else 0.

    \b
    Examples:
      autoamp compare models.resnet:example --precision bf16
      autoamp compare models.resnet:example --tolerance 1e-3 --to-rules keep.toml
      autoamp compare flight-bf16 flight-fp16
    """
    if other is None:
        if rank is not None or as_json:
            raise click.UsageError("--rank and --json are for two runs: give both")
        _compare_ops(first, tolerance=tolerance, to_rules=to_rules, given=given)
        return
    from autoamp_cli.compare_runs import compare_runs

    if to_rules or any(given.values()):
        raise click.UsageError(
            "two runs are compared as they were recorded: --to-rules and options of "
            "convert are for MODULE:FACTORY"
        )
    status = compare_runs(first, other, rank=rank, tolerance=tolerance, as_json=as_json)
    raise SystemExit(status)


def _compare_ops(
    factory: str,
    *,
    tolerance: float | None,
    to_rules: str | None,
    given: dict[str, Any],
) -> None:
    """Prints the errors of the ops of a model."""
    from autoamp import questions
    from autoamp_cli.factory import made_by

    if to_rules and tolerance is None:
        raise click.UsageError("--to-rules needs --tolerance")
    with asking(factory):
        made = made_by(factory)
        found = questions.compare(
            made.model,
            *made.args,
            options=convert_options(given),
            tolerance=tolerance,
            **made.kwargs,
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
