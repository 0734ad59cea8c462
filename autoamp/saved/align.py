"""Pairs the ops and graphs of two reports that stand for the same op or graph.

Names are unreliable: an op inserted early turns every later `add_3` into `add_4`.  So
ops are aligned as sequences, like the lines of two versions of a file.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from difflib import SequenceMatcher

from autoamp.saved.document import SavedGraph, SavedOp

ALIKE = 0.5
"""The least share of common ops at which two graphs may be versions of one graph."""

_KEYS: tuple[Callable[[SavedOp], Hashable], ...] = (
    lambda op: (op.op, op.module, op.code),
    lambda op: (op.op, op.module),
    lambda op: (op.op, op.name),
    lambda op: op.op,
)
"""The signs that two ops are the same op, from the surest to the weakest."""

_Pair = tuple[SavedOp, SavedOp]


def paired_ops(
    old: Sequence[SavedOp], new: Sequence[SavedOp]
) -> Iterator[tuple[SavedOp | None, SavedOp | None]]:
    """Every op of either side once, with its counterpart or None, in graph order.

    Names count only where code and modules decide nothing: an op that was inserted
    early may have taken the name of a later op of its kind.
    """
    yield from _aligned(old, new, _KEYS)


def paired_graphs(
    old: Sequence[SavedGraph], new: Sequence[SavedGraph]
) -> Iterator[tuple[SavedGraph | None, SavedGraph | None]]:
    """Every graph of either side once, with its counterpart or None.

    A graph is paired with the graph of the same key if the two are alike, else with the
    graph that is most alike, else with None.
    """
    by_key = {graph.key: graph for graph in new}
    partner: dict[str, SavedGraph] = {}
    for graph in old:
        same = by_key.get(graph.key)
        if same is not None and likeness(graph, same) >= ALIKE:
            partner[graph.key] = by_key.pop(graph.key)
    for graph in old:
        if graph.key in partner or not by_key:
            continue
        best = max(by_key.values(), key=lambda each: likeness(graph, each))
        if likeness(graph, best) >= ALIKE:
            partner[graph.key] = by_key.pop(best.key)
    yield from ((graph, partner.get(graph.key)) for graph in old)
    yield from ((None, graph) for graph in new if graph.key in by_key)


def likeness(old: SavedGraph, new: SavedGraph) -> float:
    """The share of ops, 0 to 1, that have the same op and module on both sides."""
    most = max(len(old.ops), len(new.ops))
    if not most:
        return 1.0
    ours, theirs = (Counter((op.op, op.module) for op in g.ops) for g in (old, new))
    return (ours & theirs).total() / most


def _aligned(
    old: Sequence[SavedOp],
    new: Sequence[SavedOp],
    keys: Sequence[Callable[[SavedOp], Hashable]],
) -> Iterator[tuple[SavedOp | None, SavedOp | None]]:
    """Aligns ops by the first key, and the ops between the matches by later keys."""
    if not (keys and old and new):
        yield from ((op, None) for op in old)
        yield from ((None, op) for op in new)
        return
    at_old = at_new = 0
    for start_old, start_new, length in _blocks(
        [keys[0](op) for op in old], [keys[0](op) for op in new]
    ):
        yield from _aligned(old[at_old:start_old], new[at_new:start_new], keys[1:])
        at_old, at_new = start_old + length, start_new + length
        yield from zip(old[start_old:at_old], new[start_new:at_new], strict=True)


def _blocks(
    old: Sequence[Hashable], new: Sequence[Hashable]
) -> Iterator[tuple[int, int, int]]:
    """Runs that both sides share, as (start, start, length); the last is empty.

    The common beginning and end are found first, because `SequenceMatcher` needs
    quadratic time for keys that repeat, as in an unrolled loop.
    """
    head = _common(old, new)
    tail = _common(old[head:][::-1], new[head:][::-1])
    yield 0, 0, head
    matcher = SequenceMatcher(
        None, old[head : len(old) - tail], new[head : len(new) - tail], autojunk=False
    )
    for a, b, length in matcher.get_matching_blocks():
        yield a + head, b + head, length
    yield len(old) - tail, len(new) - tail, tail


def _common(old: Sequence[Hashable], new: Sequence[Hashable]) -> int:
    """The length of the common beginning."""
    pairs = zip(old, new, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
