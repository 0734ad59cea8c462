"""What a step that has begun writing goes back to."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoamp.optimizer.step import OptimizerBoundary


class Hopeless(Exception):  # noqa: N818 (never reaches the user)
    """An overflow that no lower scale takes away; carries the loss."""


class Snapshot:
    """Weights and state of an optimizer, to go back to."""

    def __init__(self, boundary: OptimizerBoundary) -> None:
        self.optimizer = boundary.optimizer
        self.params = boundary.weights
        self.values = [p.detach().clone() for p in self.params]
        self.state = self._copied(self.optimizer.state)

    def restore(self) -> None:
        with torch.no_grad():
            for param, value in zip(self.params, self.values, strict=True):
                param.copy_(value)
        self.optimizer.state.clear()
        self.optimizer.state.update(self.state)

    def holds(self) -> bool:
        """Whether nothing has been written since."""
        now = [p.detach() for p in self.params], self._copied(self.optimizer.state)
        pairs = zip(
            pytree.tree_leaves(now),
            pytree.tree_leaves((self.values, self.state)),
            strict=False,
        )
        return len(now[1]) == len(self.state) and all(
            torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
            for a, b in pairs
        )

    def _copied(self, state: Any) -> Any:
        # The keys are the weights themselves.
        return copy.deepcopy(dict(state), {id(p): p for p in self.params})
