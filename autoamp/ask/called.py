"""Calls a stand-in of a model, with its backward, and leaves a trail of all values."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoamp.ask.examine import Examiner
from autoamp.ask.placed_anew import placed_anew
from autoamp.errors import OptionError
from autoamp.model.warmup import left_as_it_is
from autoamp.node_by_node.held import Held
from autoamp.node_by_node.runner import Runner
from autoamp.options import Options
from autoamp.overflow.location import INPUT, WEIGHT, Location
from autoamp.overflow.python_calls import Listening
from autoamp.overflow.recorder import Recorder
from autoamp.overflow.trail import Step, Trail
from autoamp.pipeline.prepared import Prepared
from autoamp.plain import class_name
from autoamp.rewrite.rewritten import Rewritten

LossFn = Callable[[Any], Tensor]
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Trial:
    """One call, and its backward.

    Attributes:
        trail: the values and gradients of the call.
        loss: the step that made the loss; None where there was no backward.
    """

    trail: Trail
    loss: Step | None = None


class Bench:
    """Calls the stand-in again and again, always on the same inputs.

    Attributes:
        scale: the loss scale in force.
    """

    def __init__(
        self,
        twin: nn.Module,
        engine: Examiner,
        call: Call,
        loss_fn: LossFn | None,
        *,
        trains: bool,
        scale: float,
    ) -> None:
        """Captures the stand-in, in fp32.

        Args:
            call: the arguments of each call.
            trains: whether the backward is run.
        """
        self.twin, self.engine, self.call = twin, engine, call
        self.loss_fn, self.trains, self.scale = loss_fn, trains, scale
        self._shadows: dict[int, Tensor] = {}
        self._placed: dict[Options, dict[Prepared, Rewritten]] = {}
        with untouched(twin, trains=trains):
            args, kwargs = copied(call)
            twin(*args, **kwargs)

    @property
    def records(self) -> list[Rewritten]:
        """The records of the graphs that were rewritten, as the options say."""
        graphs = self.engine.record.graphs
        return [g.rewritten for g in graphs if g.rewritten is not None]

    def placed(self, options: Options | None = None) -> dict[Prepared, Rewritten]:
        """The record of each graph, placed anew under other options."""
        graphs = {g.prepared: g.rewritten for g in self.engine.record.graphs}
        own = {p: r for p, r in graphs.items() if r is not None}
        if options is None or options == self.engine.options:
            return own
        if options not in self._placed:
            with torch.set_grad_enabled(self.trains):
                self._placed[options] = {
                    prepared: placed_anew(record, options)
                    for prepared, record in own.items()
                }
        return self._placed[options]

    def trial(
        self, options: Options | None = None, scale: float | None = None
    ) -> Trial:
        """One call and its backward.

        Args:
            options: places the graphs anew; by default the options of the question.
            scale: a loss scale other than the one in force.
        """
        placed = self.placed(options)
        trail = Trail()
        self._shadows = {}
        args, kwargs = copied(self.call)
        names = self._names(args, kwargs)

        def play(prepared: Prepared, given: tuple[Any, ...]) -> Any:
            record = placed.get(prepared) or prepared.rewritten
            assert record is not None
            shadows = [self._shadow(value, names) for value in given]
            recorder = Recorder(trail, names, exact=True)
            return Runner(record.gm, [Held(), recorder]).run(*shadows)

        self.engine.play = play
        try:
            with untouched(self.twin, trains=self.trains), _lines_recorded():
                output = self.twin(*args, **kwargs)
                loss = self._backward(trail, output, scale or self.scale)
            return Trial(trail, loss)
        finally:
            self.engine.play = None
            self._shadows = {}

    def _backward(self, trail: Trail, output: Any, scale: float) -> Step | None:
        if not self.trains:
            return None
        with Listening(trail):
            loss = (self.loss_fn or default_loss)(output)
        trail.let_go()
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            given = tuple(loss.shape) if isinstance(loss, Tensor) else class_name(loss)
            raise OptionError(
                f"loss_fn is to give a tensor of one element, and gives {given}; "
                "reduce that, as by .mean()"
            )
        leaves = [leaf for leaf in self._shadows.values() if leaf.requires_grad]
        if loss.requires_grad and leaves:
            wide = loss.float()
            factor = torch.full_like(wide, scale)
            torch.autograd.grad(wide, leaves, factor, allow_unused=True)
        return trail.maker(loss)

    def _shadow(self, value: Any, names: dict[int, Location]) -> Any:
        """A leaf that stands for the leaf `value`, whose hooks and `.grad` stay out."""
        if not (isinstance(value, Tensor) and value.is_leaf and value.requires_grad):
            return value
        if id(value) not in self._shadows:
            shadow = value.detach().requires_grad_()
            if isinstance(value, nn.Parameter):
                shadow = nn.Parameter(value.detach())
            self._shadows[id(value)] = shadow
            if id(value) in names:
                names[id(shadow)] = names[id(value)]
        return self._shadows[id(value)]

    def _names(self, args: Any, kwargs: Any) -> dict[int, Location]:
        """The names of the model's tensors and of the arguments, by `id`."""
        own = [*self.twin.named_parameters(), *self.twin.named_buffers()]
        found = {id(tensor): Location(WEIGHT, name=path) for path, tensor in own}
        for name, value in _by_name(self.twin, args, kwargs).items():
            for path, leaf in pytree.tree_leaves_with_path(value):
                if isinstance(leaf, Tensor):
                    location = Location(INPUT, name=name + pytree.keystr(path))
                    found[id(leaf)] = location
        return found


def own_loss(output: Any) -> Tensor | None:
    """The `loss` of an output, as an attribute or a key."""
    loss = output.get("loss") if isinstance(output, dict) else None
    loss = getattr(output, "loss", loss)
    return loss if isinstance(loss, Tensor) else None


def floats_of(output: Any) -> list[Tensor]:
    """The float tensors of an output.

    Raises:
        OptionError: there are none.
    """
    leaves = pytree.tree_leaves(output)
    floats = [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]
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
    floats = floats_of(output)
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
        except (TypeError, RuntimeError, copy.Error):  # say, an open file
            return value

    return pytree.tree_map(copy_of, call)  # type: ignore[no-any-return]


def _lines_recorded() -> contextlib.AbstractContextManager[Any]:
    """A region in which autograd records the lines of Python code between graphs."""
    return torch.autograd.set_detect_anomaly(True, check_nan=False)


@contextlib.contextmanager
def untouched(model: nn.Module, *, trains: bool) -> Iterator[None]:
    """A region after which `model` and the random state are as they were, bit for bit.

    Args:
        trains: whether gradients are recorded in the region.
    """
    with left_as_it_is(model, weights=True), torch.set_grad_enabled(trains):
        yield


def _by_name(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments by the names that the model's `forward` gives them."""
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
        return dict(bound.arguments)
    except (TypeError, ValueError):
        named = {f"input.{at}": value for at, value in enumerate(args)}
        return {**named, **kwargs}
