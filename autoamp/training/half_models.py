"""Half-precision models, which may run past our graphs: guards and copies of buffers.

Such a model may run its own code alone.  Its calls are surrounded, so that the buffers
that a call may write to (running statistics, counters, codebooks) are copied before it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from autoamp import compat
from autoamp.training.model_scaling import ModelLedger, ModelScaling

_LARGE = 1 << 16
"""Integers of more elements are taken to be weights that a quantiser has packed, which
no forward writes to: a copy of them may not fit into memory."""

_halves = WeakIdKeyDictionary()
"""Each guarded half-precision model, with its scaling and its calls."""


def guards(model: nn.Module) -> ModelScaling | None:
    """The scaling that guards `model` itself, or None."""
    found: tuple[ModelScaling, _Calls] | None = _halves.get(model)
    return None if found is None else found[0]


def guards_around(model: nn.Module) -> ModelScaling | None:
    """The scaling that guards `model`, or a model that it is a part of, or None."""
    found = (guards(m) for m in _halves if _is_in(model, m))
    return next(found, None)


def begin(model: nn.Module, scaling: ModelScaling) -> None:
    """Has `scaling` guard `model`, and keep its buffers, until `end`."""
    end(model)
    _halves[model] = scaling, _Calls(model, scaling.ledger)


def end(model: nn.Module) -> None:
    """Undoes `begin`, if it was called for `model`."""
    found = _halves.pop(model, None)
    if found is not None:
        compat.end_surround(found[1])


def end_all(scaling: ModelScaling) -> None:
    """Undoes `begin` for all models that `scaling` guards."""
    for model in [m for m, (known, _) in [*_halves.items()] if known is scaling]:
        end(model)


class _Calls:
    """Surrounds the calls of the modules in one half-precision model."""

    def __init__(self, model: nn.Module, ledger: ModelLedger) -> None:
        this = weakref.ref(self)

        def gone(_: weakref.ref[nn.Module]) -> None:
            calls = this()
            if calls is not None:
                compat.end_surround(calls)

        self._model = weakref.ref(model, gone)
        self._ledger = ledger
        compat.surround_calls(map(id, compat.modules_of(model)), self)

    @compat.never_captured
    def begin(self, module: nn.Module) -> list[torch.Tensor] | None:
        """Keeps the buffers of a module that is called from outside of the model.

        A call that records no gradients leads to no step, and a call that is traced has
        no numbers.
        """
        if self._ledger.buffers.whole or not self._ledger.guards:
            return None
        if not torch.is_grad_enabled():
            return None
        if torch.compiler.is_compiling() or compat.other_tracing():
            return None
        model = self._model()
        # A module may have been freed since, and another have its `id` now.
        if model is None or not (module is model or _is_in(module, model)):
            return None
        held = (compat.buffers_here(m).values() for m in compat.modules_of(module))
        every = {id(b): b for of in held for b in of if b is not None}.values()
        # Whether a forward writes to one of them is not known: a batch norm moves no
        # version counter, nor does a write through `.data`.
        buffers = [
            b
            for b in every
            if (b.is_floating_point() or b.is_complex() or b.numel() <= _LARGE)
            and b.layout == torch.strided
            and not compat.is_distributed(b)
        ]
        self._ledger.keep(buffers)
        self._ledger.buffers.whole = True
        return buffers

    @compat.never_captured
    def end(self, begun: Any) -> None:
        """Notes which versions of the buffers the call has left."""
        self._ledger.buffers.whole = False
        self._ledger.buffers.note(begun)


def _is_in(module: nn.Module, model: nn.Module) -> bool:
    return any(each is module for each in compat.modules_of(model))
