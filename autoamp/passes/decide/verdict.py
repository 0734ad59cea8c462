"""The verdict on one node: the outcome of classification."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from autoamp.passes.rules import Category
from autoamp.passes.see.facts import Facts, NodeFacts, Operand

Mode = Literal["same", "high", "any", "follow"]
"""The precision in which a node reads an operand.

"same" is the node's own precision; "high" is always fp32; "any" is the operand as it
comes; "follow" is the producer's precision (an up-cast is exact, a down-cast is
forbidden)."""

PROMOTE = frozenset({"same", "follow"})
"""Modes of the operands that take part in type promotion."""

GAVE_UP = "a failed check"
"""The origin of verdicts on nodes that a failed check keeps in fp32."""

AUTHOR = "its author"
"""The origin of verdicts that the author of a custom op or Function asked for."""

CEILING = "type promotion"
"""The origin of verdicts on nodes that type promotion leaves fp32."""

AUTOCAST = "torch.autocast"
"""The origin of verdicts on nodes that are on the fp32 list of `torch.autocast`."""

BACKWARD = "the backward"
"""The origin of verdicts on nodes that are fp32 for their backward's sake alone."""


@dataclass(frozen=True)
class Verdict:
    """Whether one node may be low, and in which precision it reads its operands.

    Attributes:
        category: allow, deny, infer or clear.
        reason: why, for a person.
        origin: the rules file, user list or part of the pass behind the verdict.
        pinned: whether the node must stay fp32.
        modes: the mode of each operand in the node's facts, in the same order.
        moves: whether the node may be low only where all readers of its result are
            low, and so would round the result in any case.
        listed: whether any rule knows the op.
        may_round: whether the node is pinned only for how it computes: its result may
            be rounded as type promotion decides, and widens nothing.
        asked: whether the author of the call, or the body that it runs, asks for the
            compute dtype, so that no price decides.
        fp32_results: whether a call that is asked to be low gives fp32 all the same.
        autocast: the list of `torch.autocast` on the node's device that binds the call:
            deny where autocast computes it in fp32, infer where it takes the widest
            dtype of the operands; None where type promotion decides.
    """

    category: Category
    reason: str
    origin: str
    pinned: bool
    modes: tuple[Mode, ...]
    moves: bool = False
    listed: bool = True
    may_round: bool = False
    asked: bool = False
    fp32_results: bool = False
    autocast: Category | None = None


def all_of(mode: Mode, fact: NodeFacts) -> tuple[Mode, ...]:
    """The same mode for every operand of a node."""
    return (mode,) * len(fact.operands)


@dataclass(frozen=True)
class Classified:
    """The facts of a graph, and a verdict for each node that reads or makes fp32.

    Attributes:
        facts: the facts of every node.
        verdicts: node to verdict, in graph order.
        extreme: the values whose casts must saturate.
    """

    facts: Facts
    verdicts: Mapping[str, Verdict]
    extreme: frozenset[str] = frozenset()

    @property
    def pinned(self) -> frozenset[str]:
        """The nodes that must stay fp32."""
        return frozenset(n for n, v in self.verdicts.items() if v.pinned)

    @property
    def promoted(self) -> frozenset[str]:
        """The nodes left to type promotion, which may widen their operands."""
        return frozenset(n for n, v in self.verdicts.items() if v.origin == CEILING)

    def is_allowed(self, name: str) -> bool:
        """Whether a node's category is allow, pinned or not."""
        verdict = self.verdicts.get(name)
        return verdict is not None and verdict.category is Category.ALLOW

    def moves(self, name: str) -> bool:
        """Whether a node is a move, which may be low for low readers alone."""
        return name in self.verdicts and self.verdicts[name].moves

    def reads(self, name: str) -> Iterator[tuple[Operand, Mode]]:
        """Each fp32 operand of a node, with the precision in which it is read."""
        operands = self.facts.nodes[name].operands
        return zip(operands, self.verdicts[name].modes, strict=True)
