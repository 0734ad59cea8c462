"""The ceiling: nothing is computed in less precision than under `torch.autocast`.

Prices decide where casts go, never which values are rounded.  The reference is what
`torch.autocast` of the device that the graph runs on makes of each op, in this order:

1. An op of its list of matrix products is low.
2. An op of its fp32 list computes in fp32 and gives fp32, whatever it reads.  The lists
   differ: norms and softmax are on the list of CUDA, and pools over volumes on that of
   CPUs (`rules/torch-cuda.toml`, `rules/torch-cpu.toml`).
3. Every other op is as wide as its widest operand, so that an op that reads the
   caller's data, a parameter, a buffer or a result in fp32 is fp32, and so are its
   readers until the next allow op.

An op is low only where that reference is.  Below that ceiling placement is free; an op
above the ceiling stays fp32.

Two more kinds of node may be low where every reader of the result would round the
result in any case.  A *move* (a view, a `cat`, a constant): rounding commutes with
moving, so that the numbers are the same to the bit, and one cast before three slices is
cheaper than three casts behind the slices.  A *kernel* that reads nothing but low
values: the kernel computes in fp32 and rounds its result, as the readers would.  It
stands for calls which widen (a GELU written with `pow`), or is an op of the fp32 list
whose backward reads no rounded result (a norm without parameters, on CUDA).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from autoamp.passes.decide.moves import find_moves
from autoamp.passes.decide.verdict import (
    AUTOCAST,
    CEILING,
    PROMOTE,
    Classified,
    Verdict,
)
from autoamp.passes.rules import Category, family


def low_under_autocast(classified: Classified) -> frozenset[str]:
    """Nodes that `torch.autocast` would leave low, on the device of each node.

    Operands that are converted, or that promote nothing, do not count.  A node that is
    pinned to fp32 is not low, unless its result may be rounded.
    """
    low: set[str] = set()
    # In graph order, so that the makers of a node's operands are settled before it.
    for name, verdict in classified.verdicts.items():
        if _gives_fp32(name, classified):
            continue
        if not verdict.pinned or verdict.may_round:
            producer, outside = classified.facts.producer, classified.facts.low_outside
            read = _promoting(name, classified)
            widths = {producer(value) for value in read if value not in outside}
            # Autocast may take a product of ours in the widest dtype of its operands.
            rounds = verdict.category is Category.ALLOW and verdict.autocast is None
            # A node that reads nothing which promotes is made in fp32.
            if rounds or (read and widths <= low):
                low.add(name)
    return frozenset(low)


def _gives_fp32(name: str, classified: Classified) -> bool:
    """Whether the result is fp32 under autocast, whatever the node reads."""
    listed = classified.verdicts[name].autocast is Category.DENY
    return listed or classified.facts.nodes[name].widens


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
        low: the nodes that `low_under_autocast` finds.
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
    low = low_under_autocast(classified)
    kernels = {n for n in classified.verdicts if _rounds_once(n, classified, low)}
    moves = find_moves(gm, classified, kernels)
    verdicts = dict(classified.verdicts)
    for name, verdict in classified.verdicts.items():
        makes_floats = classified.facts.nodes[name].makes_floats
        if verdict.pinned or verdict.asked or name in low or not makes_floats:
            continue
        if name in moves:
            verdicts[name] = replace(verdict, moves=True)
        else:
            verdicts[name] = _held(name, classified, low)
    return replace(classified, verdicts=verdicts)


def _held(name: str, classified: Classified, low: frozenset[str]) -> Verdict:
    """The verdict of a node that autocast leaves fp32, now pinned to fp32."""
    facts, verdict = classified.facts, classified.verdicts[name]
    fact = facts.nodes[name]
    if verdict.autocast is Category.DENY:
        reason = f"torch.autocast on {fact.device} computes it in fp32"
        return replace(verdict, pinned=True, reason=reason, origin=AUTOCAST)
    modes = verdict.modes
    if fact.base in family("promoting"):
        # These kernels widen a low operand as they read it. That is exact, needs no
        # cast, and lets the backward save the low value.
        modes = tuple(
            "any" if mode == "same" and facts.producer(o.value) in low else mode
            for o, mode in classified.reads(name)
        )
    promoting = _promoting(name, classified)
    wide = next((v for v in promoting if facts.producer(v) not in low), None)
    if wide is not None:
        what = "which is fp32"
        if wide in facts.constants:
            what = "a parameter" if wide in facts.parameters else "fp32 from outside"
        reason = f"reads {wide}, {what}: type promotion leaves it fp32"
    elif fact.widens:
        reason = "stands for calls that type promotion leaves fp32, and is read in fp32"
    else:
        reason = "reads nothing low: type promotion leaves it fp32"
    if verdict.origin.endswith("="):  # the user's own list
        reason = f"{verdict.reason}; {reason}"
    return replace(verdict, pinned=True, reason=reason, origin=CEILING, modes=modes)


def _rounds_once(name: str, classified: Classified, low: frozenset[str]) -> bool:
    """Whether a node reads low values, and rounds a result that autocast has in fp32.

    An fp32 parameter that the node's low kernel would read rounded is no low value.
    """
    if not _gives_fp32(name, classified):
        return False
    facts = classified.facts
    fact = facts.nodes[name]
    if not (fact.widens or fact.base in family("rounds_once")):
        return False
    read = [o.value for o, mode in classified.reads(name) if mode in PROMOTE]
    return bool(read) and all(facts.producer(value) in low for value in read)
