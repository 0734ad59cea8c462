"""Explains what an upgrade moved: two saved reports, and the rule for the old way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoamp.errors import OptionError
from autoamp.op_names import parse_op_name
from autoamp.saved.diff import Change, Diff, diff
from autoamp.saved.document import FP32, SavedOp
from autoamp.saved.load import load

RULE, KERNEL, PRICES = "the rule changed", "the kernel changed", "the prices changed"
OTHER_OP = "torch makes another op of the same code"
CODE = "the model's code changed"
REST = "the same rule and prices: what surrounds the op changed"


@dataclass(frozen=True)
class Upgrade:
    """What moved between the reports of two environments.

    Attributes:
        found: the differences.
        causes: each cause to a line for each op that moved by it.
        seconds: the predicted times of one run, old and new; None where not predicted.
        allow, deny: the ops that the rule for the old placement names.
        keep: the modules that it keeps in fp32.
        unruled: ops that no rule moves back: prices or surroundings made them move.
    """

    found: Diff
    causes: Mapping[str, tuple[str, ...]]
    seconds: tuple[float | None, float | None]
    allow: tuple[str, ...]
    deny: tuple[str, ...]
    keep: tuple[str, ...]
    unruled: tuple[str, ...]

    @property
    def moved(self) -> bool:
        """Whether any op moved."""
        return any(self.causes.values())

    def toml(self) -> str:
        """The rule as a rules file; "" where no op needs one."""
        lines = ["[meta]", 'description = "the placement before an upgrade"']
        for name, ops in (("allow", self.allow), ("deny", self.deny)):
            if ops:
                lines += ["", f"[{name}]"]
                lines += [f'{json.dumps(op)} = "as before the upgrade"' for op in ops]
        if self.keep:
            lines += ["", "[keep]", f"modules = {json.dumps([*self.keep])}"]
        return "\n".join(lines) + "\n" if len(lines) > 2 else ""


def upgrade(old: str, new: str) -> Upgrade:
    """Compares the reports in two files.

    Raises:
        OptionError: a file is no report, or they are of other models or precisions.
    """
    before, after = load(old), load(new)
    for word, a, b in (
        ("model", before.model, after.model),
        ("precision", before.compute_dtype, after.compute_dtype),
    ):
        if a != b:
            raise OptionError(
                f"{old} and {new} are not of one {word}: {a or 'none'} and "
                f"{b or 'none'}; write both reports with the same {word}"
            )
    olds, news = (json.loads(Path(p).read_text(encoding="utf-8")) for p in (old, new))
    found = diff(before, after)
    same_prices = before.devices == after.devices
    causes: dict[str, list[str]] = {}
    ruled: set[str] = set()
    was, now = _extra(olds), _extra(news)
    for change in found.changed:
        cause, why = _cause(change, was, now, same_prices)
        if cause == RULE or change.old.precision == FP32:
            ruled.add(change.new.op)
        line = f"{_told(change.new)}: {change.old.precision} → {change.new.precision}"
        causes.setdefault(cause, []).append(f"{line} ({why})")
    _add_others(found, causes)
    allow, deny, keep, unruled = _rule(found, ruled)
    return Upgrade(
        found=found,
        causes={cause: tuple(lines) for cause, lines in causes.items()},
        seconds=(_seconds(olds), _seconds(news)),
        allow=allow,
        deny=deny,
        keep=keep,
        unruled=unruled,
    )


def _cause(
    change: Change, olds: Mapping[Any, Any], news: Mapping[Any, Any], same_prices: bool
) -> tuple[str, str]:
    a, b = (
        extra.get((op.graph, op.body, op.name), {})
        for op, extra in ((change.old, olds), (change.new, news))
    )
    was, now = (f"{x.get('category')} by {x.get('origin')}" for x in (a, b))
    if was != now:
        return RULE, f"{was} → {now}: {change.new.reason}"
    if a.get("kernel") != b.get("kernel"):
        each = (str(x.get("kernel") or "none") for x in (a, b))
        return KERNEL, " → ".join(each)
    return (REST if same_prices else PRICES), change.new.reason


def _add_others(found: Diff, causes: dict[str, list[str]]) -> None:
    """Adds the ops that only one report has, by whether both have their code."""
    pairs = [(op, "vanished") for op in found.vanished]
    pairs += [(op, "appeared") for op in found.appeared]
    olds, news = (
        {(op.module, op.code) for op in ops} for ops in (found.vanished, found.appeared)
    )
    for op, word in pairs:
        cause = OTHER_OP if (op.module, op.code) in olds & news else CODE
        causes.setdefault(cause, []).append(f"{_told(op)} {word}, {op.precision}")
    for word, keys in (
        ("appeared", found.graphs_appeared),
        ("vanished", found.graphs_vanished),
    ):
        causes.setdefault(CODE, []).extend(f"graph {key} {word}" for key in keys)


def _rule(found: Diff, ruled: set[str]) -> tuple[tuple[str, ...], ...]:
    """The ops to allow and to deny, the modules to keep, and what no list moves.

    One op that moved both ways cannot be in two lists: its modules are kept instead.
    An op that is fp32 for its price alone stays fp32 under `allow`, too.

    Args:
        ruled: ops that a rule moves back.
    """
    up, down, modules = dict[str, str](), dict[str, str](), dict[str, set[str]]()
    for change in found.changed:
        op = change.new.op
        if "::" not in op or op not in ruled:
            continue
        name = parse_op_name(op).partition(".")[0].removeprefix("aten::")
        if change.old.precision == FP32:
            down[name] = op
            modules.setdefault(name, set()).add(change.new.module)
        else:
            up[name] = op
    both = up.keys() & down.keys()
    keep = sorted({m for name in both for m in modules[name] if m})
    return (
        tuple(name for name in up if name not in both),
        tuple(name for name in down if name not in both),
        tuple(keep),
        tuple(
            c.new.op
            for c in found.changed
            if "::" not in c.new.op or c.new.op not in ruled
        ),
    )


def _extra(report: Mapping[str, Any]) -> dict[Any, Any]:
    return {(op["graph"], op["body"], op["name"]): op for op in report["ops"]}


def _seconds(report: Mapping[str, Any]) -> float | None:
    headline = report.get("headline")
    found = headline.get("seconds") if isinstance(headline, dict) else None
    return found if isinstance(found, float) else None


def _told(op: SavedOp) -> str:
    where = f" in {op.module}" if op.module else ""
    return f"{op.op}{where}{f' ({op.source})' if op.source else ''}"
