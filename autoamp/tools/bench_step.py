"""One step of a model, run and timed in one way after another."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoamp.dtypes import needs_loss_scale
from autoamp.errors import OptionError, UnsupportedModelError
from autoamp.messages import class_name, error_line
from autoamp.passes.speeds.clock import finish
from autoamp.runtime.convert import convert_model, revert_model
from autoamp.runtime.eligible import home_of
from autoamp.runtime.stand_in import (
    Call,
    LossFn,
    check_loss,
    copied,
    floats_for_loss,
    floats_of,
    own_loss,
    relative_error,
)
from autoamp.tools.bench_ways import Way
from autoamp.training.masters import has_half
from autoamp.training.meter import UpdateMeter

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_FEWEST = 5
"""The least rounds: with fewer, the sign test can prove no way faster than another."""

_ENOUGH = 10
"""Rounds after which small spreads end the measurement."""

_CLOSE = 0.005
"""A spread is small when the standard error of every ratio is within half a percent."""

_MOST = 1000


# -- the arguments of a call -----------------------------------------------------------


def batch_size(call: Call) -> int | None:
    """The size of dimension 0 of the first tensor that has one, or None."""
    for leaf in pytree.tree_leaves(call):
        if isinstance(leaf, Tensor) and leaf.dim():
            return leaf.shape[0]
    return None


def token_count(call: Call) -> int | None:
    """The elements of the first matrix of integers among the arguments, or None."""
    integers = (torch.int64, torch.int32, torch.int16)
    for leaf in pytree.tree_leaves(call):
        if isinstance(leaf, Tensor) and leaf.dim() == 2 and leaf.dtype in integers:
            return leaf.numel()
    return None


def arguments_of(batch: Any) -> Call:
    """The arguments of the call that a batch of `data=` stands for.

    A tuple `(args, kwargs)` of a tuple and a dict gives both kinds of arguments.
    Another tuple, or a list, gives positional arguments; a dict gives keyword
    arguments; any other object is the only argument.
    """
    match batch:
        case (tuple() as args, dict() as kwargs):
            return args, kwargs
        case dict():
            return (), dict(batch)
        case tuple() | list():
            return tuple(batch), {}
    return (batch,), {}


# -- the work of a step ----------------------------------------------------------------


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The default optimizer of a training step."""
    return torch.optim.AdamW(parameters, lr=1e-4)


@dataclass(frozen=True)
class Task:
    """The work of one step.

    Attributes:
        kind: "training" (forward, loss, backward, optimizer), "inference" (forward), or
            "generate" (the model's own `generate`).
        call: the arguments of a call.
        tokens: how many tokens a generation makes.
        loss_fn: gives the loss from the output; None lets `loss_of` choose.
        make_optimizer: makes the optimizer of a list of parameters.
        data: batches from which the arguments of each call come; None if every step
            gets `call`.
        targets: the random numbers that outputs without a loss are compared with.
    """

    kind: str
    call: Call
    tokens: int = 0
    loss_fn: LossFn | None = None
    make_optimizer: MakeOptimizer = adamw
    data: Iterable[Any] | None = None
    targets: dict[Any, Tensor] = field(default_factory=dict)

    @property
    def trains(self) -> bool:
        """Whether a step has a backward and an optimizer."""
        return self.kind == "training"

    def calls(self, device: torch.device) -> Iterator[Call]:
        """The arguments of one call after another; data starts again at its end.

        Raises:
            OptionError: `data` has no batch.
        """
        while self.data is None:
            yield self.call
        while True:
            any_batch = False
            for batch in self.data:
                any_batch = True
                call: Call = pytree.tree_map_only(
                    Tensor, lambda t: t.to(device), arguments_of(batch)
                )
                yield call
            if not any_batch:
                raise OptionError(
                    "data= has no batch (an iterator can be read only once)"
                )

    def loss_of(self, output: Any) -> tuple[Tensor, str]:
        """The loss of an output, and how the loss was made, in words.

        Raises:
            OptionError: `loss_fn` gives no tensor of one element, or the output has no
                float tensor to make a loss of.
        """
        if self.loss_fn is not None:
            return _scalar(self.loss_fn(output)), "loss_fn"
        loss = own_loss(output)
        if loss is not None:
            return _scalar(loss), "the output's loss"
        if isinstance(output, Tensor) and output.numel() == 1:
            return output.squeeze(), "the output, a scalar"
        far = []
        for place, each in enumerate(floats_for_loss(output)):
            key = place, each.shape, each.device
            if key not in self.targets:
                draws = torch.Generator("cpu").manual_seed(place)
                target = torch.randn(
                    each.shape, generator=draws, dtype=torch.float32, device="cpu"
                )
                self.targets[key] = target.to(each.device)
            far.append((each.float() - self.targets[key]).square().mean())
        return torch.stack(far).sum(), "mean squared distance from fixed random numbers"


def _scalar(loss: Any) -> Tensor:
    check_loss(loss)
    return loss.squeeze()  # type: ignore[no-any-return]


class Running:
    """One way while it is measured, on a deep copy of the model.

    Attributes:
        way: the way.
        task: the work of a step.
        ready: whether the copy is set up.
        model: the copy, while it is set up.
        device: the device of the copy.
        seconds: the time of each timed step so far.
        data_seconds: the part of each of these that waited for data.
        loss_from: how the loss was made, in words.
        figures: the counted figures of a `Row`, by the names of its fields.
        error: the first line of the error at which the way failed, or "".
    """

    def __init__(self, way: Way, task: Task) -> None:
        self.way, self.task = way, task
        self.ready = False
        self.model = nn.Module()
        self.device = torch.device("cpu")
        self.seconds: list[float] = []
        self.data_seconds: list[float] = []
        self.loss_from = self.error = ""
        self.figures: dict[str, Any] = {}
        self._called: Any = None
        self._first: torch.UntypedStorage | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._scaler: torch.amp.GradScaler | None = None

    def set_up(self, model: nn.Module) -> None:
        """Makes a copy of `model` that runs this way.

        Raises:
            UnsupportedModelError: the model cannot be copied.
            OptionError: the model has no weight to train, or no method `generate`.
        """
        way, task = self.way, self.task
        try:
            twin = copy.deepcopy(model)
        except Exception as error:
            raise UnsupportedModelError(
                f"{class_name(model)} cannot be copied, and each way needs its own "
                f"copy: {error_line(error)}"
            ) from error
        self.model = revert_model(twin).train(task.trains)
        self.device = home_of(model)
        self.rewind()
        if task.kind == "generate" and not hasattr(model, "generate"):
            raise OptionError(f"{class_name(model)} has no method `generate`")
        self._called = self._prepared()
        if task.trains:
            trained = [p for p in self.model.parameters() if p.requires_grad]
            if not trained:
                raise OptionError(
                    f"{class_name(model)} has no weight to train; ask for inference "
                    "(--inference, inference=True)"
                )
            self._optimizer = task.make_optimizer(trained)
            if way.kind == "autoamp" and way.arrived:  # whose weights have masters
                convert_model(self.model, way.options, [self._optimizer])
            if way.kind == "autocast" and needs_loss_scale(way.low):
                self._scaler = torch.amp.GradScaler(self.device.type)
        self.ready = True

    def _prepared(self) -> Any:
        """Sets up the copy for this way; returns the callable of a step."""
        way = self.way
        options = way.options.replace(precision=way.low)
        if way.kind == "autoamp":
            backend = "inductor" if way.compiled else options.backend
            return convert_model(self.model, options.replace(backend=backend))
        if way.kind == "half":
            self.model.to(way.low)
        return torch.compile(self.model) if way.compiled else self.model

    def rewind(self) -> None:
        """Starts the data again from its first batch."""
        self._calls = self.task.calls(self.device)

    def batch(self) -> Call:
        """The arguments of the next call, in the dtype of this way."""
        return self.as_taken(next(self._calls))

    def as_taken(self, call: Call) -> Call:
        """A copy of the arguments of a call, in the dtype of this way."""
        call = copied(call)
        if self.way.kind != "half":
            return call
        low: Call = pytree.tree_map_only(
            Tensor,
            lambda t: t.to(self.way.low) if t.dtype == torch.float32 else t,
            call,
        )
        return low

    def forward(self, batch: Call) -> Any:
        """The output of one call; in training, the loss and the output."""
        args, kwargs = batch
        region: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.way.kind == "autocast":
            region = torch.autocast(self.device.type, self.way.low)
        with (
            _tf32(self.way.kind, self.device),
            torch.set_grad_enabled(self.task.trains),
            region,
        ):
            if self.task.kind == "generate":
                # The same number of tokens in each way, whatever the model generates.
                number = self.task.tokens
                wanted = {"max_new_tokens": number, "min_new_tokens": number}
                generating: Any = self.model
                return generating.generate(
                    *args, **{**kwargs, **wanted, "do_sample": False}
                )
            output = self._called(*args, **kwargs)
            self._note_first(output)
            if not self.task.trains:
                return output
            loss, self.loss_from = self.task.loss_of(output)
            return loss, output

    def _note_first(self, output: Any) -> None:
        """Keeps the numbers of the first output, as memory that no tensor holds.

        They are no part of the memory that a step holds, which is counted by tensors.
        """
        floats = floats_of(output)
        if self._first is None and floats:
            numbers = [t.detach().float().cpu().flatten() for t in floats]
            self._first = torch.cat(numbers).untyped_storage()

    def deviation_from(self, exact: Running) -> float | None:
        """The relative error of the first output; None for `exact` and without floats.

        Args:
            exact: the way whose first output is taken as true.
        """
        if self is exact or self._first is None or exact._first is None:
            return None
        ours, true = (
            torch.empty(0, dtype=torch.float32, device="cpu").set_(output)
            for output in (self._first, exact._first)
        )
        return relative_error([ours], [true])

    def backward(self, batch: Call) -> Tensor | None:
        """Runs a forward and, in training, a backward; returns the loss or None."""
        output = self.forward(batch)
        if not self.task.trains:
            return None
        loss: Tensor = output[0]
        with _tf32(self.way.kind, self.device):
            (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        return loss.detach()

    @contextlib.contextmanager
    def updates_measured(self) -> Iterator[UpdateMeter | None]:
        """Looks at the updates of half weights in each step; None where none trains."""
        if self._optimizer is None or not has_half(self.model.parameters()):
            yield None
            return
        meter = UpdateMeter(self._optimizer, at_most=math.inf)
        try:
            yield meter
        finally:
            meter.remove()

    def forget(self) -> None:
        """Drops the gradients."""
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)

    def step(self, batch: Call | None = None) -> Tensor | None:
        """Runs one step, on the next batch by default; returns its loss, or None."""
        if batch is None:
            batch = self.batch()  # held until the step's end, as a loop holds it
        loss = self.backward(batch)
        if self._scaler is not None and self._optimizer is not None:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        elif self._optimizer is not None:
            self._optimizer.step()
        self.forget()
        return loss

    def close(self) -> None:
        """Releases the copy and its memory."""
        if self.ready:
            revert_model(self.model)
        self.ready = False
        self.model, self._called = nn.Module(), None
        self._optimizer = self._scaler = None
        gc.collect()


@contextlib.contextmanager
def _tf32(kind: str, device: torch.device) -> Iterator[None]:
    """Switches TF32 on or off for the fp32 ways; other ways keep torch's setting."""
    if device.type != "cuda" or kind not in ("fp32", "tf32"):
        yield
        return
    cudnn: Any = torch.backends.cudnn
    switches: tuple[Any, ...] = torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = "tf32" if kind == "tf32" else "ieee"
        yield
    finally:
        for switch, was in zip(switches, before, strict=True):
            switch.fp32_precision = was


# -- times -----------------------------------------------------------------------------


def in_rounds(
    ways: Sequence[Running], rounds: int | None, seconds: float
) -> Iterator[None]:
    """Times a step of every way in each round, and yields after each round.

    The order is shuffled in each round, with a fixed seed.  If one way always followed
    the same other way, that way's data in the cache and heat in the chip would bias the
    times.

    Args:
        rounds: the exact number of rounds; None lets the spread of the times decide.
        seconds: after this time no round begins, once there were `_FEWEST`.
    """
    order = random.Random(0)
    begun = time.perf_counter()
    for done in range(1, (rounds or _MOST) + 1):
        for running in order.sample(list(ways), len(ways)):
            seconds_of_step, seconds_of_data = _time_a_step(running)
            running.seconds.append(seconds_of_step)
            running.data_seconds.append(seconds_of_data)
        yield
        is_late = time.perf_counter() - begun >= seconds
        if rounds is None and done >= _FEWEST and (is_late or _is_close(ways, done)):
            return


def _time_a_step(running: Running) -> tuple[float, float]:
    """Seconds of one step, from its data to the end of its work, and of its data."""
    device, batch = running.device, None
    if running.task.data is None:
        batch = running.batch()
    finish(device)
    start = time.perf_counter()
    if batch is None:
        batch = running.batch()
        finish(device)
    loaded = time.perf_counter()
    running.step(batch)
    finish(device)
    return time.perf_counter() - start, loaded - start


def _is_close(ways: Sequence[Running], done: int) -> bool:
    if done < _ENOUGH:
        return False
    base = ways[0].seconds
    errors = [ratio(way.seconds, base, paired=True)[1] for way in ways]
    spread = statistics.stdev(base) / statistics.median(base)
    return max(spread, *errors) / math.sqrt(done) <= _CLOSE


def ratio(
    times: Sequence[float], base: Sequence[float], *, paired: bool
) -> tuple[float, float]:
    """The ratio of times to the times of the base, and its standard deviation.

    Args:
        paired: whether the n-th times belong to one round.  If so, the ratio is the
            median of the rounds' ratios; if not, it is the ratio of the medians.
    """
    if paired:
        shares = [mine / its for mine, its in zip(times, base, strict=False)]
        return statistics.median(shares), sigma(shares)
    middle = statistics.median(times) / statistics.median(base)
    spread = [sigma(seconds) / statistics.median(seconds) for seconds in (times, base)]
    return middle, middle * math.hypot(*spread)


def sigma(values: Sequence[float]) -> float:
    """The standard deviation of a sample; 0.0 of a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0
