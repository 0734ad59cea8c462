"""The ceiling: nothing is computed in less precision than type promotion leaves.

Prices decide where casts go, never which values are rounded.  With the allow ops low,
type promotion settles the other ops as `torch.autocast` does: an op is as wide as its
widest operand, so an op that reads the caller's data, a parameter, a buffer or the
result of a denied op is fp32, and so are its readers until the next allow op.  Below
that ceiling placement is free; an op above the ceiling stays fp32.

Two more kinds of node may be low where every reader of the result would round the
result in any case.  A *move* (a view, a `cat`, a constant): rounding commutes with
moving, so that the numbers are the same to the bit, and one cast before three slices is
cheaper than three casts behind the slices.  A *kernel* that stands for calls which
widen (a GELU written with `pow`) and that reads low values: the kernel computes in fp32
and rounds its result, as the readers of the calls' result would.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from autoamp.passes.decide.moves import find_moves
from autoamp.passes.decide.verdict import CEILING, PROMOTE, Classified, Verdict
from autoamp.passes.rules import Category, family


def promotes_to_low(classified: Classified) -> frozenset[str]:
    """Nodes that type promotion would leave low if every allow op were low.

    Operands that are converted, or that promote nothing, do not count.  A node that is
    pinned to fp32 is not low, unless its result may be rounded.
    """
    low: set[str] = set()
    # In graph order, so that the makers of a node's operands are settled before it.
    for name, verdict in classified.verdicts.items():
        if classified.facts.nodes[name].widens:
            continue
        if not verdict.pinned or verdict.may_round:
            producer = classified.facts.producer
            widths = {producer(value) for value in _promoting(name, classified)}
            # A node that reads nothing which promotes is made in fp32.
            if verdict.category is Category.ALLOW or (widths and widths <= low):
                low.add(name)
    return frozenset(low)


def _promoting(name: str, classified: Classified) -> list[str]:
    """The values that decide how wide a node's result is."""
    fact = classified.facts.nodes[name]
    base = fact.base
    if base in family("factory", "noise"):  # `zeros_like` has its operand's dtype
        return [fact.typed_as] if fact.typed_as else [o.value for o in fact.operands]
    read = [*classified.reads(name)]
    # A tensor that is written to keeps its dtype.
    # `aten::__and__` is an operator and writes nothing.
    writes = base.endswith("_") and not base.endswith("__")
    if writes or base in family("as_wide_as_its_data"):
        read = read[:1]
    return [o.value for o, mode in read if mode in PROMOTE]


@dataclass(frozen=True)
class Root:
    """The cause for which type promotion leaves a node fp32.

    Attributes:
        reader: the first node that is fp32 because of `source`; "" where none is.
        source: the value or node that is fp32 for a reason of its own.
        path: the nodes through which it reaches the node asked for, in graph order.
    """

    reader: str
    source: str
    path: tuple[str, ...]


def root_of(name: str, classified: Classified, low: frozenset[str]) -> Root:
    """The cause for which node `name` is fp32, at the start of a chain of fp32 nodes.

    Args:
        low: the nodes that `promotes_to_low` finds.
    """
    producer, verdicts = classified.facts.producer, classified.verdicts
    path = [name]
    while True:
        values = _promoting(path[0], classified)
        wide = next((v for v in values if producer(v) not in low), None)
        if wide is None:  # made from nothing, or a kernel that widens
            return Root("", path[0], tuple(path[1:-1]))
        maker = producer(wide)
        verdict = verdicts.get(maker)
        passes_on = verdict is not None and (
            not verdict.pinned or verdict.may_round or verdict.origin == CEILING
        )
        if not passes_on:
            if wide in classified.facts.constants:
                return Root(path[0], wide, tuple(path[1:-1]))
            source = classified.facts.element_of.get(wide, wide)
            return Root(path[0], source, tuple(path[:-1]))
        path.insert(0, maker)


def under_ceiling(gm: fx.GraphModule, classified: Classified) -> Classified:
    """The same graph, with nodes above the ceiling pinned or marked as moves."""
    low = promotes_to_low(classified)
    facts = classified.facts
    kernels = {
        name
        for name in classified.verdicts
        if facts.nodes[name].widens
        and (values := _promoting(name, classified))
        and all(facts.producer(value) in low for value in values)
    }
    moves = find_moves(gm, classified, kernels)
    found = dict(classified.verdicts)
    for name, verdict in classified.verdicts.items():
        makes_floats = classified.facts.nodes[name].makes_floats
        if verdict.pinned or name in low or not makes_floats:
            continue
        if name in moves:
            found[name] = replace(verdict, moves=True)
        else:
            found[name] = _held(name, classified, low)
    return replace(classified, verdicts=found)


def _held(name: str, classified: Classified, low: frozenset[str]) -> Verdict:
    """The verdict of a node that type promotion leaves fp32, now pinned to fp32."""
    facts, verdict = classified.facts, classified.verdicts[name]
    modes = verdict.modes
    if facts.nodes[name].base in family("promoting"):
        # These kernels widen a low operand as they read it. That is exact, needs no
        # cast, and lets the backward save the low value.
        modes = tuple(
            "any" if mode == "same" and facts.producer(o.value) in low else mode
            for o, mode in classified.reads(name)
        )
    reason = _reason(name, classified, low)
    if verdict.origin.endswith("="):  # the user's own list
        reason = f"{verdict.reason}; {reason}"
    return replace(verdict, pinned=True, reason=reason, origin=CEILING, modes=modes)


def _reason(name: str, classified: Classified, low: frozenset[str]) -> str:
    facts, promoting = classified.facts, _promoting(name, classified)
    wide = next((v for v in promoting if facts.producer(v) not in low), None)
    if wide is None and facts.nodes[name].widens:
        return "stands for calls that type promotion leaves fp32, and is read in fp32"
    if wide is None:
        return "reads nothing low: type promotion leaves it fp32"
    what = "which is fp32"
    if wide in facts.constants:
        what = "a parameter" if wide in facts.parameters else "fp32 from outside"
    return f"reads {wide}, {what}: type promotion leaves it fp32"
