"""The writers of a monitor: TensorBoard, W&B, MLflow, and loggers of Lightning.

Each kind of writer is known by one method of its own; nothing is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from autoamp.errors import OptionError


class Target(NamedTuple):
    """The ways to write numbers by their tags, and a text; each with its step."""

    numbers: Callable[[Mapping[str, float], int], None]
    text: Callable[[str, str, int], None]


def target_of(writer: Any) -> Target:
    """The target for an object that has one of the known methods.

    Raises:
        OptionError: the object has none of them.
    """
    for method, kind in _KINDS.items():
        if callable(getattr(writer, method, None)):
            return kind(writer)
    raise OptionError(
        f"writer={writer!r} has none of the methods add_scalar(tag, value, step), "
        "log_metrics(values, step) and log(values, step); pass a "
        "torch.utils.tensorboard.SummaryWriter, the module mlflow, the run of "
        "wandb.init(), or an object like one of them"
    )


def _scalars(writer: Any) -> Target:
    """TensorBoard's `SummaryWriter`, or an object with its `add_scalar`."""

    def numbers(values: Mapping[str, float], step: int) -> None:
        for tag, value in values.items():
            writer.add_scalar(tag, value, step)

    return Target(numbers, getattr(writer, "add_text", _not_written))


def _metrics(writer: Any) -> Target:
    """The module `mlflow`, or a logger of Lightning."""

    def numbers(values: Mapping[str, float], step: int) -> None:
        writer.log_metrics(dict(values), step=step)

    def tag_run(tag: str, text: str, _: int) -> None:
        writer.set_tag(tag, text)  # MLflow has no texts by step

    experiment = getattr(writer, "experiment", None)  # of a logger of Lightning
    otherwise = tag_run if hasattr(writer, "set_tag") else _not_written
    return Target(numbers, getattr(experiment, "add_text", otherwise))


def _rows(writer: Any) -> Target:
    """A run of W&B, the module `wandb`, or an `Accelerator` with its trackers."""

    def write(values: Mapping[str, Any], step: int) -> None:
        # W&B drops a row that is older than the row it fills at present, which the
        # script's own calls of `log` move on.
        now = getattr(getattr(writer, "run", writer), "step", None)
        writer.log(dict(values), step=max(step, now) if isinstance(now, int) else step)

    return Target(write, lambda tag, text, step: write({tag: text}, step))


def _not_written(*_: object) -> None:
    """The writer has no place for texts."""


_KINDS: Mapping[str, Callable[[Any], Target]] = {
    "add_scalar": _scalars,
    "log_metrics": _metrics,
    "log": _rows,
}
"""The method by which a kind of writer is known; the first that a writer has counts."""
