"""Counts which share of the updates reaches half weights that have no masters.

A weight of 1 in bf16 cannot move by less than 0.004.  In some steps, some weights are
copied before the step, and compared after it: of the numbers that had a gradient, the
share is the part that has moved.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autoamp import compat
from autoamp.dtypes import has_masters, short_name
from autoamp.training.boundary import params_of
from autoamp_said import logger_of

logger = logger_of(__name__)

MOST_TIME = 0.01
"""The share of the time of training that a meter takes at most, once it has begun."""

_CUT = 1 << 16
"""So many elements of a larger weight are looked at."""

_MOST = 1 << 20
"""So many elements are looked at in one step."""

METERS: weakref.WeakKeyDictionary[Optimizer, UpdateMeter] = weakref.WeakKeyDictionary()
"""The meter of each optimizer that has one."""


@dataclass(frozen=True)
class UpdateShare:
    """Which share of the updates of some weights without fp32 masters is made.

    Attributes:
        kind: the kind of weights: "norm", "bias", "embedding", or "other".
        dtype: the dtype of the weights, "bf16" or "fp16".
        weights: the number of weights that were looked at.
        share: the share of their numbers with a gradient that a step moves; 1 where
            no update is lost.
    """

    kind: str
    dtype: str
    weights: int
    share: float


class UpdateMeter:
    """Looks at the updates of one optimizer's half weights, in some of its steps."""

    def __init__(self, optimizer: Optimizer, at_most: float = MOST_TIME) -> None:
        """Args: `at_most` is the share of the time of training that looks may take."""
        self._next, self._at_most = 0.0, at_most
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self._at = self._steps = 0
        self._seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        # A deep copy of an optimizer calls the hooks of the original.
        self._optimizer = weakref.ref(optimizer)
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *of: self._try(self._before, *of)),
            optimizer.register_step_post_hook(lambda *of: self._try(self._after, *of)),
        ]
        METERS[optimizer] = self

    def remove(self) -> None:
        """Looks no more."""
        for hook in self._hooks:
            hook.remove()
        optimizer = self._optimizer()
        if optimizer is not None:
            METERS.pop(optimizer, None)

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer, or None once it is gone."""
        return self._optimizer()

    def sums(self, param: torch.Tensor) -> torch.Tensor | None:
        """How many numbers of a weight have moved, of how many; None if unseen."""
        return self._sums.get(param)

    def _try(self, look: Callable[..., None], *given: Any) -> None:
        """Calls `look`; a look that fails ends the meter, and not the user's step."""
        try:
            look(*given)
        except Exception as error:  # noqa: BLE001 - tensors may be of any class
            # The hooks stay: the optimizer is going through its hooks right now.
            self._next, self._seen = math.inf, []
            logger.warning(
                "autoamp: the updates of %s are measured no more: %s: %s",
                *(type(self.optimizer).__name__, type(error).__name__, error),
            )

    def _before(self, stepped: Any, *_: Any) -> None:
        if torch.compiler.is_dynamo_compiling():  # the user compiles the step
            return
        begin = time.perf_counter()
        optimizer = self._optimizer()
        if begin < self._next or optimizer is None or stepped is not optimizer:
            return
        self._steps += 1
        if self._steps == 1:  # of which nobody knows how long training takes
            return
        for param in self._chosen(optimizer):
            assert param.grad is not None, "only weights with a gradient are chosen"
            grad = compat.local_part(param.grad.detach())
            half = compat.local_part(param.detach())
            # A sparse gradient cannot be cut, nor one that is laid out otherwise.
            if grad.layout == half.layout and grad.stride() == half.stride():
                self._seen.append((param, _cut(half).clone(), _cut(grad) != 0))
        spent = time.perf_counter() - begin
        self._next = begin + spent / self._at_most

    def _after(self, *_: Any) -> None:
        if not self._seen:
            return
        begin = time.perf_counter()
        seen, self._seen = self._seen, []
        for param, before, meant in seen:
            now = _cut(compat.local_part(param.detach()))
            if now.shape == before.shape:
                moved = ((now != before) & meant).sum()
                sums = torch.stack([moved, meant.sum()])
                known = self._sums.get(param)
                self._sums[param] = sums if known is None else known + sums
        self._next += (time.perf_counter() - begin) / self._at_most

    def _chosen(self, optimizer: Any) -> list[torch.Tensor]:
        """The next half weights, in turn, that have a gradient."""
        params = [p for p in params_of(optimizer) if has_masters(p.dtype)]
        self._sums = {p: self._sums[p] for p in params if p in self._sums}
        found: list[torch.Tensor] = []
        held = 0
        for step in range(len(params)):
            param = params[(self._at + step) % len(params)]
            if param.grad is None:
                continue
            held += min(param.numel(), _CUT)
            if found and held > _MOST:
                self._at += step
                return found
            found.append(param)
        return found


def _cut(value: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor that are looked at: the first in its memory."""
    count = min(value.numel(), _CUT)
    return value if value.numel() <= _CUT else value.as_strided((count,), (1,))


def meter_of(optimizer: Optimizer) -> UpdateMeter:
    """The meter of an optimizer, which begins to look at its updates if it is new."""
    return METERS.get(optimizer) or UpdateMeter(optimizer)


def shares_of(
    model: nn.Module, meters: Iterable[UpdateMeter] = ()
) -> list[UpdateShare]:
    """Which shares of the updates of a model's half weights were made so far.

    Args:
        meters: the meters to ask; all there are by default.
    """
    asked = [*meters] or [*METERS.values()]
    sums: dict[tuple[str, str], list[torch.Tensor]] = {}
    seen: set[int] = set()
    for module in compat.modules_of(model) if asked else ():
        for name, param in compat.parameters_here(module).items():
            if param is None or id(param) in seen or not has_masters(param.dtype):
                continue
            seen.add(id(param))
            found = [meter.sums(param) for meter in asked]
            key = _kind(module, name), short_name(param.dtype)
            sums.setdefault(key, []).extend(each for each in found if each is not None)
    shares = []
    for (kind, dtype), each in sums.items():
        moved, meant = (
            torch.stack([s.cpu() for s in each]).sum(0).tolist() if each else (0, 0)
        )
        if meant:
            shares.append(UpdateShare(kind, dtype, len(each), moved / meant))
    return sorted(shares, key=lambda found: found.share)


def _kind(module: nn.Module, name: str) -> str:
    if "bias" in name:
        return "bias"
    if "Norm" in type(module).__name__:
        return "norm"
    return "embedding" if isinstance(module, nn.Embedding) else "other"
