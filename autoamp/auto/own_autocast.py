"""Says, once for each model, that the model is left to the script's own autocast."""

from __future__ import annotations

import logging

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from autoamp.messages import log_left_to_autocast
from autoamp.model.candidates import caller_of, choose, inside
from autoamp.model.conversion import conversion_of
from autoamp.printable import class_name

logger = logging.getLogger(__name__)

_seen = WeakIdKeyDictionary()
"""The modules that were called in an autocast region of the script's own so far."""


def tell_of_own_autocast(module: nn.Module) -> None:
    """Says why a call of `module` in an autocast region of the script's is left alone.

    Nothing is logged for a module that would not be converted anyway.
    """
    if module in _seen:
        return
    _seen[module] = True
    owner = caller_of(module) or module
    target = inside(owner)
    state = conversion_of(target)
    if state is None:
        choice = choose(owner)
        if choice.target is None or choice.only_if_it_pays:
            return
    elif state.engine is None:  # the model was declined, and a warning has said why
        return
    log_left_to_autocast(logger, class_name(target), of=target)
