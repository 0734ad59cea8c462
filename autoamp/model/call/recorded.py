"""The entry of a model with `record=`, whose training calls a writer hears of."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autoamp.capture.engine import Engine
from autoamp.capture.thread import THREAD, inside_a_call
from autoamp.model.call.entry import Entry
from autoamp.snapshot.write import SnapshotWriter


class RecordedEntry(Entry):
    """An entry that tells a writer of calls with gradients; others are as ever."""

    def __init__(
        self,
        writer: SnapshotWriter,
        engine: Engine,
        owner: type[nn.Module],
        *,
        of_class: bool = True,
    ) -> None:
        super().__init__(engine, owner, of_class=of_class)
        self.writer = writer

    def another(
        self, engine: Engine, owner: type[nn.Module], name: str, *, of_class: bool
    ) -> Entry:
        """An entry of another method is told of to nobody: a replay calls `forward`."""
        if name != self.name:
            return super().another(engine, owner, name, of_class=of_class)
        return RecordedEntry(self.writer, engine, owner, of_class=of_class)

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """As for `Entry`; where gradients are recorded, the writer hears of it."""
        if not torch.is_grad_enabled() or THREAD.off or inside_a_call():
            return super().__call__(model, args, kwargs)
        self.writer.begin(model, args, kwargs)
        result = super().__call__(model, args, kwargs)
        self.writer.returned(result)
        return result
