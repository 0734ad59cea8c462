"""Finds the ranks that step the weights of one optimizer together."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoamp import compat
from autoamp.training.model_scaling import ModelScaling


@dataclass(frozen=True)
class Team:
    """The ranks that step the weights of one optimizer together.

    Attributes:
        groups: their process groups, the same and in the same order on each of them.
        reducers: the instances of DistributedDataParallel that reduce the gradients.
        device: where tensors are that ranks exchange; None where there are no others.
        staged: whether the ranks hold stages of one pipeline, each of its own weights.
    """

    groups: Sequence[Any] = ()
    reducers: Sequence[Any] = ()
    device: torch.device | None = None
    staged: bool = False

    @property
    def is_joining(self) -> bool:
        """Whether some ranks may be out of inputs: these make no steps."""
        return any(map(compat.is_joining, self.reducers))

    @property
    def gradients_tell_more(self) -> bool:
        """Whether the reduction itself may make gradients overflow, in fp16 say."""
        return any(map(_is_hooked, self.reducers))

    def recover(self, flag: torch.Tensor) -> None:
        """Clears an overflow (`flag` is not 0) from communication hooks."""
        hooked = [*filter(_is_hooked, self.reducers)]
        if hooked and bool(flag):
            for each in hooked:
                compat.forget_feedback(each)


ALONE = Team()

_hooked: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _is_hooked(reducer: Any) -> bool:
    """Whether a reducer has a communication hook, which it cannot get after a step."""
    if reducer not in _hooked:
        _hooked[reducer] = compat.has_communication_hook(reducer)
    return _hooked[reducer]


def judged(scalings: Iterable[ModelScaling]) -> list[ModelScaling]:
    """Those of `scalings` for which steps may be skipped, about which ranks agree.

    Whether graphs of a model run low is not asked, because ranks may differ in that.
    """
    return [scaling for scaling in scalings if scaling.enabled or scaling.ledger.guards]


def team_of(scalings: Iterable[ModelScaling], params: Sequence[torch.Tensor]) -> Team:
    """The team of an optimizer that holds `params`, of models with `scalings`."""
    scalings = list(dict.fromkeys(scalings))
    if not scalings or not compat.are_several():
        return ALONE
    reducers = [each for s in scalings for each in s.ledger.reducers]
    groups = [each.process_group for each in reducers]
    groups += compat.shard_groups(params)
    groups += [each for s in scalings for each in s.stage_groups]
    if not groups:
        return ALONE
    weight = next(itertools.chain(params, *(each.parameters() for each in reducers)))
    device = compat.reached_on(groups[0], weight.device)
    staged = any(s.stage_groups for s in scalings)
    return Team([*{id(g): g for g in groups}.values()], reducers, device, staged)


def owners_of(
    params: Sequence[torch.Tensor], scalings: Iterable[ModelScaling]
) -> list[ModelScaling]:
    """Those of `scalings` whose models' weights are among `params` on several ranks.

    Ranks agree on steps of such weights even where this rank's model ran no graph.
    """
    if not compat.are_several():
        return []
    held = set(map(id, params))
    return [s for s in scalings if not held.isdisjoint(map(id, s.weights))]
