"""`autoamp upgrade`: what an upgrade moved, why, and the rule for the old placement."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click

from autoamp_cli.problem import Problem


@click.command()
@click.option("--write", metavar="FILE", help="Write the rule; rules= takes the file.")
@click.option("--model", metavar="MODULE:FACTORY", help="Check the rule on this model.")
@click.option("--device", metavar="NAME", help="Check for cuda:sm_90, cpu:amx, ...")
@click.option("--no-do-no-harm", is_flag=True, help="Check without do_no_harm.")
@click.argument("old")
@click.argument("new")
@click.pass_context
def upgrade(
    ctx: click.Context,
    old: str,
    new: str,
    *,
    write: str | None,
    model: str | None,
    device: str | None,
    no_do_no_harm: bool,
) -> None:
    """Says why ops moved from OLD to NEW, and gives the rule that moves them back.

    OLD and NEW are reports of one model that `autoamp explain --json` wrote in two
    environments.  Exit status: 0 if nothing moved, 1 if something did, 2 for bad input.

    \b
    Examples:
      autoamp upgrade precision.json new.json
      autoamp upgrade precision.json new.json --write old.toml --model nets:example
    """
    from autoamp.errors import AutoampError
    from autoamp.printable import printable_line
    from autoamp.saved.upgrade import upgrade as compared

    try:
        found = compared(old, new)
    except AutoampError as error:
        raise Problem(str(error)) from None
    for cause, lines in found.causes.items():
        if lines:
            click.echo(f"{cause}: {len(lines)}")
        for line in lines:
            click.echo(f"  {printable_line(line, 500)}")
    if not found.moved:
        click.echo("Nothing moved.")
    _say_times(*found.seconds)
    rule = found.toml()
    for name in ("allow", "deny", "keep"):
        if names := getattr(found, name):
            click.echo(f"as before with {name}={[*names]!r}")
    if found.unruled:
        click.echo(
            f"no rule moves {len(found.unruled)} ops back: "
            f"convert(model, lock={old!r}) takes the prices of {old}"
        )
    if (write or model) and not rule:
        click.echo("There is no rule to write or to check.")
    if write and rule:
        try:
            Path(write).write_text(rule, encoding="utf-8")
        except OSError as error:
            raise Problem(f"{write} cannot be written: {error.strerror}") from None
    if model and rule:
        options = {"precision": found.found.compute_dtypes[0]}
        harm = {"do_no_harm": False} if no_do_no_harm else {}
        _check(model, old, rule, {**options, **harm}, device)
    ctx.exit(1 if found.moved else 0)


def _say_times(before: float | None, after: float | None) -> None:
    if before and after:
        more = (after - before) / before
        click.echo(
            f"predicted time of a run: {before * 1e3:.4g} ms → {after * 1e3:.4g} ms "
            f"({more:+.1%})"
        )


def _check(
    factory: str, old: str, rule: str, options: dict[str, Any], device: str | None
) -> None:
    """Says whether the placement with the rule is the old one."""
    from autoamp import questions
    from autoamp.saved.diff import diff
    from autoamp.saved.load import load
    from autoamp_cli.asked import asking
    from autoamp_cli.factory import made_by

    with tempfile.TemporaryDirectory() as folder, asking(factory):
        rules, path = Path(folder, "rules.toml"), Path(folder, "report.json")
        rules.write_text(rule, encoding="utf-8")
        made = made_by(factory)
        given = {**options, "rules": str(rules)}
        report = questions.explain(
            made.model, *made.args, options=given, device=device, **made.kwargs
        )
        report.to_json(path)
        left = diff(load(old), load(path))
    count = len(left.changed)
    if not (count or left.appeared or left.vanished):
        click.echo(f"With this rule the placement of {factory} is that of {old} again.")
        return
    names = ", ".join(change.new.op for change in left.changed[:3])
    click.echo(
        f"With this rule the placement of {factory} is still not that of {old}: "
        f"{count} ops differ in precision ({names}), {len(left.appeared)} appeared, "
        f"{len(left.vanished)} vanished. convert(model, lock={old!r}) warns of them."
    )
