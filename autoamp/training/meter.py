"""Measures which share of the updates that an optimizer means reaches half weights.

A weight of 1 in bf16 cannot move by less than 0.004.  In some steps, the update of some
weights is made in fp32 too, of copies of the weights, gradients and state; the share is
the part of this update that the weights then make, <made, meant> / <meant, meant> (the
effective descent quality of Collage, 2405.03637).
"""

from __future__ import annotations

import logging
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
from autoamp.training.boundary import BOUNDARIES, params_of
from autoamp.training.masters import in_dtype
from autoamp.training.separable import body_of, is_elementwise, part_of
from autoamp.training.split import CHUNK

logger = logging.getLogger(__name__)

MOST_TIME = 0.01
"""The share of the time of training that a meter takes at most, once it has begun."""

_CUT = 1 << 16
"""So many elements of a larger weight are looked at."""

METERS: weakref.WeakKeyDictionary[Optimizer, UpdateMeter] = weakref.WeakKeyDictionary()
"""The meter of each optimizer that has one."""


@dataclass(frozen=True)
class UpdateShare:
    """Which share of the meant updates of some weights is made.

    Attributes:
        kind: the kind of weights: "norm", "bias", "embedding", or "other".
        dtype: the dtype of the weights, "bf16" or "fp16".
        weights: the number of weights that were looked at.
        share: the share of their updates that a step in their own dtype makes; 1 where
            nothing is lost.
        masters: whether fp32 masters keep the rest.
    """

    kind: str
    dtype: str
    weights: int
    share: float
    masters: bool


class UpdateMeter:
    """Looks at the updates of one optimizer's half weights, in some of its steps."""

    def __init__(self, optimizer: Optimizer, at_most: float = MOST_TIME) -> None:
        """Args: `at_most` is the share of the time of training that looks may take."""
        self._next, self._at_most = 0.0, at_most
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self._at = self._steps = 0
        self._meant: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
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
        """For a weight the sums <made, meant> and <meant, meant>; None if unseen."""
        return self._sums.get(param)

    def _try(self, look: Callable[..., None], *given: Any) -> None:
        """Calls `look`; a look that fails ends the meter, and not the user's step."""
        try:
            look(*given)
        except Exception as error:  # noqa: BLE001 - an optimizer's code may raise any
            # The hooks stay: the optimizer is going through its hooks right now.
            self._next, self._meant = math.inf, []
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
        if self._steps == 1:  # which makes the state
            return
        body = body_of(optimizer)
        if body is not None:
            with torch.no_grad():
                self._look(optimizer, body)
        spent = time.perf_counter() - begin
        self._next = begin + spent / self._at_most

    def _look(self, optimizer: Any, body: Any) -> None:
        """Steps copies of some weights in fp32, and notes their updates."""
        cuts, chosen = is_elementwise(optimizer), self._chosen(optimizer)
        instead: dict[torch.Tensor, nn.Parameter] = {}
        states: dict[torch.Tensor, Any] = {}
        for param in chosen:
            state = optimizer.state.get(param, {})
            whole = compat.local_part(param.detach())
            of = compat.local_part(param.grad.detach())
            # A sparse gradient cannot be cut, nor one that is laid out otherwise.
            if of.layout != whole.layout or of.stride() != whole.stride():
                continue
            half, grad = _cut(whole, cuts), _cut(of, cuts)
            if half is None or grad is None:
                continue
            shape = whole.shape
            states[param] = {
                key: _copied(value, shape, cuts) for key, value in state.items()
            }
            copy = nn.Parameter(half.float())
            # Not the gradient itself: a fused kernel unscales it in place.
            copy.grad = grad.to(torch.float32, copy=True)
            instead[param] = copy
        if not instead:
            return
        kept = masters_in(optimizer)
        before = {param: copy.detach().clone() for param, copy in instead.items()}
        by_id = {id(param): copy for param, copy in instead.items()}
        of_copies: dict[torch.Tensor, Any] = {
            instead[param]: state for param, state in states.items()
        }
        body(part_of(optimizer, by_id, of_copies))
        for param, copy in instead.items():
            meant = copy.detach() - before[param]
            if param in kept:
                made = copy.detach().to(param.dtype).float() - before[param]
                self._add(param, made, meant)
            else:
                self._meant.append((param, before[param], meant))

    def _after(self, *_: Any) -> None:
        if not self._meant:
            return
        begin, optimizer = time.perf_counter(), self._optimizer()
        cuts = optimizer is not None and is_elementwise(optimizer)
        with torch.no_grad():
            for param, before, meant in self._meant:
                now = _cut(compat.local_part(param.detach()), cuts)
                if now is not None and now.shape == before.shape:
                    self._add(param, now.float() - before, meant)
        self._meant = []
        self._next += (time.perf_counter() - begin) / self._at_most

    def _add(
        self, param: torch.Tensor, made: torch.Tensor, meant: torch.Tensor
    ) -> None:
        sums = torch.stack([(made * meant).sum(), (meant * meant).sum()])
        known = self._sums.get(param)
        self._sums[param] = sums if known is None else known + sums

    def _chosen(self, optimizer: Any) -> list[Any]:
        """The next half weights, in turn, that have a gradient and a state."""
        params = [p for p in params_of(optimizer) if has_masters(p.dtype)]
        self._sums = {p: self._sums[p] for p in params if p in self._sums}
        found: list[Any] = []
        held = 0
        for step in range(len(params)):
            param = params[(self._at + step) % len(params)]
            if param.grad is None:
                continue
            held += min(param.numel(), _CUT)
            if found and held > CHUNK:
                self._at += step
                return found
            found.append(param)
        return found


def _cut(value: torch.Tensor, cuts: bool) -> torch.Tensor | None:
    """The elements of a tensor that are looked at; None of a tensor too large."""
    if value.numel() <= _CUT:
        return value
    if cuts and value.is_contiguous():
        return value.view(-1)[:_CUT]
    return value if value.numel() <= CHUNK else None


def _copied(value: Any, shape: torch.Size, cuts: bool) -> Any:
    """A copy in fp32 of one entry of a weight's state."""
    if not isinstance(value, torch.Tensor):
        return value
    local = compat.local_part(value.detach())
    if local.shape == shape:
        cut = _cut(local.contiguous() if cuts else local, cuts)
        local = local if cut is None else cut
    return in_dtype(local.clone(), torch.float32) if local.dim() else local.clone()


def meter_of(optimizer: Optimizer) -> UpdateMeter:
    """The meter of an optimizer, which begins to look at its updates if it is new."""
    return METERS.get(optimizer) or UpdateMeter(optimizer)


def shares_of(
    model: nn.Module, meters: Iterable[UpdateMeter] = ()
) -> list[UpdateShare]:
    """Which shares of the meant updates of a model's half weights were made so far.

    Args:
        meters: the meters to ask; all there are by default.
    """
    asked = [*meters] or [*METERS.values()]
    sums: dict[tuple[str, str, bool], list[torch.Tensor]] = {}
    seen: set[int] = set()
    for module in compat.modules_of(model) if asked else ():
        for name, param in compat.parameters_here(module).items():
            if param is None or id(param) in seen or not has_masters(param.dtype):
                continue
            seen.add(id(param))
            for meter in asked:
                found = meter.sums(param)
                if found is not None:
                    has = param in masters_in(meter.optimizer)
                    key = _kind(module, name), short_name(param.dtype), has
                    sums.setdefault(key, []).append(found)
    shares = []
    for (kind, dtype, masters), each in sums.items():
        made, meant = torch.stack([s.cpu() for s in each]).double().sum(0).tolist()
        if meant > 0:
            shares.append(UpdateShare(kind, dtype, len(each), made / meant, masters))
    return sorted(shares, key=lambda found: found.share)


def masters_in(optimizer: Optimizer | None) -> set[torch.Tensor]:
    """The half weights of an optimizer that have fp32 masters."""
    found = [b.masters for b in BOUNDARIES if b.optimizer is optimizer]
    return {param for masters in found if masters for param in masters.params}


def _kind(module: nn.Module, name: str) -> str:
    if "bias" in name:
        return "bias"
    if "Norm" in type(module).__name__:
        return "norm"
    return "embedding" if isinstance(module, nn.Embedding) else "other"
