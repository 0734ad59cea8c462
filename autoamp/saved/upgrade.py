"""Explains what an upgrade moved: two saved reports, and the rule for the old way."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autoamp.errors import OptionError
from autoamp.saved.align import paired_graphs, paired_ops
from autoamp.saved.diff import Diff, diff
from autoamp.saved.document import FP32, SavedOp, SavedReport
from autoamp.saved.load import load
from autoamp.saved.way_back import FOLLOWS, Call, WayBack, way_back

SCHEMA = "autoamp.upgrade"
SCHEMA_VERSION = 1
"""Raised when a key is removed or changes its meaning, not when a key is added."""

RULE, KERNEL, PRICES = "the rule changed", "the kernel changed", "the prices changed"
FOLLOWED = "an op that it reads moved"
OTHER_OP = "torch makes another op of the same code"
CODE = "the model's code changed"
REST = "the same rule and prices: what surrounds the op changed"

_UNIT = 1e-10
"""A unit of the costs in a report, where they are times, in seconds."""

_Key = tuple[int, str, str]
_Rows = Mapping[_Key, Mapping[str, Any]]


@dataclass(frozen=True)
class Move:
    """An op that moved, or that one report lacks.

    Attributes:
        op: the op; as the newer report has it, where both have it.
        old, new: its precisions; "" in a report that lacks it.
        why: a clause; "" where the cause says all.
        seconds: how much longer the op is predicted to take than before, without
            casts; None where a report does not say.
    """

    op: SavedOp
    old: str
    new: str
    why: str
    seconds: float | None


@dataclass(frozen=True)
class Upgrade:
    """What moved between the reports of two environments.

    Attributes:
        found: the differences.
        versions: for each report "torch" and "autoamp" to the version that made it;
            empty where the report does not say.
        causes: each cause to the ops that moved by it.
        seconds: the predicted times of one run, old and new; None where not predicted.
        rule: the rule for the old placement.
    """

    found: Diff
    versions: tuple[Mapping[str, str], Mapping[str, str]]
    causes: Mapping[str, tuple[Move, ...]]
    seconds: tuple[float | None, float | None]
    rule: WayBack

    @property
    def moved(self) -> bool:
        """Whether any op moved, or any graph came or went."""
        found = self.found
        return bool(self.causes or found.graphs_appeared or found.graphs_vanished)

    @property
    def rest(self) -> float | None:
        """The seconds that casts, and ops that did not move, take longer than before.

        None where a report does not price its ops.
        """
        before, after = self.seconds
        costs = [move.seconds for moves in self.causes.values() for move in moves]
        known = [cost for cost in costs if cost is not None]
        if before is None or after is None or len(known) < len(costs):
            return None
        return round(after - before - sum(known), 10)

    def to_dict(self) -> dict[str, Any]:
        """What moved as plain values, for JSON."""
        rule, found = self.rule, self.found
        return {
            "schema": SCHEMA,
            "version": SCHEMA_VERSION,
            "old": found.old,
            "new": found.new,
            "model": found.models[0],
            "compute_dtype": found.compute_dtypes[0],
            "versions": [dict(each) for each in self.versions],
            "seconds": [*self.seconds],
            "seconds_of_the_rest": self.rest,
            "causes": {
                cause: [asdict(move) for move in moves]
                for cause, moves in self.causes.items()
            },
            "graphs_appeared": [*found.graphs_appeared],
            "graphs_vanished": [*found.graphs_vanished],
            "rule": {"allow": rule.allow, "deny": rule.deny, "keep": rule.keep},
            "unruled": [{"op": asdict(op), "why": why} for op, why in rule.unruled],
        }


def seconds_of(moves: tuple[Move, ...]) -> float | None:
    """How much longer the ops take together; None where one of them is not priced."""
    known = [move.seconds for move in moves if move.seconds is not None]
    return round(sum(known), 10) if len(known) == len(moves) else None


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
    found, was, now = diff(before, after), _rows(olds), _rows(news)
    seconds = _seconds(olds), _seconds(news)
    timed, same_prices = None not in seconds, before.devices == after.devices
    causes: dict[str, list[Move]] = {}
    by: dict[_Key, str] = {}
    for change in found.changed:
        row, other = was[_key(change.old)], now[_key(change.new)]
        cause, why = _cause(row, other, same_prices=same_prices)
        by[_key(change.new)] = cause
        each = change.old.precision, change.new.precision, why
        longer = _longer(row, other) if timed else None
        causes.setdefault(cause, []).append(Move(change.new, *each, longer))
    for cause, move in _came_and_went(found, was, now, timed=timed):
        causes.setdefault(cause, []).append(move)
    return Upgrade(
        found=found,
        versions=(before.versions, after.versions),
        causes={cause: tuple(moves) for cause, moves in causes.items()},
        seconds=seconds,
        rule=way_back([*_calls(before, after, was, now, by)]),
    )


def _calls(
    before: SavedReport,
    after: SavedReport,
    olds: _Rows,
    news: _Rows,
    by: Mapping[_Key, str],
) -> Iterator[Call]:
    """Every op of the newer report, with its older precision.

    Args:
        by: each op that changed precision, to the cause.
    """
    for old_graph, new_graph in paired_graphs(before.graphs, after.graphs):
        ours, theirs = (g.ops if g else () for g in (old_graph, new_graph))
        for old, new in paired_ops(ours, theirs):
            if new is None:
                continue
            row, cause = news[_key(new)], by.get(_key(new), "")
            yield Call(
                op=new,
                was=old.precision if old else "",
                category=str(row.get("category")),
                origin=str(row.get("origin")),
                old_origin=str(olds[_key(old)].get("origin")) if old else "",
                by_rule=cause == RULE,
                follows=cause == FOLLOWED,
            )


def _cause(
    old: Mapping[str, Any], new: Mapping[str, Any], *, same_prices: bool
) -> tuple[str, str]:
    """Why an op is in another precision, and the details."""
    was, now = (f"{x.get('category')} by {x.get('origin')}" for x in (old, new))
    fp32 = old if old["precision"] == FP32 else new
    if fp32.get("origin") == FOLLOWS:
        return FOLLOWED, str(fp32["reason"])
    if was != now:
        return RULE, f"{was} → {now}: {new['reason']}"
    if old.get("kernel") != new.get("kernel"):
        return KERNEL, " → ".join(str(x.get("kernel") or "none") for x in (old, new))
    return (REST if same_prices else PRICES), str(new["reason"])


def _came_and_went(
    found: Diff, olds: _Rows, news: _Rows, *, timed: bool
) -> Iterator[tuple[str, Move]]:
    """The ops that only one report has, by whether both have their code."""
    codes = [
        {(op.module, op.code) for op in ops} for ops in (found.vanished, found.appeared)
    ]
    both = codes[0] & codes[1]
    for ops, rows, sign in ((found.vanished, olds, -1), (found.appeared, news, 1)):
        for op in ops:
            cause = OTHER_OP if (op.module, op.code) in both else CODE
            each = (op.precision, "") if sign < 0 else ("", op.precision)
            cost = _cost(rows[_key(op)]) if timed else None
            seconds = None if cost is None else _in_seconds(sign * cost)
            yield cause, Move(op, *each, "", seconds)


def _longer(old: Mapping[str, Any], new: Mapping[str, Any]) -> float | None:
    """The seconds that an op takes longer than before; None where that is unknown."""
    a, b = _cost(old), _cost(new)
    return None if a is None or b is None else _in_seconds(b - a)


def _in_seconds(units: int) -> float:
    return round(units * _UNIT, 10)


def _cost(row: Mapping[str, Any]) -> int | None:
    """The cost of an op in its precision; None in the report of an older autoamp."""
    found = row.get("cost_fp32" if row["precision"] == FP32 else "cost_low")
    return found if isinstance(found, int) else None


def _rows(report: Mapping[str, Any]) -> _Rows:
    return {(op["graph"], op["body"], op["name"]): op for op in report["ops"]}


def _key(op: SavedOp) -> _Key:
    return op.graph, op.body, op.name


def _seconds(report: Mapping[str, Any]) -> float | None:
    headline = report.get("headline")
    found = headline.get("seconds") if isinstance(headline, dict) else None
    return found if isinstance(found, float) else None
