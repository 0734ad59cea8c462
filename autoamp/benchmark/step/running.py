"""A copy of the model that runs one way, step after step."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoamp.ask.stand_in import Call, copied
from autoamp.benchmark.step.task import Feed, Task
from autoamp.benchmark.step.ways import Way
from autoamp.calibrate.tune import tune_model
from autoamp.dtypes import needs_loss_scale
from autoamp.errors import OptionError, UnsupportedModelError
from autoamp.model.convert import convert_model, revert_model
from autoamp.model.eligible import parameters_of
from autoamp.printable import class_name, printable_line


class Running:
    """A deep copy of a model, set up to run one way; the model is not changed.

    Attributes:
        way: the way.
        model: the copy.
        device: the device of the copy.
        seconds: the time of each timed step so far.
        data_seconds: the part of each of these that waited for data.
        loss_from: how the loss was made, in words.
    """

    def __init__(self, way: Way, model: nn.Module, task: Task) -> None:
        """Copies the model and sets up the copy.

        Raises:
            UnsupportedModelError: the model cannot be copied.
            OptionError: the model has no weight to train, or no method `generate`.
        """
        self.way, self.task = way, task
        self.model = copy_of(model).train(task.trains)
        self.device = device_of(model)
        self.seconds: list[float] = []
        self.data_seconds: list[float] = []
        self.loss_from = ""
        self._feed = Feed(task, self.device)
        if task.kind == "generate" and not hasattr(model, "generate"):
            raise OptionError(f"{class_name(model)} has no method `generate`")
        self._called: Any = self._prepared()
        self._scaler = None
        self._optimizer = None
        if task.trains:
            trained = [p for p in self.model.parameters() if p.requires_grad]
            if not trained:
                raise OptionError(
                    f"{class_name(model)} has no weight to train; ask for inference "
                    "(--infer, infer=True)"
                )
            self._optimizer = task.make_optimizer(trained)
            if way.kind == "autocast" and needs_loss_scale(way.low):
                self._scaler = torch.amp.GradScaler(self.device.type)

    def _prepared(self) -> Any:
        """Sets up the copy for this way; returns the callable of a step."""
        way = self.way
        options = way.options.replace(precision=way.low)
        if way.kind == "autoamp":
            backend = "inductor" if way.compiled else options.backend
            return convert_model(self.model, options.replace(backend=backend))
        if way.kind == "tuned":
            args, kwargs = self.batch()
            loss = None if self.task.loss_fn is None else self.task.loss_fn
            with torch.enable_grad():
                tune_model(self.model, args, kwargs, options, loss or self._loss)
            return self.model
        if way.kind == "half":
            self.model.to(way.low)
        return torch.compile(self.model) if way.compiled else self.model

    def _loss(self, output: Any) -> Tensor:
        loss, self.loss_from = self.task.loss_of(output)
        return loss

    def rewind(self) -> None:
        """Starts the data again from its first batch."""
        self._feed = Feed(self.task, self.device)

    def batch(self) -> Call:
        """The arguments of the next call, in the dtype of this way."""
        return self.as_taken(self._feed.next())

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
        with (
            _tf32(self.way.kind, self.device),
            torch.set_grad_enabled(self.task.trains),
            self._region(),
        ):
            if self.task.kind == "generate":
                return self._generate(args, kwargs)
            output = self._called(*args, **kwargs)
            return (self._loss(output), output) if self.task.trains else output

    def _generate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The same number of tokens in each way, whatever the model generates.
        number = self.task.tokens
        wanted = {"max_new_tokens": number, "min_new_tokens": number}
        generating: Any = self.model
        return generating.generate(*args, **{**kwargs, **wanted, "do_sample": False})

    def _region(self) -> contextlib.AbstractContextManager[Any]:
        if self.way.kind == "autocast":
            return torch.autocast(self.device.type, self.way.low)
        return contextlib.nullcontext()

    def backward(self, batch: Call) -> float | None:
        """Runs a forward and, in training, a backward; returns the loss or None."""
        output = self.forward(batch)
        if not self.task.trains:
            return None
        loss = output[0]
        with _tf32(self.way.kind, self.device):
            (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        return loss.detach()  # type: ignore[no-any-return]

    def update(self) -> None:
        """Steps the optimizer and drops the gradients."""
        if self._optimizer is None:
            return
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        self.forget()

    def forget(self) -> None:
        """Drops the gradients."""
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)

    def step(self, batch: Call) -> Any:
        """Runs one step; returns its loss, or None."""
        loss = self.backward(batch)
        self.update()
        return loss

    def close(self) -> None:
        """Reverts the copy, and releases its memory."""
        revert_model(self.model)
        self._called = self.model = nn.Module()
        self._optimizer = self._scaler = None


def copy_of(model: nn.Module) -> nn.Module:
    """A deep copy that is not converted.

    Raises:
        UnsupportedModelError: the model cannot be copied.
    """
    try:
        made = copy.deepcopy(model)
    except Exception as error:
        raise UnsupportedModelError(
            f"{class_name(model)} cannot be copied, and each way needs its own copy: "
            f"{printable_line(f'{type(error).__name__}: {error}', 300)}"
        ) from error
    return revert_model(made)


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's weights."""
    found = next((p.device for p in parameters_of(model)), None)
    return found or torch.device("cpu")


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
