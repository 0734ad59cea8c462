"""What one node may do: the outcome of classification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autoamp.analyse.facts import NodeFacts
from autoamp.rules import Category

Mode = Literal["same", "high", "any", "follow"]
"""What an operand needs: the node's own precision; fp32 always; anything, as it comes;
or the producer's own precision (an up-cast is exact, a down-cast is forbidden)."""


GAVE_UP = "a failed check"
"""The origin of verdicts on nodes that a failed check keeps in fp32."""


BACKWARD = "the backward"
"""The origin of verdicts on nodes that are fp32 for their backward's sake alone."""


@dataclass(frozen=True)
class Verdict:
    """What one node may do.

    Attributes:
        category: allow, deny, infer or clear.
        reason: why, for a person.
        origin: which rules file, user list or part of the pass says so.
        pinned: whether the node must stay fp32.
        modes: what each operand of its facts needs, in the same order.
        moves: it may be low only where all that read its result are, which would round
            it in any case.
        listed: whether any rule knows the op.
        may_round: pinned, but for how it computes alone: its result may be rounded as
            type promotion has it, and widens nothing.
    """

    category: Category
    reason: str
    origin: str
    pinned: bool
    modes: tuple[Mode, ...]
    moves: bool = False
    listed: bool = True
    may_round: bool = False


def all_of(mode: Mode, fact: NodeFacts) -> tuple[Mode, ...]:
    """The same mode for every operand of a node."""
    return (mode,) * len(fact.operands)
