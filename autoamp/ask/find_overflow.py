"""`find_overflow`: the first node that left its dtype's range, and the remedy.

A stand-in of the model is captured once.  Its rewritten graphs run node by node, with
the real rounding.  If a number leaves its range, the graphs also run in fp32, to see
whether fp32 fails there too, and then under one remedy after another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoamp.ask.examine import checked_model, examined, options_for, twin_of
from autoamp.ask.overflow import Overflow, overflow_at
from autoamp.ask.progress import told
from autoamp.ask.recorded_call import RecordedCall, Recording
from autoamp.ask.stand_in import Call, LossFn, copied, untouched
from autoamp.capture.engine import Engine
from autoamp.dtypes import NARROWEST, short_name
from autoamp.errors import AutoampError, OptionError, UnsupportedModelError
from autoamp.model.conversion import conversion_of
from autoamp.model.eligible import parameters_of, required_precision
from autoamp.options import Options
from autoamp.overflow.culprit import first_out_of_range, harmful, nearest
from autoamp.overflow.location import location_of, readers
from autoamp.overflow.remedy import EVERYTHING, Fault, Remedy, cure
from autoamp.overflow.trail import Step
from autoamp.printable import class_name
from autoamp.rewrite.rewritten import Rewritten

TRIES = 24
"""The most remedies that are tried."""


class Player(Protocol):
    """Makes one call under options, again and again."""

    def recorded(self, options: Options, scale: float) -> RecordedCall:
        """The call, and its backward if there is one, at a loss scale."""

    def records(self, options: Options) -> Sequence[Rewritten]:
        """The records of the graphs."""


def find_overflow_model(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    given: Mapping[str, Any] | None,
    loss_fn: LossFn | None = None,
    *,
    scale: float | None = None,
) -> Overflow:
    """The first number that leaves its range; see `autoamp.find_overflow`.

    Args:
        given: options of `convert`, added to those of the model's own conversion.
        scale: the loss scale; by default that in force.

    Raises:
        UnsupportedModelError: the model cannot be captured, or its inputs are on
            another device.
        OptionError: an option is unusable, or the loss is no scalar.
    """
    model = checked_model(model)
    if loss_fn is not None and not callable(loss_fn):
        raise OptionError(
            f"loss_fn={loss_fn!r} is not a function of the model's output"
        )
    if given is not None and not isinstance(given, Mapping):
        raise OptionError(f"options={given!r} is not a dict of options of convert()")
    call: Call = (args, dict(kwargs))
    _check_devices(model, call)
    # By default a model that is not converted is examined in fp16.
    options = options_for(model, given, Options(precision=short_name(NARROWEST)))
    low, options = required_precision(model, options, even_at_a_loss=True)
    trains = model.training or loss_fn is not None
    label = class_name(model)
    with examined(model, options, low) as (twin, engine):
        try:
            stand_in = Recording(twin, engine, call, loss_fn, trains=trains)
            scale = _loss_scale(model, engine) if scale is None else scale
            first = stand_in.recorded(engine.options, scale)
        except AutoampError:
            raise
        except Exception:
            _run_plainly(model, call, trains=trains)  # raises the model's own error
            raise
        search = Search(stand_in, engine.options, label, low, scale=scale)
        return search.answer(first)


class Search:
    """Looks for the step to blame, and for a remedy."""

    def __init__(
        self,
        player: Player,
        options: Options,
        label: str,
        low: torch.dtype,
        *,
        scale: float = 1.0,
        any_harm: bool = False,
    ) -> None:
        """Makes a search.

        Args:
            options: the options of the call in question.
            any_harm: whether a step is to blame only if it spoiled a result.
        """
        self.player, self.scale, self.label, self.low = player, scale, label, low
        self.options, self.any_harm = options, any_harm
        self.own: set[Any] = set()
        self.own_fault: Step | None = None

    def answer(self, call: RecordedCall) -> Overflow:
        """The answer for a call under the options of the question."""
        step = first_out_of_range(call.trail, call.loss)
        if step is None:
            return self._nothing(call)
        fp32 = self._under(Remedy(keep=(EVERYTHING,)))
        self.own = {s.key for s in fp32.trail.steps if not s.is_finite}
        self.own_fault = harmful(fp32.trail, fp32.loss)
        step = self._blamed(call)
        if step is None and self.own_fault is not None:
            return replace(self._at(self.own_fault), in_fp32=True)
        if step is None:  # fp32 has the same infinities, and they do no harm
            return self._nothing(call)
        step.wide = self._size(step)
        found = self._at(step)
        if harmful(call.trail, call.loss) is None:
            found = replace(found, harmless=True)
        return replace(found, rule=self._cure(step))

    def _blamed(self, call: RecordedCall) -> Step | None:
        """The step to blame, unless fp32 fails at that step as well."""
        if self.any_harm or self.own_fault is not None:
            step = harmful(call.trail, call.loss)
            return None if step is None or step.key in self.own else step
        return first_out_of_range(call.trail, call.loss, self.own)

    def _at(self, step: Step) -> Overflow:
        found = overflow_at(step, self.label, self.low, found=True, scale=self.scale)
        reader = ""
        if step.node is not None and step.is_cast and not step.is_backward:
            reader = ", ".join(
                dict.fromkeys(str(location_of(each)) for each in readers(step.node))
            )
        return replace(found, reader=reader)

    def _nothing(self, call: RecordedCall) -> Overflow:
        close = nearest(call.trail)
        if close is None:
            return Overflow(self.label, self.low, found=False)
        _, step = close
        return overflow_at(step, self.label, self.low, found=False, scale=self.scale)

    def _size(self, step: Step) -> float | None:
        """The true magnitude of a gradient, seen at a loss scale where it is finite."""
        if not step.is_backward:
            return step.wide
        for power in (10, 20, 30, 40):
            scale = self.scale * 2.0**-power
            trail = self.player.recorded(self.options, scale).trail
            there = [
                s for s in trail.steps if s.key == step.key and s.node is step.node
            ]
            sizes = [s.largest for s in there]
            if sizes and all(map(math.isfinite, sizes)):
                return max(sizes) * 2.0**power
        return None

    def _cure(self, step: Step) -> Remedy | None:
        """The smallest remedy under which no step of a call is to blame, or None."""
        fault = Fault(step, self.player.records(self.options))
        found = cure(fault, self._left, told(range(TRIES), "trying rules"))
        if found is not None:
            return found
        everything = Remedy(keep=(EVERYTHING,))
        return everything if self._left(everything) is None else None

    def _under(self, remedy: Remedy) -> RecordedCall:
        return self.player.recorded(remedy.on(self.options), self.scale)

    def _left(self, remedy: Remedy) -> Fault | None:
        step = self._blamed(self._under(remedy))
        if step is None:
            return None
        return Fault(step, self.player.records(remedy.on(self.options)))


def _loss_scale(model: nn.Module, engine: Engine) -> float:
    """The present loss scale of the training, or the scale that it would begin with."""
    state = conversion_of(model)
    own = state.engine if state is not None else None
    if own is None or own.record.low != engine.record.low:
        own = engine
    scaling = own.record.scaling
    return float(scaling.loss_scale.scale) if scaling.enabled else 1.0


def _check_devices(model: nn.Module, call: Call) -> None:
    """Checks that the model holds data, and that arguments are on its devices.

    Raises:
        UnsupportedModelError: the model is on the meta device, or an argument is on a
            device where the model is not.
    """
    homes = {p.device for p in (*parameters_of(model), *model.buffers())}
    if any(home.type == "meta" for home in homes):
        raise UnsupportedModelError(
            f"{class_name(model)} is on the meta device, where no number can leave its "
            "range: load its weights first (model.to_empty(...), load_state_dict)"
        )
    for path, value in pytree.tree_leaves_with_path(call):
        if not isinstance(value, Tensor) or not homes or not value.dim():
            continue
        if value.device not in homes:
            places = ", ".join(sorted(map(str, homes)))
            raise UnsupportedModelError(
                f"argument {pytree.keystr(path[1:])} is on {value.device}, and "
                f"{class_name(model)} is on {places}; move one of them"
            )


def _run_plainly(model: nn.Module, call: Call, *, trains: bool) -> None:
    """Calls the model's own code, in fp32, so that it raises its own error."""
    twin = twin_of(model)
    with untouched(twin, trains=trains):
        args, kwargs = copied(call)
        twin(*args, **kwargs)
