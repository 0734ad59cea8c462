"""The ranks that step the weights of one optimizer together, and their handshake.

A rank whose model is not converted, or is converted otherwise, would not answer at the
first agreement: the others would wait, or take another collective for the answer.  So
ranks tell each other once, at an optimizer's first step, how they run its models.  That
goes through the store by which the ranks have met, and is no collective.
"""

from __future__ import annotations

import itertools
import json
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from autoamp import compat
from autoamp.dtypes import short_name
from autoamp.errors import RankError
from autoamp.training.model_scaling import ModelScaling
from autoamp_said import logger_of

logger = logger_of(__name__)

PATIENCE = 300.0
"""Seconds after which a rank that has not answered is taken not to answer at all: half
of the process group's own timeout where that is less."""

_FIRST_WORD = 15.0
"""Seconds after which a rank says for which ranks it waits."""

_PAUSE = 0.01

_GRAPHS = "graphs"
"""The one field that may differ between ranks, with a warning."""


@dataclass(frozen=True)
class Team:
    """The ranks that step the weights of one optimizer together.

    Attributes:
        groups: their process groups, the same and in the same order on each of them.
        exchanging: those of `groups` whose ranks read different gradients.
        reducers: the instances of DistributedDataParallel that reduce the gradients.
        device: where tensors are that ranks exchange; None where there are no others.
        staged: whether the ranks hold stages of one pipeline, each of its own weights.
    """

    groups: Sequence[Any] = ()
    exchanging: Sequence[Any] = ()
    reducers: Sequence[Any] = ()
    device: torch.device | None = None
    staged: bool = False

    @property
    def is_joining(self) -> bool:
        """Whether some ranks may be out of inputs: these make no steps."""
        return any(map(compat.is_joining, self.reducers))

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


_covers: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()


def _covered(reducer: Any) -> frozenset[int]:
    """The `id`s of a reducer's parameters, which it cannot get after a step either."""
    if reducer not in _covers:
        trained = (p for p in reducer.parameters() if p.requires_grad)
        _covers[reducer] = frozenset(map(id, trained))
    return _covers[reducer]


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
    own = compat.shard_groups(params)
    own += [each for s in scalings for each in s.stage_groups]
    covered: frozenset[int] = frozenset().union(*map(_covered, reducers))
    # A weight of the optimizer's that no reducer covers has each rank's own gradient.
    outside = any(p.requires_grad and id(p) not in covered for p in params)
    apart = [r for r in reducers if outside or compat.leaves_out(r)]
    # A rank that is out of inputs shadows the collectives of its reducers, no others.
    apart = [r for r in apart if not compat.is_joining(r)]
    own += [each.process_group for each in apart]
    # Each rank finds the groups in this order, because they reduce one after the other:
    # ranks in two orders would wait for each other.
    groups = [each.process_group for each in reducers] + own
    if not groups:
        return ALONE
    weight = next(itertools.chain(params, *(each.parameters() for each in reducers)))
    device = compat.reached_on(groups[0], weight.device)
    staged = any(s.stage_groups for s in scalings)
    every, exchanging = ([*{id(g): g for g in of}.values()] for of in (groups, own))
    return Team(every, exchanging, reducers, device, staged)


def owners_of(
    params: Sequence[torch.Tensor], scalings: Iterable[ModelScaling]
) -> list[ModelScaling]:
    """Those of `scalings` whose models' weights are among `params` on several ranks.

    Ranks agree on steps of such weights even where this rank's model ran no graph.
    """
    if not compat.are_several():
        return []
    ids = set(map(id, params))
    return [s for s in scalings if not ids.isdisjoint(map(id, s.weights))]


# -- the handshake ---------------------------------------------------------------------

_shaken: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_counts: dict[str, int] = {}


def have_shaken_hands(optimizer: Optimizer) -> bool:
    """Whether the ranks that step the weights of `optimizer` know of each other."""
    return optimizer in _shaken


def shake_hands(
    optimizer: Optimizer,
    team: Team,
    scalings: Sequence[ModelScaling],
    params: Sequence[torch.Tensor],
) -> None:
    """Waits for the ranks of `team`, and compares how they run their models; once.

    Raises:
        RankError: a rank does not answer, or has converted its models otherwise.
    """
    if optimizer in _shaken or not team.groups or team.is_joining:
        return
    # An optimizer shakes hands once, also where that fails: a script that catches the
    # error must not wait five minutes at each step.
    _shaken.add(optimizer)
    store = compat.default_store()
    if store is None:
        return
    ours, mine = _words(team, scalings, params), torch.distributed.get_rank()
    whose = ours.get("models", "a pipeline's stage")
    for group in team.groups:
        name = str(group.group_name)
        # The keys are numbered, since a store keeps the words of an earlier optimizer
        # of the same group.
        number = _counts[name] = _counts.get(name, -1) + 1
        ranks = torch.distributed.get_process_group_ranks(group)
        keys = {rank: f"autoamp/{name}/{number}/{rank}" for rank in ranks}
        try:
            store.set(keys[mine], json.dumps(ours))
            _wait(store, keys, whose)
            words = {r: json.loads(store.get(key)) for r, key in keys.items()}
        except RankError:
            raise
        except RuntimeError as error:  # torch's errors of a store's network, too
            raise RankError(
                f"the ranks cannot compare how they run {whose}, because the store by "
                f"which they met does not answer: {str(error).partition(chr(10))[0]}. "
                "The rank that holds the store, mostly rank 0, has likely died: see "
                "what it said last, and start all ranks again"
            ) from error
        _compare(words, speaks=mine == min(ranks))


def _words(
    team: Team, scalings: Sequence[ModelScaling], params: Sequence[torch.Tensor]
) -> dict[str, str]:
    """A description of this rank's models, field by field, for the handshake."""
    models = [*dict.fromkeys(scalings)]

    def listed(words: Iterable[str]) -> str:
        return ", ".join(words)

    words = {
        "loss scaling": listed(type(s.own_scale).__name__ for s in models),
        "guard": listed("on" if s.ledger.guards else "off" for s in models),
    }
    # Stages of a pipeline are different models, each with its own parameters.
    if not team.staged:
        own = "the model's own"
        words["precision"] = listed(short_name(s.low) if s.low else own for s in models)
        words["models"] = listed(s.label for s in models)
        words["parameters"] = str(len(params))
        words[_GRAPHS] = listed(s.ledger.graphs for s in models)
    return words


def _wait(store: Any, keys: dict[int, str], whose: str) -> None:
    """Waits until each rank has set its key of `keys` in the store."""
    # The process group's own timeout must not come first: its message names no rank and
    # no model.
    patience = min(PATIENCE, store.timeout.total_seconds() / 2)
    start, said, waiting = time.monotonic(), False, dict(keys)
    while True:
        waiting = {r: key for r, key in waiting.items() if not store.check([key])}
        if not waiting:
            return
        waited, names = time.monotonic() - start, ", ".join(map(str, waiting))
        if waited > patience:
            raise RankError(
                f"rank {names} has not stepped its converted {whose} {patience:.0f} s "
                "after this rank's first step. Convert the model on every rank, with "
                "the same options; if they all have, see whether the rank has died"
            )
        if waited > _FIRST_WORD and not said:
            said = True
            logger.warning(
                "autoamp: the first step of the optimizer of %s waits for rank %s: a "
                "rank that has not converted its model never answers",
                whose,
                names,
            )
        time.sleep(_PAUSE)


def _compare(words: dict[int, dict[str, str]], *, speaks: bool) -> None:
    """Compares the descriptions that ranks give of themselves.

    Args:
        speaks: whether this rank is the one that warns.
    """
    for field in dict.fromkeys(name for each in words.values() for name in each):
        ranks: dict[str, list[str]] = {}
        for rank, each in words.items():
            ranks.setdefault(each.get(field, "unknown"), []).append(str(rank))
        if len(ranks) == 1:
            continue
        text = "; ".join(f"{v} on rank {', '.join(r[:8])}" for v, r in ranks.items())
        if field != _GRAPHS:
            raise RankError(
                f"the ranks have converted their models otherwise: {field}: {text}. "
                "Convert the same model, with the same options, on every rank"
            )
        if speaks:
            logger.warning(
                "autoamp: the ranks run other graphs, because their inputs differ in "
                "shape, or their programs do: %s",
                text,
            )
