"""One attribute of torch that the automatic mode has replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Patch:
    """`owner.name`, replaced by what `make` makes of it, until `undo`.

    Args:
        stand_in: what has stood there, and what it stood before.  It is replaced, or,
            where somebody has patched over it, calls `ours` itself.
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        make: Callable[[Callable[..., Any]], Any],
        stand_in: tuple[Any, Any] | None = None,
    ) -> None:
        self.owner, self.name = owner, name
        replaced, self.original = stand_in or (getattr(owner, name),) * 2
        self.ours = make(self.original)
        if getattr(owner, name) is replaced:
            setattr(owner, name, self.ours)

    def undo(self) -> None:
        """Puts the original back; under a patch of somebody else's ours stays."""
        if getattr(self.owner, self.name) is self.ours:
            setattr(self.owner, self.name, self.original)
