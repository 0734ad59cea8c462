"""The entry of a model with `record=`: tells the flight recorder of training calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autoamp.capture.engine import Engine
from autoamp.capture.thread import THREAD, inside_a_call
from autoamp.flight.recorder import FlightRecorder
from autoamp.model.call.entry import Entry


class RecordedEntry(Entry):
    """An entry whose calls with gradients are recorded; other calls are as ever."""

    def __init__(
        self,
        recorder: FlightRecorder,
        engine: Engine,
        owner: type[nn.Module],
        name: str = "forward",
        *,
        of_class: bool = True,
    ) -> None:
        super().__init__(engine, owner, name, of_class=of_class)
        self.recorder = recorder

    def another(
        self, engine: Engine, owner: type[nn.Module], name: str, *, of_class: bool
    ) -> Entry:
        """A recorded entry with the same recorder."""
        return RecordedEntry(self.recorder, engine, owner, name, of_class=of_class)

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """As for `Entry`, with the call recorded where gradients are."""
        if not torch.is_grad_enabled() or THREAD.off or inside_a_call():
            return super().__call__(model, args, kwargs)
        self.recorder.begin(model, args, kwargs)
        result = super().__call__(model, args, kwargs)
        self.recorder.end(result)
        return result
