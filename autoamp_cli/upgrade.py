"""`autoamp upgrade`: what an upgrade moved, why, and the rule for the old placement."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autoamp_cli.problem import Problem

if TYPE_CHECKING:
    from autoamp.saved.diff import Diff
    from autoamp.saved.upgrade import Move, Upgrade


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print what moved as JSON.")
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
    as_json: bool,
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
    from autoamp.saved.upgrade import upgrade as compared

    try:
        found = compared(old, new)
    except AutoampError as error:
        raise Problem(str(error)) from None
    rule = found.rule.toml()
    if not as_json:
        _say(found, old)
        if (write or model) and not rule:
            click.echo("There is no rule to write or to check.")
    if write and rule:
        try:
            Path(write).write_text(rule, encoding="utf-8")
        except OSError as error:
            raise Problem(f"{write} cannot be written: {error.strerror}") from None
    left = None
    if model and rule:
        options = {"precision": found.found.compute_dtypes[0]}
        harm = {"do_no_harm": False} if no_do_no_harm else {}
        left = _left(model, old, rule, {**options, **harm}, device)
        if not as_json:
            _say_left(left, model, old)
    if as_json:
        click.echo(json.dumps({**found.to_dict(), "check": _counts(left)}, indent=1))
    ctx.exit(1 if found.moved else 0)


def _say(found: Upgrade, old: str) -> None:
    """Prints what moved, what it costs, and the rule."""
    from autoamp.printable import printable_line
    from autoamp.saved.upgrade import seconds_of

    pair, before = found.found, found.seconds[0]
    each = zip((pair.old, pair.new), found.versions, strict=True)
    title = " → ".join(f"{path} ({_versions(made)})" for path, made in each)
    click.echo(printable_line(f"{pair.models[0]}: {title}", 500))
    for cause, moves in found.causes.items():
        click.echo(f"{cause}: {len(moves)}{_cost(seconds_of(moves), before)}")
        for move in moves:
            click.echo(f"  {printable_line(_told(move, before), 500)}")
    for word, keys in (
        ("appeared", pair.graphs_appeared),
        ("vanished", pair.graphs_vanished),
    ):
        if keys:
            click.echo(f"graphs that {word}: {', '.join(map(printable_line, keys))}")
    if not found.moved:
        click.echo("Nothing moved.")
    _say_times(found)
    for name in ("allow", "deny", "keep"):
        if names := getattr(found.rule, name):
            click.echo(f"as before with {name}={names!r}")
    reasons: dict[str, list[str]] = {}
    for op, why in found.rule.unruled:
        reasons.setdefault(why, []).append(op.op)
    for why, ops in reasons.items():
        line = f"no rule moves {len(ops)} back ({', '.join(dict.fromkeys(ops))}): {why}"
        click.echo(printable_line(line, 500))
    if reasons:
        click.echo(f"convert(model, lock={old!r}) takes the prices of {old}")


def _versions(made: Any) -> str:
    named = ", ".join(f"{name} {version}" for name, version in made.items())
    return named or "unknown version"


def _told(move: Move, run: float | None) -> str:
    op = move.op
    where = f" in {op.module}" if op.module else ""
    where += f" ({op.source})" if op.source else ""
    if move.old and move.new:
        change = f"{move.old} → {move.new}"
    else:
        change = f"appeared, {move.new}" if move.new else f"vanished, {move.old}"
    why = f" ({move.why})" if move.why else ""
    return f"{op.op}{where}: {change}{_cost(move.seconds, run)}{why}"


def _cost(seconds: float | None, run: float | None) -> str:
    """A predicted difference, and its share of a run before the upgrade."""
    if seconds is None:
        return ""
    share = f" ({seconds / run:+z.1%} of a run)" if run else ""
    micro = seconds * 1e6
    told = f"{micro:+,.0f}" if abs(micro) >= 100 else f"{micro:+z.3g}"
    return f", {told} µs{share}"


def _say_times(found: Upgrade) -> None:
    before, after = found.seconds
    if before and found.rest:
        click.echo(f"casts, and ops that did not move: {_cost(found.rest, before)[2:]}")
    if before and after:
        more = (after - before) / before
        click.echo(
            f"predicted time of a run: {before * 1e3:.4g} ms → {after * 1e3:.4g} ms "
            f"({more:+.1%})"
        )


def _left(
    factory: str, old: str, rule: str, options: dict[str, Any], device: str | None
) -> Diff:
    """The differences between the old placement and the placement with the rule."""
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
        return diff(load(old), load(path))


def _counts(left: Diff | None) -> dict[str, int] | None:
    if left is None:
        return None
    names = "changed", "appeared", "vanished"
    return {name: len(getattr(left, name)) for name in names}


def _say_left(left: Diff, factory: str, old: str) -> None:
    if not (left.changed or left.appeared or left.vanished):
        click.echo(f"With this rule the placement of {factory} is that of {old} again.")
        return
    names = ", ".join(change.new.op for change in left.changed[:3])
    click.echo(
        f"With this rule the placement of {factory} is still not that of {old}: "
        f"{len(left.changed)} ops differ in precision ({names}), {len(left.appeared)} "
        f"appeared, {len(left.vanished)} vanished. convert(model, lock={old!r}) warns "
        "of them."
    )
