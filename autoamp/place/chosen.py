"""A placement that was chosen before the graph was captured, by the place of its ops.

The names of nodes are those of one capture.  An op is known again in another capture of
the same model by its module, its name, and its number among the equal ops there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autoamp.analyse.classified import Classified


class OpKey(NamedTuple):
    """One op of a model, in any capture of it.

    Attributes:
        module: the module path.
        op: the op without its overload ("aten::linear").
        number: how many equal ops of the module stand before it in the graph.
    """

    module: str
    op: str
    number: int


@dataclass(frozen=True)
class Chosen:
    """The ops that are to be low, of all ops that a choice was made for.

    Attributes:
        low: the ops that are low wherever that is legal.
        known: the ops that the choice was made for; any other op stays fp32.
        below_ceiling: whether ops that type promotion leaves fp32 may be low.
        reasons: why an op that may be low is fp32, or why it is low; a sentence.
        frontier: what the choice was made from, for the report.  It counts when choices
            are compared: a record of a graph holds it, and conversions with equal
            options share records.
    """

    low: frozenset[OpKey]
    known: frozenset[OpKey]
    below_ceiling: bool = False
    reasons: Mapping[OpKey, str] = field(default_factory=dict, hash=False)
    frontier: Any = field(default=None, hash=False)

    def nodes(self, classified: Classified) -> frozenset[str]:
        """The nodes of a graph that are to be low."""
        keys = keys_of(classified)
        return frozenset(name for name, key in keys.items() if key in self.low)

    def reason(self, key: OpKey) -> str:
        """Why an op is low, or is fp32."""
        if key in self.reasons:
            return self.reasons[key]
        if key in self.known:
            return ""
        return (
            "no batch of calibrate_on= ran it, or no derivative reaches it: its error "
            "is not known"
        )


def keys_of(classified: Classified) -> dict[str, OpKey]:
    """The key of each op of a graph, by the name of its node."""
    seen: Counter[tuple[str, str]] = Counter()
    found = {}
    for name in classified.verdicts:
        fact = classified.facts.nodes[name]
        place = fact.module, fact.base
        found[name] = OpKey(*place, seen[place])
        seen[place] += 1
    return found
