"""The bytes that a placement keeps for the backward, value by value.

A value is kept once in each precision in which an op keeps it, however many do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from torch import fx

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE
from autoamp.passes.decide.mincut import Share
from autoamp.passes.decide.verdict import Classified
from autoamp.passes.see.dtensors_as_whole import HELD
from autoamp.passes.see.facts import FP32


def kept_values(
    gm: fx.GraphModule, classified: Classified, low_itemsize: int
) -> tuple[Share, ...]:
    """The bytes kept of each value, by the precisions of the ops that keep it.

    A parameter is in memory in any case, and only its low copy counts.
    """
    facts = classified.facts
    keepers: dict[int, dict[str, None]] = defaultdict(dict)
    shares = []
    for name, kept in facts.kept.items():
        if name not in classified.verdicts:
            continue
        for operand, mode in classified.reads(name):
            if operand.value in kept.operands:
                maker = facts.producer(operand.value)
                keeper = {"same": name, "high": FP32}.get(mode, maker)
                keepers[facts.nodes[operand.value].storage][keeper] = None
        if kept.result:
            keepers[facts.nodes[name].storage][facts.producer(name)] = None
        if kept.inside:
            high, low = (kept.inside * s for s in (HIGH_DTYPE.itemsize, low_itemsize))
            shares.append(Share((name,), low, high))
    weights = {facts.nodes[name].storage for name in facts.parameters}
    sizes: dict[int, int] = {}
    for node in gm.graph.nodes:
        storage = facts.nodes[node.name].storage if node.name in facts.nodes else -1
        if storage in keepers and facts.nodes[node.name].is_value:
            whole = compat.hint(node.meta["val"].untyped_storage().nbytes())
            numbers = round(whole * node.meta.get(HELD, 1.0)) // HIGH_DTYPE.itemsize
            sizes[storage] = max(sizes.get(storage, 0), numbers)
    for storage, numbers in sizes.items():
        high = 0 if storage in weights else numbers * HIGH_DTYPE.itemsize
        members = tuple(keepers[storage])
        shares.append(Share(members, numbers * low_itemsize, high))
    return tuple(shares)


def kept_bytes(kept: Iterable[Share], low: Collection[str]) -> int:
    """The bytes kept where the nodes `low` are low."""
    return sum(each.cost(low.__contains__) for each in kept)
