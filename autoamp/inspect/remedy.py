"""Finds the options under which a node would be low, by trying them on the graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from autoamp.analyse.pins import kept_by
from autoamp.analyse.verdict import GAVE_UP
from autoamp.inspect.costs import allow_in_fp32
from autoamp.pass_options import PassOptions
from autoamp.rewrite.rewritten import Rewritten
from autoamp.rules import Category

_Change: TypeAlias = tuple[dict[str, Any], list[str]]
"""Options to change, and the words for the change."""


@dataclass(frozen=True)
class Remedy:
    """Options under which the passes make one node low, and their effect.

    Attributes:
        words: the options, written as the present options were: keywords or variables.
        extra: the predicted cost above that of the present placement, without rewards.
        in_bytes: whether the cost is in bytes, not in time.
        along: other nodes that would change precision too, in graph order.
    """

    words: str
    extra: int
    in_bytes: bool
    along: tuple[str, ...]


def remedy_for(rewritten: Rewritten, name: str) -> Remedy | None:
    """The fewest options under which fp32 node `name` is low, or None."""
    verdicts, given = rewritten.classified.verdicts, rewritten.options
    if rewritten.again is None or given is None:
        return None
    given_up = {n: v.reason for n, v in verdicts.items() if v.origin == GAVE_UP}
    for changes, words in candidates(rewritten, given, name):
        try:
            found = rewritten.again(given.replace(**changes), given_up)
        except Exception:  # noqa: BLE001, S112  # options that fail are no remedy
            continue
        low = found.assignment.low
        if name in low:
            changed = rewritten.assignment.low ^ low
            return Remedy(
                words=" and ".join(words),
                extra=_estimate(found) - _estimate(rewritten),
                in_bytes=found.assignment.prices.in_bytes,
                along=tuple(n for n in found.facts.nodes if n in changed - {name}),
            )
    return None


def _estimate(rewritten: Rewritten) -> int:
    """The predicted cost of a placement, without rewards."""
    placed = rewritten.assignment
    return placed.cost - placed.prices.reward * allow_in_fp32(rewritten, placed.low)


def candidates(
    rewritten: Rewritten, options: PassOptions, name: str
) -> Iterator[_Change]:
    """Options to try, the fewest changes first; each with the words for it."""
    fact = rewritten.facts.nodes[name]
    op = fact.base.removeprefix("aten::")
    first: dict[str, Any] = {}  # user options that hold the op in fp32 come off first
    said: list[str] = []
    for option, dropped in (
        ("keep", [k for k in options.keep if kept_by([k], fact.modules)]),
        ("deny", [d for d in options.deny if _op_of(d) == op]),
    ):
        if dropped:
            given = getattr(options, option)
            first[option] = tuple(each for each in given if each not in dropped)
            said.append(f"leaving out {options.advice(option, dropped)}")
    allow = [*options.allow, op]
    named: _Change = {"allow": tuple(allow)}, [options.advice("allow", allow)]
    forced: _Change = {"do_no_harm": False}, [options.advice("do_no_harm", False)]
    allowed = rewritten.classified.verdicts[name].category is Category.ALLOW
    can_allow = bool(op) and not allowed  # `allow=` cannot name a branch or a loop
    steps: list[list[_Change]] = [[]] if first else []
    steps += [[named]] * can_allow
    if options.do_no_harm:
        steps += [[forced]]
        steps += [[named, forced]] * can_allow
    for step in steps:
        changes, words = dict(first), []
        for change, text in step:
            changes |= change
            words += text
        yield changes, words + said


def _op_of(listed: str) -> str:
    """The name of an op that a user listed, without its namespace and overload."""
    return listed.rpartition("::")[2].partition(".")[0]
