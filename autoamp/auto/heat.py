"""When a module is captured in the automatic mode: it is hot by then.

The calls of a module in one mode (training, or evaluation with or without gradients)
have come to what its capture costs, so that captures take no longer than a program has
computed by then.  A module that trains is hot at its second step, since more steps are
likely to follow: for such captures a program is lent `LENT` seconds in all.  No module
is hot whose calls are too short to gain anything.

Costs are predicted from the modules and the rows that weights multiply, and never by a
clock: two runs of one program capture at the same call, and so do all ranks.  (With
several ranks, whose batches may differ in size, every module is hot at its first call.)

Of the package only `work` and `no_model` are imported here: the rest takes two seconds
to import, which are part of what a capture costs.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoamp.auto.work import INSIDE, Call, Work, opaque
from autoamp.runtime.no_model import is_no_model

_is_tracing: Any = torch.jit.is_tracing  # type: ignore[attr-defined]

LENT = 5.0
"""Seconds that captures may take in a program before its calls have come to them, for
modules that train: an import, and a model of 140 modules, say."""

_IMPORT = 2.0
"""Seconds to import the package, which the first capture of a process waits for."""

_CAPTURE, _CAPTURED_MODULE = 0.2, 0.02
"""Seconds for a capture: in any case, and for each call of a module inside.

benchmarks/results/first_call.md has captures of 0.13 to 0.16 s for recurrent layers,
and of 2.2 s for GPT-2's twelve layers, which are some 150 modules.
"""

_FLOPS = {"cpu": 1e11, "cuda": 2e13}
"""Fp32 operations a second: an order of magnitude, equal on all machines."""

_CALL = 2e-5
"""Seconds for each call of a module, whatever it computes."""

LEAST = {True: 1.5e-3, False: 3e-4}
"""Seconds of a call below which low precision gains nothing, in training and else.

A rewritten graph takes 0.06 ms a call more in Python than its modules, and with its
backward and step 0.6 ms; beside these, a step casts the weights anew.  On a CPU with
64 rows two linears of 256 x 1024 and 1024 x 9, predicted to take 1.2 ms, took 1.9 ms in
fp32 and 2.5 in bf16; with 1024 x 1024, predicted to take 4.7 ms, 5.9 ms in both.
"""

_LONGEST_STEP, _NO_STEP = 64, 4
"""How many calls worth a capture wait for a training step to begin: where calls have
left gradients behind, and where they have not, so that nobody may train the model."""

HOT: Any = object()
"""The answer that a module is hot, in the place of a call's result."""


@dataclass(eq=False, slots=True)
class Warmth:
    """What is counted of one module in one mode.

    Attributes:
        trained: whether a call is one of a training, or records gradients.
        has_weights: whether the module is looked at, and not the modules it calls.
        calls: how many calls there were.
        seconds: the predicted time of a call, as last looked at.
        spent: the predicted time of all calls.
        cost: the predicted time of a capture.
        stamp: versions of the trained weights at the call before.
        steps: whether the weights have changed between two calls.
        waited: how many calls worth a capture have waited for a step to begin.
        settled: whether the module is captured in any mode, or the line is said of it.
    """

    module: weakref.ref[nn.Module]
    name: str
    trained: bool
    training: bool
    has_weights: bool = True
    calls: int = 0
    seconds: float = 0.0
    spent: float = 0.0
    cost: float = math.inf
    stamp: tuple[int, ...] = ()
    steps: bool = False
    waited: int = 0
    settled: bool = False

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """Orders records for the line at exit: of what trained first, then by heat."""
        stays = not self.settled
        return stays and self.steps, stays and self.training, self.spent / self.cost

    @property
    def is_short(self) -> bool:
        """Whether a call is too short to gain anything."""
        return self.seconds < LEAST[self.trained]

    def begins_a_step(self, module: nn.Module) -> bool:
        """Whether this call begins a training step, or belongs to none.

        A step that began in fp32 ends in fp32, and the next begins in mixed precision:
        when the weights have changed since the call before, or where no call has left
        a gradient behind.
        """
        before, self.stamp = self.stamp, stamp(module)
        moved = bool(before) and before != self.stamp
        # Without gradients a mean of weights, as of a teacher, moves.
        self.steps |= moved and torch.is_grad_enabled()
        if moved or not self.stamp:
            return True
        self.waited += self.spent >= self.cost
        weights = (p for p in nn.Module.parameters(module) if p.requires_grad)
        idle = all(p.grad is None for p in weights)
        return self.waited > (_NO_STEP if idle else _LONGEST_STEP)


def stamp(module: nn.Module) -> tuple[int, ...]:
    """The versions of the weights that are trained: an optimizer's step moves them."""
    trained = (p for p in nn.Module.parameters(module) if p.requires_grad)
    # Weights that were made in inference mode count no versions.
    return tuple([p.is_inference() or getattr(p, "_version", 0) for p in trained])


def mode_of(module: nn.Module) -> tuple[bool, bool]:
    """Whether a call is one of a training, or records gradients; and the former.

    A checkpoint runs a module without gradients, and once more with them, in one mode.
    """
    training = bool(module.__dict__.get("training", True))
    return training or torch.is_grad_enabled(), training


class Heat:
    """How warm each module is that a program calls from outside any other module.

    Attributes:
        everything: every module is hot at its first call.
        started: the package has been imported.
        has_met: some module has become hot.
        lent: the seconds of captures that calls need not have come to.
        on_count: called when a call has been looked at, or None.
    """

    lent = LENT

    def __init__(self, *, everything: bool = False) -> None:
        self.everything = everything
        self.started = self.has_met = False
        self.on_count: Callable[[], None] | None = None
        self._known: dict[tuple[int, bool, bool], Warmth] = {}
        self._gone: list[Warmth] = []

    def call(
        self, original: Call, module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """The result of a call of a module that is not hot, or `HOT` and no call."""
        if self.everything:
            return HOT
        key = id(module), *mode_of(module)
        known = self._known.get(key)
        if known is None or known.module() is not module:
            try:
                weights = nn.Module.parameters(module)
                has_weights = any(p.is_floating_point() for p in weights)
            except AttributeError:  # a module that is half made
                return original(module, *args, **kwargs)
            if has_weights and is_no_model(module):
                return opaque(original, module, args, kwargs)
            # Before any module is hot, only the script itself has converted one.
            by_script = not self.has_met and "_autoamp" in module.__dict__
            if known is not None:  # of a module that is no more
                self._gone = [max([*self._gone, known], key=lambda w: w.rank)]
            is_settled = any(w.settled for w in self._of(module))
            known = Warmth(weakref.ref(module), type(module).__name__, *key[1:])
            known.settled, known.has_weights = is_settled, has_weights
            self._known[key] = known
            if has_weights and (by_script or _is_hot_at_once(module)):
                return self._captures(known, module)
        if not known.has_weights:
            return original(module, *args, **kwargs)
        if _is_tracing():  # a trace would record the sizes
            return opaque(original, module, args, kwargs)
        begins = not known.trained or known.begins_a_step(module)
        missing = max(0.0, known.cost - known.spent)
        is_worth = not known.is_short and missing <= (self.lent if known.steps else 0.0)
        if begins and is_worth:
            self.lent -= missing
            return self._captures(known, module)
        known.calls += 1
        known.spent += known.seconds
        # The calls 1, 2, 4, 8, ... are looked at, because sizes may differ.
        if known.calls & known.calls - 1:
            return opaque(original, module, args, kwargs)
        return self.counted(known, original, module, args, kwargs)

    def nearest(self) -> Warmth | None:
        """Of modules that stay as they are: one that trained, or is nearly hot."""
        records = [*self._known.values(), *self._gone]
        cold = [w for w in records if w.seconds and not w.settled]
        return max(cold, key=lambda w: w.rank, default=None)

    def settle(self) -> None:
        """Notes that the line is said, which is not said again of modules so far."""
        for known in (*self._known.values(), *self._gone):
            known.settled = True

    def _captures(self, known: Warmth, module: nn.Module) -> Any:
        self.has_met = known.settled = True
        for each in self._of(module):
            each.settled = True
        return HOT

    def _of(self, module: nn.Module) -> list[Warmth]:
        """The records of a module in all modes."""
        modes = (False, False), (True, False), (True, True)
        found = (self._known.get((id(module), *mode)) for mode in modes)
        return [w for w in found if w is not None and w.module() is module]

    def counted(
        self, known: Warmth, original: Call, module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """Makes a call, and counts its work."""
        INSIDE.work = work = Work()
        try:
            result = original(module, *args, **kwargs)
        finally:
            INSIDE.work = None
        work.note(module, result)
        device = next((p.device.type for p in nn.Module.parameters(module)), "cpu")
        once = work.flops / _FLOPS.get(device, _FLOPS["cuda"]) + work.calls * _CALL
        seconds = 3 * once if known.trained else once  # with the backward
        known.spent += seconds - known.seconds
        known.seconds = seconds
        known.cost = _CAPTURE + _CAPTURED_MODULE * work.calls
        known.cost += 0.0 if self.started else _IMPORT
        if self.on_count is not None:
            self.on_count()
        return result


def _is_hot_at_once(module: nn.Module) -> bool:
    """Whether a module is hot at its first call.

    One that its user compiles, because the code would be compiled a second time later;
    and all modules of several ranks, which must switch at the same call.
    """
    if type(module).__name__ == "OptimizedModule":
        return True
    if module.__dict__.get("_compiled_call_impl") is not None:
        return True
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return False
    return bool(distributed.is_initialized() and distributed.get_world_size() > 1)
