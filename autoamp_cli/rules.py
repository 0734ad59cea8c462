"""`autoamp rules`: the lists of ops, a check of a rules file, the rules on one op."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autoamp_cli.commands import Command, Commands
from autoamp_cli.outputs import as_json, refuse_unwritable, with_json, write
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


@click.group(cls=Commands)
def rules() -> None:
    """Shows the op rules, checks a rules file, says why an op is in its list."""


@rules.command(name="list", cls=Command)
@click.option("--precision", type=_PRECISION, default="bf16", help="Default: bf16.")
@click.option("--category", type=click.Choice(CATEGORIES), help="Only one list.")
@with_json
def list_(precision: str, category: str | None, json_to: str | None) -> None:
    """Prints the built-in rules of a precision: each op, its list, and the reason.

    \b
    Examples:
      autoamp rules list --category deny
      autoamp rules list --precision fp16 --json
    """
    refuse_unwritable(json_to)
    from autoamp.passes.rules import Rules

    table = Rules.default(precision).table
    found = [
        table[op]
        for wanted in CATEGORIES
        if category in (None, wanted)
        for op in sorted(table)
        if table[op].category == wanted
    ]
    if json_to:
        write(json_to, as_json([_meant(rule) for rule in found]))
    for rule in found if json_to != "-" else ():
        click.echo(f"{rule.category:<6} {rule.op}: {rule.reason}")


@rules.command(cls=Command)
@with_json
@click.argument("file")
def check(file: str, json_to: str | None) -> None:
    """Finds every fault of the rules FILE, or of the built-in set of that name.

    Exit status: 0 if there is none, 1 if there is one, 2 if FILE cannot be read.

    \b
    Example:
      autoamp rules check my_rules.toml
    """
    refuse_unwritable(json_to)
    from autoamp.errors import RulesError
    from autoamp.messages import printable_line
    from autoamp.passes.rules.model import BUILTIN, builtin_path
    from autoamp.passes.rules.parse import check as faults_of

    is_set = file in BUILTIN and not Path(file).exists()
    try:
        faults, count = faults_of(builtin_path(file) if is_set else Path(file))
    except (RulesError, ValueError) as error:  # a null byte in the path
        raise Problem(str(error)) from None
    if json_to:
        each = [{"line": each.line, "problem": each.problem} for each in faults]
        write(json_to, as_json({"file": file, "rules": count, "faults": each}))
    if json_to == "-":
        raise SystemExit(1 if faults else 0)
    for fault in faults:
        place = f"{file}:{fault.line}" if fault.line else file
        click.echo(printable_line(f"{place}: {fault.problem}", 2000))
    if faults:
        raise SystemExit(1)
    click.echo(
        printable_line(f"{file}: {count} rule{'' if count == 1 else 's'}, no fault")
    )


@rules.command(cls=Command)
@click.option("--precision", type=_PRECISION, help="Default: both.")
@with_json
@click.argument("op")
def why(op: str, precision: str | None, json_to: str | None) -> None:
    """Says in which list OP is, and why; and what other tools do with it.

    \b
    Examples:
      autoamp rules why softmax
      autoamp rules why aten::sum.dim_IntList --precision fp16
    """
    refuse_unwritable(json_to)
    from autoamp.messages import printable_line
    from autoamp.passes.ops import exists, parse_op_name
    from autoamp.passes.rules import Rules
    from autoamp.passes.rules.model import builtin_path
    from autoamp.passes.rules.parse import unknown_op

    key = parse_op_name(op)
    if not exists(key):
        raise Problem(printable_line(unknown_op(key), 500))
    ours = "decided by its schema and tags: a view or pointwise op may be low"
    sets = {
        f"autoamp, {each} (rules/{builtin_path(each).name})": (
            _said_of(key, Rules.default(each)),
            ours,
        )
        for each in (PRECISIONS if precision is None else (precision,))
    }
    for name, (title, otherwise) in _OTHERS.items():
        sets[title] = _said_of(key, Rules.load(name)), otherwise
    if json_to:
        facts = {title: _as_facts(*of) for title, of in sets.items()}
        write(json_to, as_json({"op": key, "sets": facts}))
    if json_to == "-":
        return
    click.echo(key)
    for title, (said, otherwise) in sets.items():
        click.echo(f"  {title}")
        _say(said, otherwise)


def _said_of(key: str, table: Rules) -> dict[Rule | None, list[str]]:
    """Each rule that a set has on an op, to the overloads that it holds for."""
    from autoamp.passes.ops import (
        is_out_variant,
        op_name,
        overloads,
        split_key,
        takes_tensors,
    )

    every = [each for each in overloads(key) if not is_out_variant(each)]
    overloads_by_rule: dict[Rule | None, list[str]] = {}
    for overload in [*filter(takes_tensors, every)] or every:
        name = split_key(op_name(overload))[2]
        overloads_by_rule.setdefault(table.lookup(overload), []).append(name)
    return overloads_by_rule


def _as_facts(
    overloads_by_rule: dict[Rule | None, list[str]], otherwise: str
) -> list[dict[str, Any]]:
    """What `_say` prints, as plain values."""
    none: dict[str, Any] = {
        "op": None,
        "category": None,
        "reason": otherwise,
        "when": [],
    }
    return [
        {**(none if rule is None else _meant(rule)), "overloads": names}
        for rule, names in overloads_by_rule.items()
    ]


def _say(overloads_by_rule: dict[Rule | None, list[str]], otherwise: str) -> None:
    """Prints what one set says of an op, overload by overload where these differ."""
    for rule, names in overloads_by_rule.items():
        of = f" [{', '.join(names)}]" if len(overloads_by_rule) > 1 else ""
        if rule is None:
            click.echo(f"    in no list{of}: {otherwise}")
            continue
        click.echo(f"    {rule.category}{of}: {rule.reason}")
        for condition in rule.when:
            click.echo(f"      but {condition}")


def _meant(rule: Rule) -> dict[str, Any]:
    """A rule as plain values."""
    keys = ("test", "argument", "value", "category", "reason")
    conditions = [{key: getattr(each, key) for key in keys} for each in rule.when]
    fields = {key: getattr(rule, key) for key in ("op", "category", "reason")}
    return {**fields, "when": conditions}
