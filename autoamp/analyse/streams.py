"""Residual streams: running sums that are worth their precision.

A branch that was computed low and is added back to the full-precision value it forked
from is one small update of a long sum.  Rounded to eight bits at every layer the sum
loses the small updates; its error then grows with depth, where torch.autocast's, whose
type promotion keeps such sums in fp32, does not.  So they stay fp32 here as well; norms,
activations and projections beside the stream remain free.

Seen on the two-layer GPT-2 of the tests in bf16: with a low stream the outputs were off
by 1.35 times what torch.autocast's are.
"""

from __future__ import annotations

from collections.abc import Mapping

from autoamp.analyse.facts import Facts
from autoamp.analyse.verdict import Verdict
from autoamp.rules import Category

REASON = (
    "adds a low-precision branch to a full-precision sum that flows on (a residual "
    "stream): rounding the sum would lose small updates"
)


def residual_sums(facts: Facts, verdicts: Mapping[str, Verdict]) -> frozenset[str]:
    """The additions that update a full-precision stream with a low branch."""
    promoted = _promotes_to_low(facts, verdicts)
    computed = _computed_by_allow_ops(facts, verdicts)
    readers = _reader_counts(facts, verdicts)
    found = set()
    for name, verdict in verdicts.items():
        if verdict.pinned or not _is_addition(facts.nodes[name].op):
            continue
        operands = [o.value for o in facts.nodes[name].operands]
        if len(operands) != 2:
            continue
        for stream, branch in (operands, operands[::-1]):
            if (
                facts.producer(branch) in computed
                and facts.producer(stream) not in promoted
                and stream not in facts.weights
                and _forks(stream, facts, verdicts, readers)
            ):
                found.add(name)
    return frozenset(found)


def _is_addition(op: str) -> bool:
    return op.partition(".")[0] in ("aten::add", "aten::add_")


def _promotes_to_low(facts: Facts, verdicts: Mapping[str, Verdict]) -> set[str]:
    """Nodes that type promotion alone (allow ops low) would leave low."""
    low: set[str] = set()
    for name, verdict in verdicts.items():
        makers = [facts.producer(o.value) for o in facts.nodes[name].operands]
        follows = bool(makers) and all(m in low for m in makers)
        if not verdict.pinned and (verdict.category is Category.ALLOW or follows):
            low.add(name)
    return low


def _computed_by_allow_ops(facts: Facts, verdicts: Mapping[str, Verdict]) -> set[str]:
    """Allow ops, and what is made from them by infer and clear ops alone."""
    found: set[str] = set()
    for name, verdict in verdicts.items():
        if verdict.pinned:
            continue
        makers = (facts.producer(o.value) for o in facts.nodes[name].operands)
        if verdict.category is Category.ALLOW or any(m in found for m in makers):
            found.add(name)
    return found


def _reader_counts(facts: Facts, verdicts: Mapping[str, Verdict]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in verdicts:
        for value in {o.value for o in facts.nodes[name].operands}:
            counts[value] = counts.get(value, 0) + 1
    return counts


def _forks(
    value: str,
    facts: Facts,
    verdicts: Mapping[str, Verdict],
    readers: Mapping[str, int],
) -> bool:
    """Whether `value`, or what it is a view or dropout of, is read elsewhere too."""
    while True:
        if readers.get(value, 0) > 1:
            return True
        verdict = verdicts.get(facts.producer(value))
        operands = facts.nodes[facts.producer(value)].operands
        if verdict is None or len(operands) != 1:
            return False
        if verdict.category is not Category.CLEAR:
            return False
        value = operands[0].value
