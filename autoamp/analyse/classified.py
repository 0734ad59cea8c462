"""A classified graph: the facts and the verdict of each node, and questions on both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autoamp.analyse.facts import Facts, Operand
from autoamp.analyse.verdict import CEILING, Mode, Verdict
from autoamp.rules import Category


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
