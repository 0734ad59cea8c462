"""Ranks tell each other once, at an optimizer's first step, how they run its models.

A rank whose model is not converted, or is converted otherwise, would not answer at the
first agreement: the others would wait, or take another collective for the answer.  The
handshake goes through the store by which the ranks have met, and is no collective.
"""

from __future__ import annotations

import json
import logging
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from autoamp import compat
from autoamp.dtypes import short_name
from autoamp.errors import RankError
from autoamp.training.model_scaling import ModelScaling
from autoamp.training.ranks import Team

logger = logging.getLogger(__name__)

PATIENCE = 300.0
"""Seconds after which a rank that has not answered is taken not to answer at all: half
of the process group's own timeout where that is less."""

_FIRST_WORD = 15.0
"""Seconds after which a rank says for which ranks it waits."""

_PAUSE = 0.01

_GRAPHS = "graphs"
"""What may differ between ranks, with a warning."""

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
    _shaken.add(optimizer)
    store = compat.default_store()
    if store is None:
        return
    ours, mine = _words(team, scalings, params), torch.distributed.get_rank()
    for group in team.groups:
        name = str(group.group_name)
        number = _counts[name] = _counts.get(name, -1) + 1
        ranks = torch.distributed.get_process_group_ranks(group)
        keys = {rank: f"autoamp/{name}/{number}/{rank}" for rank in ranks}
        whose = ours.get("models", "a pipeline's stage")
        try:
            store.set(keys[mine], json.dumps(ours))
            _wait(store, keys, whose)
            words = {r: json.loads(store.get(key)) for r, key in keys.items()}
        except RankError:
            raise
        except RuntimeError as error:  # torch's errors of a store's network, too
            raise _gone(whose, error) from error
        _compare(words, speaks=mine == min(ranks))


def _words(
    team: Team, scalings: Sequence[ModelScaling], params: Sequence[torch.Tensor]
) -> dict[str, str]:
    """How this rank runs its models, in words that ranks compare."""
    each_once = [*dict.fromkeys(scalings)]
    scales = [type(each.domain.loss_scale).__name__ for each in each_once]
    guards = ["on" if each.ledger.guards else "off" for each in each_once]
    words = {"loss scaling": ", ".join(scales), "guard": ", ".join(guards)}
    if not team.staged:
        words["precision"] = ", ".join(map(_precision, each_once))
        words["models"] = ", ".join(each.label for each in each_once)
        words["parameters"] = str(len(params))
        words[_GRAPHS] = ", ".join(each.ledger.graphs for each in each_once)
    return words


def _precision(scaling: ModelScaling) -> str:
    return "the model's own" if scaling.low is None else short_name(scaling.low)


def _gone(whose: str, error: BaseException) -> RankError:
    return RankError(
        f"the ranks cannot compare how they run {whose}, because the store by which "
        f"they met does not answer: {str(error).partition(chr(10))[0]}. The rank that "
        "holds the store, mostly rank 0, has likely died: see what it said last, and "
        "start all ranks again"
    )


def _wait(store: Any, keys: dict[int, str], whose: str) -> None:
    """Waits until each rank has set its key of `keys` in the store."""
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
