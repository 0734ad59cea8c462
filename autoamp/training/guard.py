"""The guard: finds the models for whose sake an optimizer's gradients must be finite.

The gradients themselves are looked at, once, at the step: code of the script's may have
changed them since the graph gave them.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from autoamp import compat
from autoamp.messages import log_once
from autoamp.training.model_scaling import ModelScaling
from autoamp.training.options import Options
from autoamp_said import logger_of

logger = logger_of(__name__)

# NOTE: two looks at a gradient.
#
# The kernel that unscales a gradient at the edge of a graph looks at it in the same
# pass over memory, and its flag moves the loss scale.  That flag cannot decide a step:
# gradients of code outside of graphs pass no edge, and a script may zero or replace a
# gradient that has overflowed.  So a step reads the gradients that it is given.  From
# that look `clip_grad_value_` would hide an infinity, which it clamps to its limit: the
# edge hands an infinity on as NaN, which a clamp leaves as it is.

_guards: weakref.WeakSet[ModelScaling] = weakref.WeakSet()
_changes = [0]
"""The number of changes of `_guards` so far."""

_Known = tuple[tuple[int, ...], list[weakref.ref[ModelScaling]]]
_known: weakref.WeakKeyDictionary[Optimizer, _Known] = weakref.WeakKeyDictionary()


def begin(scaling: ModelScaling, options: Options) -> None:
    """Lets `scaling` guard steps where the user wants that, or has a loss scale."""
    end(scaling)
    _changes[0] += 1  # a model that is converted anew has left its old scaling
    scaling.ledger.guards = options.guard
    if options.guard or scaling.enabled:
        _guards.add(scaling)


def end(scaling: ModelScaling) -> None:
    """Has `scaling` guard no step any more."""
    if scaling in _guards:
        scaling.ledger.guards = False
        _guards.discard(scaling)
        _changes[0] += 1


def is_guarded(scaling: ModelScaling) -> bool:
    """Whether gradients must be finite for the sake of a model that has been met.

    A model of which nothing runs low counts only where it has a loss scale, or among
    several ranks: another rank's graphs may run low, and all ranks are to agree on a
    step.
    """
    ledger = scaling.ledger
    low = ledger.guards and (ledger.runs_low or compat.are_several())
    return low or scaling.enabled


def cannot_read(optimizer: Optimizer) -> bool:
    """Whether a CUDA graph is being captured whose steps no flag can stop.

    The host cannot read a flag then, and only a fused optimizer's kernel reads one.
    """
    groups = [g for g in optimizer.param_groups if g["params"]]
    if not groups or not compat.is_capturing(groups[0]["params"][0].device):
        return False
    fused = all(g.get("fused") for g in groups)
    if not fused:
        log_once(
            logger,
            logging.WARNING,
            f"autoamp: a CUDA graph captures the step of {type(optimizer).__name__}, "
            "which cannot be skipped when it is replayed: a gradient that is not "
            "finite will be written. fused=True makes an optimizer whose kernel can "
            "skip its step",
        )
    return not fused


def guards_of(
    optimizer: Optimizer, params: Sequence[torch.Tensor]
) -> list[ModelScaling]:
    """The models with a guard whose weights, or trained inputs, are among `params`."""
    if not _guards:
        return []
    # A search through the weights of all models at each step would cost more than the
    # guard's own check: it is made again only where a model, a weight of a model or a
    # parameter of the optimizer is new.
    stamp = (
        _changes[0],
        sum(scaling.ledger.learnt for scaling in _guards),
        hash(tuple(map(id, params))),
    )
    cached = _known.get(optimizer)
    if cached is None or cached[0] != stamp:
        guards = [weakref.ref(s) for s in _guards if _trains(s, params)]
        cached = _known[optimizer] = stamp, guards
    alive = [s for s in (ref() for ref in cached[1]) if s is not None]
    return [scaling for scaling in alive if is_guarded(scaling)]


def _trains(scaling: ModelScaling, params: Sequence[torch.Tensor]) -> bool:
    by_id = {id(p): p for p in params}
    if scaling.find_models is not None and not scaling.models:
        return False  # the models were converted anew, or are gone
    if any(leaves.are_among(by_id) for leaves in scaling.ledger.leaves):
        return True
    return not by_id.keys().isdisjoint(map(id, scaling.weights))
