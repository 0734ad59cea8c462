"""Counts how hot the modules of a program are: whose capture would be worth it.

A module is captured when it is hot, as a JIT compiles what is hot: when its calls in
one mode have come to ten times the predicted cost of its capture, or at its second call
where a call is worth half a capture.  So a capture costs a program at most a tenth of
the work that the program has done, and a short program pays for none.

The prediction counts products, bytes and modules, and never looks at a clock, so two
runs of one program capture at the same call, and so do all ranks.  (With several ranks,
whose batches may differ in size, every module is hot at its first call.)

This module stands beside the package `autoamp` and imports no part of it: importing the
package takes two seconds, which is part of the cost that a capture has to come up to.
"""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections.abc import Callable
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

`python -m benchmarks.first_call` measures captures: benchmarks/results/first_call.md
has 0.13 to 0.16 s for recurrent layers, and 2.2 s for GPT-2's twelve layers, which are
some 150 modules.
"""

_SPEEDS = {"cpu": (1e11, 2e10), "cuda": (2e13, 1e12)}
"""Fp32 operations and bytes a second: an order of magnitude, equal on all machines."""

_CALL = 2e-5
"""Seconds for each call of a module, whatever it computes."""

_LONGEST_STEP = 64
"""How many calls a training step may make before its end is not waited for."""

_NO_STEP = 4
"""After how many calls without gradients a model counts as one that is not trained."""

_CONVERTED = "_autoamp"
"""The attribute of a converted module, as in `autoamp.capture.alike`."""

HOT: Any = object()
"""The answer that a module is hot, in the place of a call's result."""


class Work:
    """The work of one call, counted module by module.

    Attributes:
        flops: floating-point operations of products, without those of attention.
        moved: bytes of the parameters read and of the results written.
        calls: how many modules were called.
        called: the identities of these modules.
    """

    __slots__ = ("called", "calls", "flops", "moved")

    def __init__(self) -> None:
        self.flops = self.moved = self.calls = 0
        self.called: set[int] = set()

    def note(self, module: nn.Module, result: Any) -> None:
        """Counts a module that has been called: its own parameters, and its result.

        A parameter whose first dimension and one more are longer than 1 is multiplied
        with rows of the result, unless it belongs to a table or a norm.
        """
        self.calls += 1
        self.called.add(id(module))
        weights = self._weights_of(module)
        if not weights:
            return
        while isinstance(result, tuple | list) and result:
            result = result[0]
        size = result.numel() if isinstance(result, torch.Tensor) else 0
        if type(size) is not int:  # a size of `torch.export`, which must stay unasked
            return
        self.moved += 4 * size
        multiplies = not isinstance(module, _NO_PRODUCTS)
        for weight in weights:
            if weight is None or is_lazy(weight):
                continue
            self.moved += weight.numel() * weight.element_size()
            if multiplies and weight.dim() > 1 and weight.numel() > weight.shape[0] > 1:
                rows = size // max(_width(module, weight, result), 1)
                self.flops += 2 * weight.numel() * rows

    def _weights_of(self, module: nn.Module) -> list[nn.Parameter | None]:
        """The parameters that a module uses itself, not by a call of another module."""
        # A look at `parameters()` takes longer, and a module may be half made.
        found = [*(module.__dict__.get("_parameters") or {}).values()]
        children: dict[str, Any] = module.__dict__.get("_modules") or {}
        if "parametrizations" in children:
            lists = children["parametrizations"].values()
            found += [p for each in lists for p in each.parameters(recurse=False)]
        if isinstance(module, _PASSES_ON):
            for child in children.values():
                if id(child) not in self.called:
                    found += child.parameters()
        return found

    def seconds(self, device: str, trained: bool) -> float:
        """The predicted time of the call in fp32, with a backward if it is trained."""
        flops, moved = _SPEEDS.get(device, _SPEEDS["cuda"])
        once = self.flops / flops + self.moved / moved + self.calls * _CALL
        return 3 * once if trained else once


_NO_PRODUCTS = (
    *(nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm),
    ParametrizationList,
)
"""Modules whose weights are read or scale a result, whatever their dimensions.

What a parametrisation computes is a weight, which its layer multiplies.
"""

_PASSES_ON = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules that hand weights of modules inside to a kernel, and may call none."""

_GATED = (nn.RNNBase, nn.RNNCellBase, *_PASSES_ON)
"""Modules with one weight for several results: gates, directions, projections."""

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _width(module: nn.Module, weight: torch.Tensor, result: torch.Tensor) -> int:
    """How many elements of the result stand for one row that `weight` multiplies."""
    if isinstance(module, _GATED):
        return result.size(-1)
    if isinstance(module, _TRANSPOSED):
        return int(module.out_channels * math.prod(module.stride))
    return weight.shape[0]


class _Inside(threading.local):
    """The call that this thread is in of a module that owns weights.

    Attributes:
        work: None outside any call; a `Work` where the call is counted; else False.
    """

    work: Work | bool | None = None


INSIDE = _Inside()


class Warmth:
    """How warm one module is in one mode: with or without gradients, training or not.

    Attributes:
        module: the module.
        left: how many calls there are before the next look.
        calls: how many calls there were up to the last look.
        seconds: the predicted time of a call, as last looked at.
        spent: the predicted time of all calls up to the last look.
        cost: the predicted time of a capture.
        stamp: versions of the trained weights at the call before, if it was looked at.
        waited: how many hot calls have waited for a step to begin.
        name: the name of the module's class.
        first: versions of the trained weights at the first call.
        steps: whether the weights have changed between two looks.
        training: whether the module was in training mode.
    """

    __slots__ = (
        "calls",
        "cost",
        "first",
        "left",
        "module",
        "name",
        "seconds",
        "since",
        "spent",
        "stamp",
        "steps",
        "trained",
        "training",
        "waited",
    )

    def __init__(
        self, module: weakref.ref[nn.Module], name: str, mode: tuple[bool, bool]
    ) -> None:
        self.module = module
        self.name = name
        self.trained, self.training = mode
        self.steps = False
        self.first: tuple[int, ...] | None = None
        self.left = self.since = self.calls = self.waited = 0
        self.seconds = self.spent = 0.0
        self.cost = math.inf
        self.stamp: tuple[int, ...] | None = None

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
        self.seconds = work.seconds(device, self.trained)
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
        weights = [p for p in nn.Module.parameters(module) if p.requires_grad]
        before, self.stamp = self.stamp, stamp(module)
        if not weights or (before is not None and before != self.stamp):
            return True
        self.waited += 1
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
    """

    def __init__(self, *, everything: bool = False) -> None:
        self.everything = everything
        self.started = False
        self.has_met = False
        self._known: dict[tuple[int, bool, bool], Warmth] = {}
        self._gone: Warmth | None = None
        self._transparent: dict[int, weakref.ref[nn.Module]] = {}

    def call(
        self, original: Call, module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """The result of a call of a module that is not hot, or `HOT` and no call."""
        if self.everything:
            return HOT
        key = id(module), *mode_of(module)
        known = self._known.get(key)
        if known is None or known.module() is not module:
            if self._is_transparent(module):
                return original(module, *args, **kwargs)
            if is_no_model(module):
                return opaque(original, module, args, kwargs)
            # Before any module is hot, only the script itself has converted one.
            by_script = not self.has_met and _CONVERTED in module.__dict__
            if by_script or _is_hot_at_once(module):
                self.has_met = True
                return HOT
            known = self._meet(module, key)
        if known.left or _is_tracing():  # a trace would record the sizes
            known.left = max(known.left - 1, 0)
            return opaque(original, module, args, kwargs)
        if known.is_hot and (not known.trained or known.begins_a_step(module)):
            self.has_met = True
            return HOT
        return self.counted(known, original, module, args, kwargs)

    def warmest(self) -> Warmth | None:
        """The module that trained, or has come nearest to a capture, dead or alive."""
        every = [self._gone, *self._known.values()]
        called = [each for each in every if each is not None and each.calls]
        return max(called, key=lambda each: each.rank, default=None)

    def _is_transparent(self, module: nn.Module) -> bool:
        """Whether `module` owns no weights, so that modules it calls are looked at."""
        known = self._transparent.get(id(module))
        if known is not None and known() is module:
            return True
        try:
            if any(p.is_floating_point() for p in nn.Module.parameters(module)):
                return False
        except AttributeError:  # a module that is half made
            return True
        this = id(module)
        gone = lambda _: self._transparent.pop(this, None)  # noqa: E731
        self._transparent[this] = weakref.ref(module, gone)
        return True

    def _meet(self, module: nn.Module, key: tuple[int, bool, bool]) -> Warmth:
        def gone(ref: weakref.ref[nn.Module]) -> None:
            known = self._known.get(key)
            if known is not None and known.module is ref:
                del self._known[key]
                if self._gone is None or known.rank > self._gone.rank:
                    self._gone = known

        met = Warmth(weakref.ref(module, gone), type(module).__name__, key[1:])
        self._known[key] = met
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


def is_no_model(called: object) -> bool:
    """Whether the results of an object's calls are weights, or the figures of a metric.

    A script that reads a parametrised weight calls the list of its parametrisations.
    Such results are read in full precision.  A library's metric need be no module.
    """
    return isinstance(called, ParametrizationList) or any(
        base.__name__ == "Metric" and base.__module__.partition(".")[0] in _MEASURES
        for base in type(called).__mro__
    )


_MEASURES = frozenset({"ignite", "torcheval", "torchmetrics"})
"""Packages with a class `Metric`, from which all their metrics derive."""


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
    if isinstance(work, Work):
        work.note(module, result)
    return result
