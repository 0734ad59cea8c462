"""Values that are worth their precision for what surrounds them.

Chiefly residual streams: running sums.

A branch that was computed low and is added back to the full-precision value it forked
from is one small update of a long sum.  Rounded to eight bits at every layer the sum
loses the small updates; its error then grows with depth, where torch.autocast's, whose
type promotion keeps such sums in fp32, does not.  So they stay fp32 here as well; what
is beside the stream (norms, activations, projections) remains free.

Seen on the two-layer GPT-2 of the tests in bf16: with a low stream the outputs were off
by 1.35 times what torch.autocast's are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoamp.analyse.facts import Facts, NodeFacts
from autoamp.analyse.verdict import Verdict
from autoamp.ops import is_pointwise, overloads
from autoamp.rules import Category

RESIDUAL = (
    "adds a low-precision branch to a full-precision sum that flows on (a residual "
    "stream): rounding the sum would lose small updates"
)
BEGINNING = (
    "makes a full-precision value that low-precision branches are added to (a residual "
    "stream): rounded here, it would be so in every later layer"
)
REPEATED_NORM = (
    "normalises what is normalised already: its gradient is a small difference, which "
    "rounding would drown"
)
OF_WEIGHTS = "computed from weights alone: it is cast once, when it is ready"

_NORMS = frozenset(
    f"aten::{name}"
    for name in ("layer_norm", "rms_norm", "group_norm", "instance_norm", "batch_norm")
)


@dataclass(frozen=True)
class Precious:
    """What a graph has of such values.

    Attributes:
        reasons: infer ops whose result is worth fp32 for what surrounds them, and why.
        streams: values of residual streams: nothing bounds what they add up to.
    """

    reasons: Mapping[str, str]
    streams: frozenset[str]


def precious(facts: Facts, verdicts: Mapping[str, Verdict]) -> Precious:
    """What is worth its precision in a graph, under the verdicts so far."""
    promoted = promotes_to_low(facts, verdicts)
    sums, streams = _residual_streams(facts, verdicts, promoted)
    beginnings = _beginnings(streams, facts, verdicts, promoted)
    reasons = dict.fromkeys(_of_weights(facts, verdicts), OF_WEIGHTS)
    reasons |= dict.fromkeys(_repeated_norms(facts, verdicts), REPEATED_NORM)
    reasons |= dict.fromkeys(beginnings, BEGINNING) | dict.fromkeys(sums, RESIDUAL)
    return Precious(reasons, frozenset([*sums, *streams]))


def _of_weights(facts: Facts, verdicts: Mapping[str, Verdict]) -> set[str]:
    """Arithmetic on weights (weight_norm, scaled or merged weights), views aside."""
    derived = set(facts.weights)
    found: set[str] = set()
    for name, verdict in verdicts.items():
        fact = facts.nodes[name]
        makers = {facts.producer(o.value) for o in fact.operands}
        if not makers or not makers <= derived or fact.reads_others:
            continue
        derived.add(name)
        if verdict.category is Category.INFER and not verdict.pinned:
            found.add(name)
    return found


def _repeated_norms(facts: Facts, verdicts: Mapping[str, Verdict]) -> set[str]:
    """Norms that read another norm's result, with nothing but moves in between.

    Seen on `nn.Transformer`, whose encoder ends in two: with both low in bf16 its
    gradients were off by 1.5 times what torch.autocast's are.
    """
    found: set[str] = set()
    for name, verdict in verdicts.items():
        asked = verdict.category is Category.ALLOW  # the user moved it there
        is_norm = facts.nodes[name].op.partition(".")[0] in _NORMS
        if verdict.pinned or asked or not is_norm:
            continue
        maker = facts.producer(facts.nodes[name].operands[0].value)
        while maker in verdicts and _only_moves(facts.nodes[maker].op, verdicts[maker]):
            maker = facts.producer(facts.nodes[maker].operands[0].value)
        if maker in verdicts and facts.nodes[maker].op.partition(".")[0] in _NORMS:
            found.add(name)
    return found


def _only_moves(op: str, verdict: Verdict) -> bool:
    """Whether what is normalised still is so; after a relu it is not."""
    return "dropout" in op or (
        verdict.category is Category.CLEAR
        and len(verdict.modes) == 1
        and not any(is_pointwise(overload) for overload in overloads(op))
    )


def _residual_streams(
    facts: Facts, verdicts: Mapping[str, Verdict], promoted: set[str]
) -> tuple[set[str], list[str]]:
    """The additions of a low branch to a full-precision stream, and those streams."""
    computed = _computed_by_allow_ops(facts, verdicts)
    readers = _reader_counts(facts, verdicts)
    sums: set[str] = set()
    streams: list[str] = []
    for name, verdict in verdicts.items():
        asked = verdict.category is Category.ALLOW  # the user moved it there
        if verdict.pinned or asked or not _is_addition(facts.nodes[name].op):
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
                sums.add(name)
                streams.append(stream)
    return sums, streams


def _beginnings(
    streams: list[str],
    facts: Facts,
    verdicts: Mapping[str, Verdict],
    promoted: set[str],
) -> set[str]:
    """Ops above streams that make their first value.

    Embeddings, additions (positions to embeddings), what joins them to others (a class
    token to patches), and the norms of a network whose sums flow on normalised.  Not
    where type promotion would leave them low, as what follows a product alone.

    Seen on the two-layer BART of the zoo in bf16 inference, where low weights cost
    nothing: its outputs were off by 5.9 times what torch.autocast's are.
    """
    found: set[str] = set()
    seen: set[str] = set()
    frontier = list(streams)
    while frontier:
        maker = facts.producer(frontier.pop())
        verdict = verdicts.get(maker)
        if verdict is None or verdict.pinned or maker in promoted or maker in seen:
            continue
        seen.add(maker)
        fact = facts.nodes[maker]
        data = [o.value for o in fact.operands]
        if fact.op.partition(".")[0] in _NORMS:
            data = data[:1]
        elif verdict.category is Category.CLEAR or "dropout" in fact.op:
            if len(data) == 1 and data[0] not in facts.weights:
                frontier += data
                continue
        elif not _is_addition(fact.op):
            continue
        if verdict.category is not Category.ALLOW:  # where the user moved it
            found.add(maker)
        frontier += data
    return found


def _is_addition(op: str) -> bool:
    return op.partition(".")[0] in ("aten::add", "aten::add_")


def promotes_to_low(facts: Facts, verdicts: Mapping[str, Verdict]) -> set[str]:
    """Nodes that type promotion, allow ops being low, would leave low.

    An op is as wide as its widest operand; a norm as wide as its data, whatever its
    parameters.  Operands that are converted or that promote nothing do not count.
    """
    low: set[str] = set()
    for name, verdict in verdicts.items():
        fact = facts.nodes[name]
        by_data = fact.op.partition(".")[0] in _NORMS
        makers = [
            facts.producer(o.value)
            for o, mode in zip(fact.operands, verdict.modes, strict=True)
            if mode in ("same", "follow")
            and not (by_data and o.value in facts.constants)
        ]
        follows = bool(makers) and all(m in low for m in makers)
        if not verdict.pinned and (verdict.category is Category.ALLOW or follows):
            low.add(name)
    return low


def _computed_by_allow_ops(facts: Facts, verdicts: Mapping[str, Verdict]) -> set[str]:
    """Allow ops, and what is made from them by infer and clear ops alone."""
    found: set[str] = set()
    for name, verdict in verdicts.items():
        if _widens(facts.nodes[name]):
            found.add(name)
        if verdict.pinned:
            continue
        makers = (facts.producer(o.value) for o in facts.nodes[name].operands)
        if verdict.category is Category.ALLOW or any(m in found for m in makers):
            found.add(name)
    return found


def _widens(fact: NodeFacts) -> bool:
    """Whether it is a cast of a low value to fp32, the model's or an earlier pass's."""
    is_cast = fact.op.partition(".")[0] in ("aten::to", "aten::_to_copy")
    return is_cast and fact.mixes_floats and fact.makes_floats


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
