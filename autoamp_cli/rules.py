"""`autoamp rules`: the lists of ops, a check of a rules file, the rules on one op."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autoamp_cli.problem import Problem
from autoamp_cli.words import CATEGORIES, PRECISIONS

if TYPE_CHECKING:
    from autoamp.passes.rules import Rule, Rules

_PRECISION = click.Choice(PRECISIONS)
_OTHERS = {
    "torch-cuda": ("torch.autocast, CUDA", "runs in the dtypes it is given"),
    "torch-cpu": ("torch.autocast, CPU", "runs in the dtypes it is given"),
    "tensorflow": ("TensorFlow, fp16", "stays fp32"),
    "tensorflow-bf16": ("TensorFlow, bf16", "stays fp32"),
}
"""The complete sets: their titles, and what an op in none of their lists gets."""


@click.group()
def rules() -> None:
    """Shows the op rules, checks a rules file, says why an op is in its list."""


@rules.command(name="list")
@click.option("--precision", type=_PRECISION, default="bf16", help="Default: bf16.")
@click.option("--category", type=click.Choice(CATEGORIES), help="Only one list.")
@click.option("--json", "as_json", is_flag=True, help="Print the rules as JSON.")
def list_(precision: str, category: str | None, as_json: bool) -> None:
    """Prints the built-in rules of a precision: each op, its list, and the reason.

    \b
    Examples:
      autoamp rules list --category deny
      autoamp rules list --precision fp16 --json
    """
    from autoamp.passes.rules import Rules

    table = Rules.default(precision).table
    found = [
        table[op]
        for wanted in CATEGORIES
        if category in (None, wanted)
        for op in sorted(table)
        if table[op].category == wanted
    ]
    if as_json:
        keys = ("op", "category", "reason")
        rows = [{**{k: getattr(r, k) for k in keys}, **_meant(r)} for r in found]
        click.echo(json.dumps(rows, indent=1))
        return
    for rule in found:
        click.echo(f"{rule.category:<6} {rule.op}: {rule.reason}")


@rules.command()
@click.argument("file")
def check(file: str) -> None:
    """Finds every fault of the rules FILE.

    Exit status: 0 if there is none, 1 if there is one, 2 if FILE cannot be read.

    \b
    Example:
      autoamp rules check my_rules.toml
    """
    from autoamp.errors import RulesError
    from autoamp.messages import printable_line
    from autoamp.passes.rules.parse import check as faults_of

    try:
        faults, count = faults_of(Path(file))
    except (RulesError, ValueError) as error:  # a null byte in the path
        raise Problem(str(error)) from None
    for fault in faults:
        place = f"{file}:{fault.line}" if fault.line else file
        click.echo(printable_line(f"{place}: {fault.problem}", 2000))
    if faults:
        raise SystemExit(1)
    click.echo(
        printable_line(f"{file}: {count} rule{'' if count == 1 else 's'}, no fault")
    )


@rules.command()
@click.option("--precision", type=_PRECISION, help="Default: both.")
@click.argument("op")
def why(op: str, precision: str | None) -> None:
    """Says in which list OP is, and why; and what other tools do with it.

    \b
    Examples:
      autoamp rules why softmax
      autoamp rules why aten::sum.dim_IntList --precision fp16
    """
    from autoamp.messages import printable_line
    from autoamp.passes.ops import exists, parse_op_name
    from autoamp.passes.rules import Rules
    from autoamp.passes.rules.model import builtin_path
    from autoamp.passes.rules.parse import unknown_op

    key = parse_op_name(op)
    if not exists(key):
        raise Problem(printable_line(unknown_op(key), 500))
    click.echo(key)
    ours = "decided by its schema and tags: a view or pointwise op may be low"
    for each in PRECISIONS if precision is None else (precision,):
        place = f"rules/{builtin_path(each).name}"
        _say(f"autoamp, {each} ({place})", key, Rules.default(each), ours)
    for name, (title, otherwise) in _OTHERS.items():
        _say(title, key, Rules.load(name), otherwise)


def _say(title: str, key: str, table: Rules, otherwise: str) -> None:
    """Prints what one set says of an op, overload by overload where these differ."""
    from autoamp.passes.ops import (
        is_out_variant,
        op_name,
        overloads,
        split_key,
        takes_tensors,
    )

    every = [each for each in overloads(key) if not is_out_variant(each)]
    said: dict[Rule | None, list[str]] = {}
    for overload in [*filter(takes_tensors, every)] or every:
        name = split_key(op_name(overload))[2]
        said.setdefault(table.lookup(overload), []).append(name)
    click.echo(f"  {title}")
    for rule, names in said.items():
        of = f" [{', '.join(names)}]" if len(said) > 1 else ""
        if rule is None:
            click.echo(f"    in no list{of}: {otherwise}")
            continue
        click.echo(f"    {rule.category}{of}: {rule.reason}")
        for condition in rule.when:
            test = " ".join(filter(None, (condition.test, condition.argument)))
            click.echo(
                f"      but {condition.category} where {test} {condition.value}: "
                f"{condition.reason}"
            )


def _meant(rule: Rule) -> dict[str, object]:
    """The conditions of a rule as plain values."""
    keys = ("test", "argument", "value", "category", "reason")
    return {"when": [{k: getattr(c, k) for k in keys} for c in rule.when]}
