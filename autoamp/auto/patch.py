"""One attribute of torch that the automatic mode has replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Patch:
    """Replaces `owner.name` by `make(original)`, until `undo`.

    Args:
        stand_in: a function that has replaced the attribute before, and the original.
            The function is replaced by ours; if other code has patched over it, it
            stays, and calls `ours` itself.
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
        """Restores the original, unless other code has patched over ours."""
        if getattr(self.owner, self.name) is self.ours:
            setattr(self.owner, self.name, self.original)
