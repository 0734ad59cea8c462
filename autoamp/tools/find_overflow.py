"""`find_overflow`: the first node that left its dtype's range, and the remedy.

A stand-in of the model is captured once.  Its rewritten graphs run node by node, with
the real rounding.  If a number leaves its range, the graphs also run in fp32, to see
whether fp32 fails there too, and then under one remedy after another.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoamp.dtypes import NARROWEST, largest, short_name
from autoamp.errors import AutoampError, UnsupportedModelError
from autoamp.messages import FULL_WIDTH, class_name, shorten, told
from autoamp.passes.check.promised_dtypes import Held
from autoamp.passes.graph_record import Prepared, Rewritten
from autoamp.passes.node_by_node import Runner
from autoamp.printed import Line, Printed, Table
from autoamp.runtime.conversion import conversion_of
from autoamp.runtime.eligible import parameters_of, required_precision
from autoamp.runtime.engine import Engine
from autoamp.runtime.examine import checked_model, examined, options_for, twin_of
from autoamp.runtime.stand_in import (
    Call,
    LossFn,
    StandIn,
    check_loss_fn,
    copied,
    outcome_of,
    own_loss,
    untouched,
)
from autoamp.training.blame.culprit import first_out_of_range, harmful, nearest
from autoamp.training.blame.recorder import Listening, Recorder
from autoamp.training.blame.remedy import EVERYTHING, Fault, Remedy, cure
from autoamp.training.blame.trail import (
    INPUT,
    OUTSIDE,
    WEIGHT,
    Location,
    Step,
    Trail,
    location_of,
    readers,
)
from autoamp.training.options import Options

TRIES = 24
"""The most remedies that are tried."""


@dataclass(frozen=True, repr=False)
class Overflow(Printed):
    """The first number that left the range of its dtype; falsy if no number did.

    `print(overflow)` shows it.

    Attributes:
        label: the model's class name.
        precision: the compute dtype.
        found: whether a number left its range.  If not, the other attributes describe
            the number that came nearest to its limit.
        direction: "forward" or "backward".
        kind: "op", "input", "weight", or "outside" for code outside of the model's
            graphs, such as the loss function; "" for a call without float values.
        op: the op's full name; "" for an input or weight.
        name: the name of the input or weight; "" for an op.
        module: the path of the module; "" for the model itself.
        source: the line of source, `model.py:12: x = self.fc(x)`, or "".
        reader: the op that reads the value in `dtype`, if the value was computed in
            another dtype, in whose range it is; else "".
        largest: the largest magnitude, as fp32 computes it; infinite or NaN if fp32
            gives that too, or cannot compute it.
        dtype: the dtype whose range counts.
        loss_scale: the loss scale in force; 1 without loss scaling.
        in_fp32: whether the call has an infinity or NaN in fp32 too, which no option
            can cure.
        harmless: whether the loss and all gradients are finite in spite of it.
        forward_only: whether no backward was looked at, because there was no loss.
        rule: the options of `convert` that keep the number in range, or None.
    """

    columns = FULL_WIDTH

    label: str
    precision: torch.dtype
    found: bool
    direction: str = "forward"
    kind: str = ""
    op: str = ""
    name: str = ""
    module: str = ""
    source: str = ""
    reader: str = ""
    largest: float = 0.0
    dtype: torch.dtype = torch.float32
    loss_scale: float = 1.0
    in_fp32: bool = False
    harmless: bool = False
    forward_only: bool = False
    rule: Remedy | None = None

    @property
    def limit(self) -> float:
        """The largest finite number of `dtype`."""
        return largest(self.dtype)

    @property
    def proposal(self) -> str:
        """`rule` as it is written in a call of `convert`; "" without a rule."""
        return "" if self.rule is None else str(self.rule)

    def __bool__(self) -> bool:
        return self.found

    def __repr__(self) -> str:
        return f"<autoamp.Overflow of {self.label}: {self.headline}>"

    @property
    def headline(self) -> str:
        """The answer in one sentence."""
        if not self.found:
            return self._nothing()
        what = self._what()
        if self.direction == "backward":
            what = f"the gradient of {what}"
        return f"{what} left the range of {short_name(self.dtype)}: {self._size()}"

    def parts(self) -> Iterator[Line | Table]:
        """The answer, then its place and its cure."""
        low = short_name(self.precision)
        yield Line(f"autoamp find_overflow: {self.label}, {low}", "head")
        yield Line(self.headline)
        facts = [*self._facts()]
        if facts:
            yield Table(("", ""), facts, numbers=2)

    def _facts(self) -> Iterator[tuple[str, str]]:
        if self.source:
            yield "at", shorten(self.source)
        if self.reader:
            yield "read by", f"{self.reader}, in {short_name(self.dtype)}"
        if self.found:
            yield from self._advice()
        if self.forward_only:
            yield "seen", "the forward alone, since there is no loss: give loss_fn="

    # -- sentences -----------------------------------------------------------------

    def _what(self) -> str:
        if self.kind in (INPUT, WEIGHT):
            return f"{self.kind} {self.name}"
        where = f" in {self.module}" if self.module else ""
        if self.kind == OUTSIDE:
            where = ", outside of the model's graphs,"
        return f"{self.op or self.name}{where}"

    def _size(self) -> str:
        if math.isnan(self.largest):
            return "it is NaN"
        if math.isinf(self.largest):
            return "it is infinite"
        times = self.largest / self.limit
        return (
            f"magnitude {self.largest:.4g}, {times:.3g} times the limit {self.limit:g}"
        )

    def _nothing(self) -> str:
        if not self.kind:
            return "no number left its range: the call computed no float values"
        gradient = "the gradient of " if self.direction == "backward" else ""
        times = self.limit / self.largest if self.largest else math.inf
        return (
            f"no number left its range; nearest is {gradient}{self._what()} with "
            f"magnitude {self.largest:.4g} in {short_name(self.dtype)}, "
            f"{times:.3g} times below the limit {self.limit:g}"
        )

    def _advice(self) -> Iterator[tuple[str, str]]:
        if self.in_fp32 and self.rule is not None:
            kept = f"autoamp.convert(model, {self.rule}) - tried: it stays in range"
            yield "cure", f"{kept}; but fp32 too gives an infinity or NaN in this call"
        elif self.in_fp32:
            yield "cure", "no option cures it: fp32 gives an infinity or NaN there too"
        elif self.rule is not None:
            cure = f"autoamp.convert(model, {self.rule})"
            yield "cure", f"{cure} - tried: it works"
        else:
            yield "cure", "no option was found that cures it"
        if self.direction == "backward" and self.loss_scale != 1 and not self.in_fp32:
            also = ""
            if self.largest and math.isfinite(self.largest):
                # The largest power of two at which the gradient is in range.
                most = math.log2(self.loss_scale * self.limit / self.largest)
                also = (
                    f"; a loss scale of {2.0 ** math.floor(most):g} would work as well"
                )
            yield "at", f"loss scale {self.loss_scale:g}{also}"
        if self.harmless:
            whole = (
                "the output is"
                if self.forward_only
                else "the loss and all gradients are"
            )
            yield "harm", f"none: {whole} finite"


def overflow_at(
    step: Step, label: str, precision: torch.dtype, *, found: bool, scale: float
) -> Overflow:
    """The facts about one step as an `Overflow`, without a remedy."""
    location: Location = step.location
    size = step.wide if step.wide is not None else step.largest
    return Overflow(
        label,
        precision,
        found,
        direction="backward" if step.is_backward else "forward",
        kind=location.kind,
        op=location.op,
        name=location.name,
        module=location.module,
        source=location.source,
        largest=size,
        dtype=step.dtype,
        loss_scale=scale,
    )


@dataclass
class RecordedCall:
    """One call, and its backward.

    Attributes:
        trail: the values and gradients of the call.
        loss: the step that made the loss; None without a backward.
    """

    trail: Trail
    loss: Step | None = None


class Recording(StandIn):
    """A stand-in whose calls leave trails."""

    def recorded(self, options: Options, scale: float) -> RecordedCall:
        """One call and its backward.

        Args:
            options: the options under which the graphs are placed.
            scale: the loss scale.
        """
        trail, shadows = Trail(), dict[int, Tensor]()
        self.records(options)  # before the region below, in which autograd is slow
        call = copied(self.call)
        names = self._names(*call)

        def play(prepared: Prepared, given: tuple[Any, ...]) -> Any:
            inputs = [_shadow(value, shadows, names) for value in given]
            recorder = Recorder(trail, names, exact=True)
            gm = self.record(prepared, options).gm
            return Runner(gm, [Held(), recorder]).run(*inputs)

        self.engine.play = play
        try:
            with (
                untouched(self.twin, trains=self.trains),
                # Autograd then records the lines of Python code between graphs.
                torch.autograd.set_detect_anomaly(True, check_nan=False),
            ):
                outcome = outcome_of(
                    self.twin,
                    call,
                    self.loss_fn,
                    shadows.values(),
                    trains=self.trains,
                    scale=scale,
                    around_loss=Listening(trail),
                )
            trail.let_go()
            return RecordedCall(trail, trail.maker(outcome.loss))
        finally:
            self.engine.play = None

    def _names(self, args: Any, kwargs: Any) -> dict[int, Location]:
        """The names of the model's tensors and of the arguments, by `id`."""
        weights = [*self.twin.named_parameters(), *self.twin.named_buffers()]
        names = {id(tensor): Location(WEIGHT, name=path) for path, tensor in weights}
        try:
            bound = inspect.signature(self.twin.forward).bind(*args, **kwargs)
            arguments = dict(bound.arguments)
        except (TypeError, ValueError):
            arguments = {f"input.{at}": value for at, value in enumerate(args)}
            arguments |= kwargs
        for name, value in arguments.items():
            for path, leaf in pytree.tree_leaves_with_path(value):
                if isinstance(leaf, Tensor):
                    location = Location(INPUT, name=name + pytree.keystr(path))
                    names[id(leaf)] = location
        return names


def _shadow(value: Any, shadows: dict[int, Tensor], names: dict[int, Location]) -> Any:
    """A leaf in place of the leaf `value`, to leave its hooks and `.grad` alone."""
    if not (isinstance(value, Tensor) and value.is_leaf and value.requires_grad):
        return value
    if id(value) not in shadows:
        shadow = value.detach().requires_grad_()
        if isinstance(value, nn.Parameter):
            shadow = nn.Parameter(value.detach())
        shadows[id(value)] = shadow
        if id(value) in names:
            names[id(shadow)] = names[id(value)]
    return shadows[id(value)]


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
) -> Overflow:
    """The first number that leaves its range; see `autoamp.find_overflow`.

    Args:
        given: options of `convert`, added to those of the model's own conversion.

    Raises:
        UnsupportedModelError: the model cannot be captured, or its inputs are on
            another device.
        OptionError: an option is unusable, or the loss is no scalar.
    """
    model = checked_model(model)
    check_loss_fn(loss_fn)
    call: Call = (args, dict(kwargs))
    _check_devices(model, call)
    # By default a model that is not converted is examined in fp16.
    options = options_for(model, given, Options(precision=NARROWEST))
    low, options = required_precision(model, options, even_at_a_loss=True)
    trains = model.training or loss_fn is not None
    label = class_name(model)
    with examined(model, options, low) as (twin, engine):
        try:
            loss = loss_fn or own_loss
            stand_in = Recording(twin, engine, call, loss, trains=trains)
            scale = _loss_scale(model, engine)
            first = stand_in.recorded(engine.options, scale)
        except AutoampError:
            raise
        except Exception:
            # The model's own code, in fp32, raises the model's own error.
            plain = twin_of(model)
            with untouched(plain, trains=trains):
                own_args, own_kwargs = copied(call)
                plain(*own_args, **own_kwargs)
            raise
        search = Search(stand_in, engine.options, label, low, scale=scale)
        overflow = search.answer(first)
        return replace(overflow, forward_only=first.loss is None)


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
    ) -> None:
        """Makes a search.

        Args:
            options: the options of the call in question.
        """
        self.player, self.scale, self.label, self.low = player, scale, label, low
        self.options = options
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
        overflow = self._at(step)
        if harmful(call.trail, call.loss) is None:
            overflow = replace(overflow, harmless=True)
        broken = self.own_fault is not None
        return replace(overflow, in_fp32=broken, rule=self._cure(step))

    def _blamed(self, call: RecordedCall) -> Step | None:
        """The step to blame, unless fp32 fails at that step as well."""
        if self.own_fault is not None:
            step = harmful(call.trail, call.loss)
            return None if step is None or step.key in self.own else step
        return first_out_of_range(call.trail, call.loss, self.own)

    def _at(self, step: Step) -> Overflow:
        overflow = overflow_at(step, self.label, self.low, found=True, scale=self.scale)
        reader = ""
        if step.node is not None and step.is_cast and not step.is_backward:
            reader = ", ".join(
                dict.fromkeys(str(location_of(each)) for each in readers(step.node))
            )
        return replace(overflow, reader=reader)

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
        remedy = cure(fault, self._left, told(range(TRIES), "trying rules"))
        if remedy is not None:
            return remedy
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
    training = state.engine if state is not None else None
    if training is None or training.record.low != engine.record.low:
        training = engine
    scaling = training.record.scaling
    return float(scaling.loss_scale.scale) if scaling.enabled else 1.0


def _check_devices(model: nn.Module, call: Call) -> None:
    """Checks that arguments are on the devices of the model.

    Raises:
        UnsupportedModelError: an argument is on a device where the model is not.
    """
    homes = {p.device for p in (*parameters_of(model), *model.buffers())}
    if any(home.type == "meta" for home in homes):
        return  # weights that are loaded at each call come with hooks for arguments
    for path, value in pytree.tree_leaves_with_path(call):
        if not isinstance(value, Tensor) or not homes or not value.dim():
            continue
        if value.device not in homes:
            places = ", ".join(sorted(map(str, homes)))
            raise UnsupportedModelError(
                f"argument {pytree.keystr(path[1:])} is on {value.device}, and "
                f"{class_name(model)} is on {places}; move one of them"
            )
