"""Whether the modules of a model have hooks that its graphs know nothing of.

Dynamo can guard that no module has a hook, with several guards for each module.
Instead, a model's modules are looked through where anybody has registered a hook on
anything since the last call; Dynamo guards their hooks once there are any.  A hook that
was registered before that call, on a module that has come into the model since, is not
met where a module of the same class was there before.
"""

from __future__ import annotations

import weakref

from torch import nn

from autoamp import compat


class Hooks:
    """The hooks that calls of one conversion's models meet.

    Attributes:
        guarded: Dynamo guards the hooks of modules in what is compiled from now on.
    """

    def __init__(self) -> None:
        self.guarded = False
        self._everywhere = False
        self._unhooked: dict[int, tuple[weakref.ref[nn.Module], int]] = {}

    def are_new(self, model: nn.Module) -> bool:
        """Whether there are hooks to guard, or those on all modules have changed."""
        if compat.hooks_everywhere() != self._everywhere:
            return True  # of these Dynamo guards none, ever
        if self.guarded:
            return False
        added = compat.hooks_of_others()
        known = self._unhooked.get(id(model))
        if known is not None and known[1] == added and known[0]() is model:
            return False
        if added is None or compat.has_hooks(model):
            return True
        for place, (other, _) in list(self._unhooked.items()):
            if other() is None:
                self._unhooked.pop(place, None)
        self._unhooked[id(model)] = weakref.ref(model), added
        return False

    def guard(self) -> bool:
        """From now on they are guarded; whether that is new."""
        everywhere = compat.hooks_everywhere()
        if self.guarded and self._everywhere == everywhere:
            return False  # another thread was first
        self.guarded, self._everywhere = True, everywhere
        return True
