"""Entries whose training calls others hear of: the flight recorder, or a replay."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import nn

from autoamp.capture.engine import Engine
from autoamp.capture.thread import THREAD, inside_a_call
from autoamp.flight.instead import Replay
from autoamp.flight.recorder import FlightRecorder
from autoamp.model.call.entry import Entry

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class HeardEntry(Entry):
    """An entry whose calls with gradients `told` hears of; other calls are as ever."""

    def __init__(
        self,
        told: Any,
        engine: Engine,
        owner: type[nn.Module],
        name: str = "forward",
        *,
        of_class: bool = True,
    ) -> None:
        super().__init__(engine, owner, name, of_class=of_class)
        self.told = told

    def another(
        self, engine: Engine, owner: type[nn.Module], name: str, *, of_class: bool
    ) -> Entry:
        """An entry that the same recorder or replay hears of."""
        return type(self)(self.told, engine, owner, name, of_class=of_class)

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """As for `Entry`; where gradients are recorded, `told` hears of the call."""
        if not torch.is_grad_enabled() or THREAD.off or inside_a_call():
            return super().__call__(model, args, kwargs)
        args, kwargs = self.begun(model, args, kwargs)
        result = super().__call__(model, args, kwargs)
        self.told.end(result)
        return result

    @abstractmethod
    def begun(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments:
        """Tells of a call that begins; the arguments that it gets."""


class RecordedEntry(HeardEntry):
    """The entry of a model with `record=`."""

    told: FlightRecorder

    def begun(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments:
        """The arguments of the caller, which are noted."""
        self.told.begin(model, args, kwargs)
        return args, kwargs


class ReplayedEntry(HeardEntry):
    """The entry of a model in a replay, which may give recorded arguments."""

    told: Replay

    def begun(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments:
        """The arguments that the replay gives."""
        return self.told.begin(model, args, kwargs)
