"""Copies of weights that one call needs between two steps: no sentinel pays for them.

A sentinel keeps a copy until the next write, over many calls.  A training without
micro-batches makes one call between two steps, so each call has to refresh the copies
in any case, and a sentinel would be made only to be dropped.  After several such steps
a graph's copies get no sentinels any more: the step announces its write, and the next
call refreshes all of them by one multi-tensor copy, whose lists were made before.

Whatever is different (a second call before a step, another graph or thread, a weight
in other memory, a copy that is still held) ends this, and each copy is looked at by
itself again, as one that has no sentinel: it is refreshed.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence

import torch

from autoamp import compat
from autoamp.weights.sentinels import (
    PLANS,
    Copy,
    Stale,
    write,
)

STEPS = 8
"""After so many steps in a row with one call each, copies get no sentinels."""


class OnceAStep:
    """The copies of one graph that is called once between two steps.

    Attributes:
        announced: whether a write to weights was announced after the last call.
        count: how many copies each call refreshes; the others have sentinels.
        devices: the devices of the weights.
    """

    def __init__(
        self,
        copies: Sequence[Copy],
        stale: Sequence[Stale],
        addresses: list[Hashable],
        devices: set[torch.device],
    ) -> None:
        """Args: `stale` are those of `copies` that were just refreshed.

        The caller holds none of the copies' tensors, because holders are counted here.
        """
        self.announced = False
        self.count = len(stale)
        self.devices = devices
        self._addresses = addresses
        self._trainer = threading.get_ident()
        self._refreshed = [each.copy for each in stale]
        ids = {id(copy) for copy in self._refreshed}
        self._at = [at for at, copy in enumerate(copies) if id(copy) in ids]
        self._versions = [copy.version for copy in self._refreshed]
        self._lows = [copy.low for copy in copies]
        self._holders = compat.Holders([copy.low for copy in self._refreshed])
        PLANS.clear()
        for copy in self._refreshed:
            copy.once_a_step = self

    def may_refresh(self, addresses: list[Hashable]) -> bool:
        """Whether a call of this thread, at these addresses, may refresh all copies."""
        return (
            self.announced
            and addresses == self._addresses
            and self._trainer == threading.get_ident()
            and torch.is_grad_enabled()
            and not torch.is_inference_mode_enabled()
        )

    def refresh(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Refreshes the copies in place; empty where some copy is held, or all ended.

        The caller has switched gradients off, and holds the lock.
        """
        if not self._lows or self._holders.have_grown:
            return []
        lows, copies = [*self._lows], self._refreshed
        written = [weights[at] for at in self._at]
        self._versions = [*map(compat.version, written)]
        self.announced = False
        write(copies, written)
        return lows

    def end(self) -> None:
        """Has each copy looked at by itself from now on."""
        PLANS.clear()
        for copy, version in zip(self._refreshed, self._versions, strict=True):
            copy.once_a_step, copy.version, copy.steps = None, version, 0
        self._refreshed, self._lows, self.announced = [], [], False
        self._holders = compat.Holders([])
