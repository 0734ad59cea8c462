"""What stands in for the flight recorder while a step is replayed.

`convert` looks here: `autoamp replay` runs a script whose models are converted by the
script itself, or by the automatic mode.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from autoamp.options import Options


class Replay(Protocol):
    """Hears of the calls and steps of all models that are converted meanwhile."""

    @property
    def listeners(self) -> dict[str, Any]:
        """The arguments of `new_scaling` by which the replay hears of a training."""

    def options_for(self, model: nn.Module, options: Options) -> Options:
        """The options of a conversion that would have had `options`."""

    def begin(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call that would have had these."""

    def end(self, result: Any) -> None:
        """Is told the result of a call."""


REPLAYS: list[Replay] = []
"""The replay that is running; the last one counts."""


def running() -> Replay | None:
    """The replay that is running, or None."""
    return REPLAYS[-1] if REPLAYS else None
