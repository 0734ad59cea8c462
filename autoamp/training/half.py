"""Half-precision weights whose optimizer nobody named: they get masters all the same.

The automatic mode asks at the first step of each optimizer, when all that a script does
to its weights before has been done: casts, checkpoints, wrappers.
"""

from __future__ import annotations

import logging
import weakref

import torch
from torch.optim import Optimizer

from autoamp import compat
from autoamp.dtypes import short_name
from autoamp.messages import bytes_text, class_name, counted
from autoamp.training.boundary import params_of
from autoamp.training.masters import Masters
from autoamp.training.options import Options
from autoamp_heat import trains_half

logger = logging.getLogger(__name__)

_declined: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers whose weights are to have no masters, or cannot have any."""


def decline(optimizer: Optimizer) -> None:
    """Has the weights of `optimizer` get no masters, unless `convert` gives them."""
    _declined.add(optimizer)


def wants_masters(optimizer: Optimizer) -> bool:
    """Whether an optimizer trains half-precision weights, and none was declined."""
    return trains_half(optimizer) and optimizer not in _declined


def masters_for(optimizer: Optimizer) -> Masters:
    """The masters of an optimizer that nobody named.

    They are saved by the names that the outermost modules have for the weights.
    """
    params = params_of(optimizer)
    masters = Masters(optimizer)
    try:
        models = compat.models_of_weights(params)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            # A model that was not found may be inside DistributedDataParallel.
            found = {id(p) for model in models for p in model.parameters()}
            masters.keep_half(p for p in params if id(p) not in found)
        masters.name_after(*models)
    except BaseException:
        masters.release()
        raise
    return masters


def say_made(masters: Masters, options: Options) -> None:
    """Says which weights have masters from now on, and what the masters cost."""
    if not masters.of:
        return
    dtypes = sorted({short_name(p.dtype) for p in masters.of})
    logger.info(
        "autoamp: %s updates fp32 masters of %s in %s from now on, so that no small "
        "update is rounded away. The masters take %s, and the gradients and the state "
        "of the optimizer are fp32 too; %s does without",
        class_name(masters.optimizer),
        counted(len(masters.of), "weight"),
        " and ".join(dtypes),
        bytes_text(masters.bytes),
        options.advice("masters", "off"),
    )


def say_failed(optimizer: Optimizer, error: Exception, options: Options) -> None:
    """Says that weights have no masters, and why; nothing of them was changed."""
    logger.warning(
        "autoamp: the half-precision weights of %s have no fp32 masters, and small "
        "updates are rounded away: %s: %s. Give the masters room, 4 bytes a weight, or "
        "decline them by %s",
        class_name(optimizer),
        type(error).__name__,
        str(error).partition("\n")[0],
        options.advice("masters", "off"),
    )
