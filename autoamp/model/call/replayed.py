"""The entry of a model in a replay: its calls may be given recorded arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autoamp.capture.engine import Engine
from autoamp.capture.thread import THREAD, inside_a_call
from autoamp.flight.instead import Replay
from autoamp.model.call.entry import Entry


class ReplayedEntry(Entry):
    """An entry whose calls with gradients a replay hears of; others are as ever."""

    def __init__(
        self,
        replay: Replay,
        engine: Engine,
        owner: type[nn.Module],
        name: str = "forward",
        *,
        of_class: bool = True,
    ) -> None:
        super().__init__(engine, owner, name, of_class=of_class)
        self.replay = replay

    def another(
        self, engine: Engine, owner: type[nn.Module], name: str, *, of_class: bool
    ) -> Entry:
        """An entry of the same replay."""
        return ReplayedEntry(self.replay, engine, owner, name, of_class=of_class)

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """As for `Entry`, with the replay's arguments where gradients are recorded."""
        if not torch.is_grad_enabled() or THREAD.off or inside_a_call():
            return super().__call__(model, args, kwargs)
        args, kwargs = self.replay.begin(model, args, kwargs)
        result = super().__call__(model, args, kwargs)
        self.replay.end(result)
        return result
