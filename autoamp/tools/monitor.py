"""Writes the loss scale, the skipped steps and their culprits while a model trains."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from autoamp import compat
from autoamp.errors import OptionError
from autoamp.messages import class_name
from autoamp.report.figures import LossScaleReport
from autoamp.report.reporting import loss_scale_of
from autoamp.runtime.conversion import conversion_of
from autoamp.tools.writers import target_of
from autoamp.training.boundary import innermost
from autoamp.training.masters import has_half
from autoamp.training.meter import meter_of, shares_of

logger = logging.getLogger(__name__)


class Monitor:
    """Writes the state of a model's loss scaling after each step.

    A plain loop calls `step` after the optimizer's step; the same object is a callback
    for the `Trainer` of Hugging Face and of Lightning.  For each converted model it
    writes these curves, in a group `autoamp`, or `autoamp/<path>` for a converted
    module inside the model:

    - `loss_scale`: the factor by which gradients are multiplied inside the graphs;
    - `skipped_steps`: the number of steps skipped so far for an overflow;
    - `captured_graphs`: the number of graphs; a number that keeps rising shows a model
      that is captured again and again;

    and a text `skipped`, the op that is blamed for each skipped step.  bf16 has no loss
    scaling, so that only `captured_graphs` is written.  For any model with weights in
    half precision, converted or not, it writes for each kind of weights:

    - `autoamp/updates/norm` and so on: the share of the optimizer's updates that
      arrives; 1 where fp32 masters keep all of them;
    - `autoamp/updates_in_half/norm`: the share that half weights alone could make.

    Args:
        writer: where the curves go: a TensorBoard `SummaryWriter`, the run of
            `wandb.init()`, the module `mlflow`, an `Accelerator` with trackers, or an
            object with one of their methods `add_scalar(tag, value, step)`,
            `log_metrics(values, step=)` and `log(values, step=)`.  By default, under
            Lightning, the trainer's own loggers.
        model: the model that trains.  Trainers pass their model themselves.
        every: the number of steps from one write to the next, at least 1.

    Raises:
        OptionError: an argument cannot be used.

    Example:
        >>> import autoamp, torch
        >>> class Curves(dict):
        ...     def add_scalar(self, tag, value, step):
        ...         self.setdefault(tag, []).append((step, value))
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = autoamp.convert(
        ...     model, optimizer, precision="fp16", loss_scale=1024.0, do_no_harm=False
        ... )
        >>> monitor = autoamp.Monitor(Curves(), model)
        >>> for _ in range(2):
        ...     model(torch.ones(4, 8)).sum().backward()
        ...     optimizer.step()
        ...     monitor.step()
        >>> monitor.writer["autoamp/loss_scale"]
        [(1, 1024.0), (2, 1024.0)]

    """

    def __init__(
        self,
        writer: Any = None,
        model: nn.Module | None = None,
        *,
        every: int = 1,
    ) -> None:
        """Makes a monitor, before the first step."""
        if writer is not None:
            target_of(writer)
        if model is not None and not isinstance(model, nn.Module):
            raise OptionError(f"model={model!r} is not a torch.nn.Module")
        if not isinstance(every, int) or every < 1:
            raise OptionError(f"every={every!r} is not a number of steps, 1 or more")
        self.writer, self.model, self.every = writer, model, every
        self._step = 0
        self._told: dict[str, tuple[str, ...]] = {}
        self._warned = self._metered = False

    def step(self, step: int | None = None) -> None:
        """Writes the state after a step; call it after the optimizer's step.

        Args:
            step: the number of the step; by default steps are counted from 1.

        Raises:
            OptionError: the monitor has no model or no writer.
        """
        if self.model is None or self.writer is None:
            missing = "model" if self.model is None else "writer"
            raise OptionError(
                f"the monitor has no {missing}: autoamp.Monitor(SummaryWriter(), model)"
            )
        self._step = self._step + 1 if step is None else step
        if self._step % self.every == 0:
            self._write(self.model, [self.writer], self._step)

    # -- as a callback of Hugging Face's Trainer -----------------------------------

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Checks that there is a writer, since Hugging Face's Trainer gives none.

        Raises:
            OptionError: the monitor has no writer.
        """
        if self.writer is None:
            raise OptionError(
                "Hugging Face's Trainer gives its callbacks no writer; pass one: "
                "autoamp.Monitor(torch.utils.tensorboard.SummaryWriter(folder)), or "
                "autoamp.Monitor(wandb.init()), or autoamp.Monitor(mlflow)"
            )

    def on_step_end(self, _: Any, state: Any, *__: Any, **kwargs: Any) -> None:
        """Writes after each step of Hugging Face's Trainer."""
        model = self.model if self.model is not None else kwargs.get("model")
        due = state.is_world_process_zero and state.global_step % self.every == 0
        if due and self.writer is not None and model is not None:
            self._write(model, [self.writer], state.global_step)

    # -- as a callback of Lightning's Trainer --------------------------------------

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any, **__: Any) -> None:
        """Writes after each batch that ended with a step of Lightning's Trainer."""
        step = trainer.global_step
        if step == self._step or step % self.every or not trainer.is_global_zero:
            return
        self._step = step
        model = self.model if self.model is not None else module
        writers = trainer.loggers if self.writer is None else [self.writer]
        self._write(model, writers, step)
        if not writers:
            self._warn("the monitor has no writer, and the trainer has no logger")

    def setup(self, *_: Any, **__: Any) -> None:
        """Does nothing; Lightning calls it."""

    def teardown(self, *_: Any, **__: Any) -> None:
        """Does nothing; Lightning calls it."""

    def state_dict(self) -> dict[str, Any]:
        """Empty: the model and the optimizer hold the state."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Does nothing: a monitor has no state of its own."""

    @property
    def state_key(self) -> str:
        """The name of this callback in a checkpoint of Lightning."""
        return f"autoamp.Monitor.{id(self)}"

    def __getattr__(self, name: str) -> Any:
        """Ignores all other events of a trainer."""
        if name.startswith("on_"):
            return _ignored
        raise AttributeError(f"autoamp.Monitor has no attribute {name!r}")

    # -- writing -------------------------------------------------------------------

    def _write(self, model: nn.Module, writers: Sequence[Any], step: int) -> None:
        trained_in_half = has_half(model.parameters())
        values = self._updates(model) if trained_in_half else {}
        texts: list[tuple[str, str]] = []
        found = trained_in_half
        for group, graphs, state in _converted_in(model):
            found = True
            values[f"{group}/captured_graphs"] = graphs
            if state is None:
                continue
            values[f"{group}/loss_scale"] = state.scale
            values[f"{group}/skipped_steps"] = state.skipped_steps
            texts += [(f"{group}/skipped", why) for why in self._news(group, state)]
        if not found:
            self._warn(
                f"no module of {class_name(model)} is converted; "
                "call autoamp.convert(model)"
            )
        for target in map(target_of, writers):
            if values:
                target.numbers(values, step)
            for tag, why in texts:
                target.text(tag, why, step)

    def _updates(self, model: nn.Module) -> dict[str, float]:
        """The shares of updates that arrive, of a model with half weights."""
        if not self._metered:
            self._metered = True
            held = set(map(id, model.parameters()))
            for optimizer in compat.optimizers_and_scalers()[0]:
                groups = getattr(optimizer, "param_groups", ())
                if any(id(p) in held for group in groups for p in group["params"]):
                    meter_of(innermost(optimizer))
        found: dict[str, float] = {}
        for each in shares_of(model):
            found[f"autoamp/updates/{each.kind}"] = 1.0 if each.masters else each.share
            found[f"autoamp/updates_in_half/{each.kind}"] = each.share
        return found

    def _news(self, group: str, state: LossScaleReport) -> list[str]:
        """The reasons of skipped steps that are new or have changed."""
        known = self._told.get(group, ())
        self._told[group] = state.skips
        if known == state.skips:
            return []
        return [
            why
            for number, why in enumerate(state.skips)
            if number >= len(known) or known[number] != why
        ]

    def _warn(self, why: str) -> None:
        if not self._warned:
            logger.warning("autoamp.Monitor writes nothing: %s", why)
        self._warned = True


def _converted_in(
    model: nn.Module,
) -> Iterator[tuple[str, int, LossScaleReport | None]]:
    """The group, number of graphs and loss scaling of each converted module."""
    for path, module in model.named_modules():
        conversion = conversion_of(module)
        if conversion is None or conversion.engine is None:
            continue
        record = conversion.engine.record
        group = f"autoamp/{path}" if path else "autoamp"
        yield group, len(record.graphs), loss_scale_of(record.scaling)


def _ignored(*_: Any, **__: Any) -> None:
    """Ignores an event."""
