"""Calls a stand-in of a model, with its backward, on the same inputs each time."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.dtypes import needs_loss_scale
from autoamp.errors import OptionError
from autoamp.messages import class_name, printable
from autoamp.passes.graph_record import Prepared, Rewritten
from autoamp.runtime.eligible import home_of
from autoamp.runtime.examine import Examiner, replanned, twin_of
from autoamp.runtime.module_state import left_as_it_is
from autoamp.training.options import Options

LossFn = Callable[[Any], Tensor]
MaybeLossFn = Callable[[Any], Tensor | None]
"""A function of an output; it gives None where the output has no loss."""

Call = tuple[tuple[Any, ...], dict[str, Any]]

FP16_SCALE = 2.0**15
"""The largest loss scale while fp16 gradients are compared, so that small gradients are
not lost; gradients are divided by the scale before they are compared."""


@dataclass
class Heard:
    """The numbers of one call and its backward.

    Attributes:
        output: the float tensors of the output.
        gradients: the gradients of the parameters, by name.
    """

    output: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)


class Outcome(NamedTuple):
    """The results of one call; without a backward, only the output.

    Attributes:
        gradients: the gradient of each leaf that was asked for, times the scale.
    """

    output: Any
    loss: Tensor | None = None
    gradients: Sequence[Tensor | None] = ()


def check_loss_fn(loss_fn: object) -> None:
    """Raises where a given `loss_fn` cannot be called with an output alone.

    Raises:
        OptionError: `loss_fn` is no function, or needs more than the output.
    """
    if loss_fn is None:
        return
    if not callable(loss_fn):
        shown = printable(repr(loss_fn))
        raise OptionError(f"loss_fn={shown} is not a function of the model's output")
    called = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # a function of C has none
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise OptionError(
            f"loss_fn is called with the model's output alone ({error}); give it the "
            "rest: loss_fn=lambda output: F.cross_entropy(output, target)"
        ) from None


def outcome_of(
    model: Callable[..., Any],
    call: Call,
    loss_fn: MaybeLossFn,
    leaves: Collection[Tensor],
    *,
    trains: bool,
    scale: float = 1.0,
    around_loss: contextlib.AbstractContextManager[Any] | None = None,
) -> Outcome:
    """Calls `model` once; if it trains, makes a loss and runs the backward.

    Args:
        loss_fn: makes the loss; `own_loss` makes none where the output has none.
        leaves: the tensors whose gradients are computed; read after the loss is made.
        scale: a factor on the loss.
        around_loss: a region in which the loss is made.

    Raises:
        OptionError: the loss is not a tensor of one element.
    """
    args, kwargs = call
    with torch.set_grad_enabled(trains):
        output = model(*args, **kwargs)
        if not trains:
            return Outcome(output)
        with around_loss or contextlib.nullcontext():
            loss = loss_fn(output)
        if loss is None and loss_fn is own_loss:
            return Outcome(output)
        check_loss(loss)
        assert loss is not None
        if not loss.requires_grad or not leaves:
            return Outcome(output, loss)
        wide = loss.float()
        # The scale enters as the gradient of the loss, whose own value stays as it is.
        factor = torch.full_like(wide, scale)
        return Outcome(
            output,
            loss,
            torch.autograd.grad(wide, [*leaves], factor, allow_unused=True),
        )


class StandIn:
    """Calls a captured stand-in again and again, always on the same inputs.

    Attributes:
        scale: the loss scale of calls in low precision.
    """

    scale = 1.0

    def __init__(
        self,
        twin: nn.Module,
        engine: Examiner,
        call: Call,
        loss_fn: MaybeLossFn | None,
        *,
        trains: bool,
    ) -> None:
        """Captures the stand-in by a call in fp32.

        Args:
            call: the arguments of each call.
            trains: whether the backward runs too.
        """
        self.twin, self.engine, self.call, self.trains = twin, engine, call, trains
        self.loss_fn = loss_fn or default_loss
        self._options, self._records = engine.options, dict[Prepared, Rewritten]()
        with untouched(twin, trains=trains):
            args, kwargs = copied(call)
            twin(*args, **kwargs)

    @property
    def graphs(self) -> list[Prepared]:
        """The rewritten graphs so far."""
        graphs = self.engine.record.graphs
        return [graph.prepared for graph in graphs if graph.rewritten is not None]

    def record(self, prepared: Prepared, options: Options) -> Rewritten:
        """The record of one graph under `options`."""
        assert prepared.rewritten is not None, "the pass failed on this graph"
        if options == self.engine.options:
            return prepared.rewritten
        if options != self._options:
            self._options, self._records = options, {}
        if prepared not in self._records:
            with torch.set_grad_enabled(self.trains):
                self._records[prepared] = replanned(prepared.rewritten, options)
        return self._records[prepared]

    def records(self, options: Options) -> list[Rewritten]:
        """The record of each graph so far, under `options`."""
        return [self.record(prepared, options) for prepared in self.graphs]

    @functools.cached_property
    def numbers(self) -> dict[Prepared, int]:
        """The number of each graph."""
        return {prepared: n for n, prepared in enumerate(self.graphs)}

    def run(self, model: nn.Module, found: Heard, scale: float) -> None:
        """Fills `found` with the output and the gradients of one call of `model`."""
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        with untouched(model, trains=self.trains):
            outcome = outcome_of(
                model,
                copied(self.call),
                self.loss_fn,
                named.values(),
                trains=self.trains,
                scale=scale,
            )
            found.output = [t.detach().clone() for t in floats_of(outcome.output)]
            pairs = zip(named, outcome.gradients, strict=False)
            found.gradients = {n: g.float() / scale for n, g in pairs if g is not None}

    def find_scale(self, low: Callable[[], Heard]) -> None:
        """Finds a large loss scale for fp16 at which no gradient overflows.

        Args:
            low: one call in low precision, at the scale of now.
        """
        if not needs_loss_scale(self.engine.record.low):
            return
        self.scale = FP16_SCALE
        while self.scale > 1:
            found = low()
            if all(bool(g.isfinite().all()) for g in found.gradients.values()):
                return
            self.scale /= 4

    def under_autocast(self, model: nn.Module) -> Heard | None:
        """A call under `torch.autocast`; None where it raises on this model."""
        found = Heard()
        with contextlib.suppress(RuntimeError):
            with torch.autocast(home_of(model).type, self.engine.record.low):
                self.run(twin_of(model), found, self.scale)
            return found
        return None


def check_loss(loss: object) -> None:
    """Refuses a loss that cannot be differentiated.

    Raises:
        OptionError: `loss` is not a tensor of one element.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        given = tuple(loss.shape) if isinstance(loss, Tensor) else class_name(loss)
        raise OptionError(
            f"loss_fn must return a tensor of one element, but it returns {given}; "
            "reduce the result, for example by .mean()"
        )


def own_loss(output: Any) -> Tensor | None:
    """The `loss` of an output, as an attribute or a key."""
    loss = output.get("loss") if isinstance(output, dict) else None
    loss = getattr(output, "loss", loss)
    return loss if isinstance(loss, Tensor) else None


def floats_of(output: Any) -> list[Tensor]:
    """The float tensors of an output."""
    leaves = pytree.tree_leaves(output)
    return [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]


def floats_for_loss(output: Any) -> list[Tensor]:
    """The float tensors of an output.

    Raises:
        OptionError: the output has no float tensor.
    """
    floats = floats_of(output)
    if not floats:
        raise OptionError(
            "the model's output holds no float tensor to make a loss of; give "
            "loss_fn=, a function of the output"
        )
    return floats


def default_loss(output: Any) -> Tensor:
    """The output's `loss` where it has one, else the sum of its float tensors.

    Raises:
        OptionError: the output holds no float tensor.
    """
    loss = own_loss(output)
    if loss is not None:
        return loss
    floats = floats_for_loss(output)
    total = floats[0].float().sum()
    for each in floats[1:]:
        total = total + each.float().sum()
    return total


def copied(call: Call) -> Call:
    """The arguments with every tensor copied: a model may write to its arguments."""

    def copy_of(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone().requires_grad_(value.requires_grad)
        try:
            return copy.deepcopy(value)
        except (TypeError, RuntimeError, copy.Error):  # such as an open file
            return value

    return pytree.tree_map(copy_of, call)  # type: ignore[no-any-return]


@contextlib.contextmanager
def untouched(model: nn.Module, *, trains: bool) -> Iterator[None]:
    """A region after which `model` and the random state are as they were, bit for bit.

    Args:
        trains: whether gradients are recorded in the region.
    """
    with left_as_it_is(model, weights=True), torch.set_grad_enabled(trains):
        yield


def relative_error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """||found - wanted|| / ||wanted|| in fp64; NaN if either holds a NaN.

    Infinity if the shapes differ, because the two calls took different branches.  Of
    DTensors the parts that this rank holds are compared.
    """
    found, wanted = ([*map(compat.own_memory, each)] for each in (found, wanted))
    if [t.shape for t in found] != [t.shape for t in wanted]:
        return math.inf
    # In fp64 the squares of fp32 numbers neither overflow nor vanish.
    distance = sum(
        float((a.double() - b.double()).square().sum())
        for a, b in zip(found, wanted, strict=True)
    )
    size = sum(float(b.double().square().sum()) for b in wanted)
    if size == 0:
        return 0.0 if distance == 0 else math.inf
    return math.nan if math.isnan(distance) else math.sqrt(distance / size)
