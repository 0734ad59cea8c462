"""One attribute of torch that the automatic mode has replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Patch:
    """`owner.name`, replaced by what `make` makes of it, until `undo`."""

    def __init__(
        self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Any]
    ) -> None:
        self.owner, self.name = owner, name
        self.original = getattr(owner, name)
        self.ours = make(self.original)
        setattr(owner, name, self.ours)

    def undo(self) -> None:
        """Puts the original back; under a patch of somebody else's ours stays."""
        if getattr(self.owner, self.name) is self.ours:
            setattr(self.owner, self.name, self.original)
