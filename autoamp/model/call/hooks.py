"""Notices hooks on the modules of a model that the model's graphs do not guard.

Dynamo can guard that no module has a hook, but at the price of several guards for each
module.  Therefore a model's modules are searched for hooks only if a hook was
registered on any module since the last call, and Dynamo guards hooks only once the
search has found one.  A hook is missed if it was registered before the last call on a
module that has since replaced a module of the same class in the model.
"""

from __future__ import annotations

import weakref

from torch import nn

from autoamp import compat


class Hooks:
    """The hooks that calls of one conversion's models have met.

    Attributes:
        guarded: whether code compiled from now on guards the hooks of modules.
    """

    def __init__(self) -> None:
        self.guarded = False
        self._everywhere = False
        self._unhooked: dict[int, tuple[weakref.ref[nn.Module], int]] = {}

    def are_new(self, model: nn.Module) -> bool:
        """Whether there are hooks to guard, or hooks on all modules came or went."""
        if compat.hooks_everywhere() != self._everywhere:
            return True  # Dynamo never guards hooks on all modules
        if self.guarded:
            return False
        added = compat.hooks_of_others()
        known = self._unhooked.get(id(model))
        if known is not None and known[1] == added and known[0]() is model:
            return False
        if compat.has_hooks(model):
            return True
        for known_id, (other, _) in list(self._unhooked.items()):
            if other() is None:
                self._unhooked.pop(known_id, None)
        self._unhooked[id(model)] = weakref.ref(model), added
        return False

    def guard(self) -> bool:
        """Guards hooks from now on; returns whether the code must be compiled anew."""
        everywhere = compat.hooks_everywhere()
        if self.guarded and self._everywhere == everywhere:
            return False  # another thread was first
        self.guarded, self._everywhere = True, everywhere
        return True
