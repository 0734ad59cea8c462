"""Counts how hot the modules of a program are: whose capture would be worth it.

A module is captured when it is hot, as a JIT compiles what is hot: when its calls in
one mode have come to ten times the predicted cost of its capture, or at its second call
where a call is worth half a capture.  So a capture costs a program at most a tenth of
the work that the program has done, and a short program pays for none.

The prediction counts modules and the rows that weights multiply, and never looks at a
clock, so two runs of one program capture at the same call, and so do all ranks.  (With
several ranks, whose batches may differ in size, every module is hot at its first call.)

This module stands beside the package `autoamp` and imports no part of it: importing the
package takes two seconds, which is part of the cost that a capture has to come up to.
"""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

Call = Callable[..., Any]

_is_tracing: Any = torch.jit.is_tracing  # type: ignore[attr-defined]

SHARE, LARGE = 10, 2
"""A capture may cost a tenth of the predicted time of all calls, or two calls."""

_IMPORT = 2.0
"""Seconds to import the package, which the first capture of a process waits for."""

_CAPTURE, _CAPTURED_MODULE = 0.2, 0.02
"""Seconds for a capture: in any case, and for each call of a module inside.

benchmarks/results/first_call.md has captures of 0.13 to 0.16 s for recurrent layers,
and of 2.2 s for GPT-2's twelve layers, which are some 150 modules.
"""

_FLOPS = {"cpu": 1e11, "cuda": 2e13}
"""Fp32 operations a second: an order of magnitude, equal on all machines."""

_READ = 10
"""How many rows take as long to multiply by a weight as the weight takes to be read."""

_CALL = 2e-5
"""Seconds for each call of a module, whatever it computes."""

_LONGEST_STEP, _NO_STEP = 64, 4
"""How many hot calls wait for a training step to begin: where calls have left gradients
behind, and where they have not, so that nobody may train the model."""

HOT: Any = object()
"""The answer that a module is hot, in the place of a call's result."""


class Work:
    """The work of one call: its `flops`, and the modules that it has called."""

    def __init__(self) -> None:
        self.flops = self.calls = 0
        self._called: set[int] = set()

    def note(self, module: nn.Module, result: Any) -> None:
        """Counts a module that has been called: each of its weights, times its rows."""
        self.calls += 1
        self._called.add(id(module))
        while isinstance(result, tuple | list) and result:
            result = result[0]
        if not isinstance(result, torch.Tensor) or not result.dim():
            return
        size = result.numel()
        if type(size) is not int:  # a size of `torch.export`, which must stay unasked
            return
        for weight in self._multiplied(module):
            rows, columns = weight.shape[0], weight.numel() // max(weight.shape[0], 1)
            if columns > 1 and rows > 1:  # else a bias, or positions
                # A recurrent layer has several rows of weights for one of its results.
                width = rows if rows in result.shape else result.shape[-1]
                self.flops += 2 * weight.numel() * (size // max(width, 1) + _READ)

    def _multiplied(self, module: nn.Module) -> Iterator[nn.Parameter]:
        """The matrices of a module, and of modules in it that were not called.

        A module may hand the weights of others to a kernel.  Tables are only read.
        """
        if isinstance(module, nn.Embedding | nn.EmbeddingBag | nn.LayerNorm):
            return
        # A module may be half made, and `parameters()` takes longer.
        for weight in (module.__dict__.get("_parameters") or {}).values():
            if weight is not None and not is_lazy(weight) and weight.dim() > 1:
                yield weight
        for child in (module.__dict__.get("_modules") or {}).values():
            if child is not None and id(child) not in self._called:
                yield from self._multiplied(child)


class _Inside(threading.local):
    """The call that this thread is in of a module that owns weights.

    Attributes:
        work: None outside any call; a `Work` where the call is counted; else False.
    """

    work: Work | bool | None = None


INSIDE = _Inside()


@dataclass(eq=False, slots=True)
class Warmth:
    """How warm one module is in one mode: with or without gradients, training or not.

    Attributes:
        trained: whether a call is one of a training, or records gradients.
        has_weights: whether the module is looked at, and not the modules it calls.
        left: how many calls there are before the next look.
        calls: how many calls there were up to the last look.
        seconds: the predicted time of a call, as last looked at.
        spent: the predicted time of all calls up to the last look.
        cost: the predicted time of a capture.
        stamp: versions of the trained weights at the call before, if it was looked at.
        first: the same at the first look.
        steps: whether the weights have changed between two looks.
        waited: how many hot calls have waited for a step to begin.
        settled: whether the module is captured in any mode, or the line is said of it.
    """

    module: weakref.ref[nn.Module]
    name: str
    trained: bool
    training: bool
    has_weights: bool
    left: int = 0
    since: int = 0
    calls: int = 0
    seconds: float = 0.0
    spent: float = 0.0
    cost: float = math.inf
    stamp: tuple[int, ...] | None = None
    first: tuple[int, ...] | None = None
    steps: bool = False
    waited: int = 0
    settled: bool = False

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """Orders records for the line at exit: of what trained first, then by heat."""
        return self.steps, self.training, self.spent / self.cost

    @property
    def is_hot(self) -> bool:
        """Whether the calls so far are worth a capture."""
        return bool(self.calls) and self.spent >= self._needed

    @property
    def _needed(self) -> float:
        at_second_call = self.cost <= LARGE * self.seconds
        return self.seconds if at_second_call else SHARE * self.cost

    def take_in(self, work: Work, device: str, extra: float) -> None:
        """Takes in the work of a call, and sets the next look.

        Looks are at the calls 1, 2, 4, 8, …, and at the one that may be hot first.

        Args:
            extra: seconds that a capture now costs besides.
        """
        once = work.flops / _FLOPS.get(device, _FLOPS["cuda"]) + work.calls * _CALL
        self.seconds = 3 * once if self.trained else once  # with the backward
        self.spent += self.seconds * (self.since + 1)
        self.calls += self.since + 1
        self.cost = extra + _CAPTURE + _CAPTURED_MODULE * work.calls
        missing = math.ceil((self._needed - self.spent) / self.seconds)
        self.left = self.since = max(0, min(missing, self.calls) - 1)

    def begins_a_step(self, module: nn.Module) -> bool:
        """Whether this hot call begins a training step, or belongs to none.

        A step that began in fp32 ends in fp32, and the next begins in mixed precision:
        when the weights have changed since the call before, or where no call has left
        a gradient behind.
        """
        before, self.stamp = self.stamp, stamp(module)
        if not self.stamp or (before is not None and before != self.stamp):
            return True
        self.waited += 1
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
        nearest: of those that stay as they are, the module that trained, or has come
            nearest to a capture.
        on_nearest: called when `nearest` is new, or None.
    """

    def __init__(self, *, everything: bool = False) -> None:
        self.everything = everything
        self.started = self.has_met = False
        self.nearest: Warmth | None = None
        self.on_nearest: Callable[[], None] | None = None
        self._known: dict[tuple[int, bool, bool], Warmth] = {}

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
            if has_weights and (by_script or _is_hot_at_once(module)):
                return self._captures(module)
            known = self._meet(module, key, has_weights)
        if not known.has_weights:
            return original(module, *args, **kwargs)
        if known.left or _is_tracing():  # a trace would record the sizes
            known.left = max(known.left - 1, 0)
            return opaque(original, module, args, kwargs)
        if known.is_hot and (not known.trained or known.begins_a_step(module)):
            return self._captures(module)
        return self.counted(known, original, module, args, kwargs)

    def _captures(self, module: nn.Module) -> Any:
        """`HOT`, for a module that is none of those that stay as they are."""
        self.has_met = True
        self.settle(module)
        if self.nearest is not None and self.nearest.settled:
            cold = [w for w in self._known.values() if w.calls and not w.settled]
            self.nearest = max(cold, key=lambda w: w.rank, default=None)
        return HOT

    def settle(self, module: nn.Module | None) -> None:
        """Notes that a module is captured, or told of: it is `nearest` no more."""
        for each in self._known.values():
            each.settled |= each.module() is module

    def _meet(
        self, module: nn.Module, key: tuple[int, bool, bool], has_weights: bool
    ) -> Warmth:
        def gone(ref: weakref.ref[nn.Module]) -> None:
            if key in self._known and self._known[key].module is ref:
                del self._known[key]

        ref, name = weakref.ref(module, gone), type(module).__name__
        met = self._known[key] = Warmth(ref, name, key[1], key[2], has_weights)
        same = (w for w in self._known.values() if w.module() is module)
        met.settled = any(w.settled for w in same)
        return met

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
        known.take_in(work, device, 0.0 if self.started else _IMPORT)
        # No weight changes in a forward, so that the versions are those of its start.
        now = stamp(module) if known.trained else None
        known.stamp = None if known.left else now
        if torch.is_grad_enabled():  # else a mean of weights, as of a teacher, moves
            known.first = known.first or now
            known.steps |= now != known.first
        if known.settled:
            return result
        if self.nearest is None or known.rank >= self.nearest.rank:
            self.nearest = known
            if self.on_nearest is not None:
                self.on_nearest()
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


_HALF = (torch.float16, torch.bfloat16)

_whole: weakref.WeakKeyDictionary[Any, tuple[Any, ...]] = weakref.WeakKeyDictionary()
"""Optimizers of no half-precision weight: how many groups, and the first dtype."""


def trains_half(optimizer: Any) -> bool:
    """Whether an optimizer trains half-precision weights.

    An optimizer without such weights is looked at again when it is given a group, or
    when the dtype of its first weight has changed.
    """
    groups = optimizer.param_groups
    first = groups[0]["params"] if groups else ()
    stamp = len(groups), first[0].dtype if first else None
    if _whole.get(optimizer) == stamp:
        return False
    half = [p for group in groups for p in group["params"] if p.dtype in _HALF]
    if not half:
        _whole[optimizer] = stamp
    return any(p.requires_grad for p in half)


def is_no_model(called: object) -> bool:
    """Whether the results of an object's calls are weights, or the figures of a metric.

    A script that reads a parametrised weight calls the list of its parametrisations.
    Such results are read in full precision.  A library's metric need be no module.
    """
    measures = ("ignite", "torcheval", "torchmetrics")
    return isinstance(called, ParametrizationList) or any(
        base.__name__ == "Metric" and base.__module__.partition(".")[0] in measures
        for base in type(called).__mro__
    )


def opaque(original: Call, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A call in which no module is looked at."""
    INSIDE.work = False
    try:
        return original(module, *args, **kwargs)
    finally:
        INSIDE.work = None


def passed_on(original: Call, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A call inside a module's call, counted where that call is."""
    result = original(module, *args, **kwargs)
    work = INSIDE.work
    if isinstance(work, Work) and not isinstance(module, ParametrizationList):
        work.note(module, result)
    return result
