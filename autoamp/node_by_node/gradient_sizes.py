"""Notes how large the fp16 gradients inside a graph are, to choose the loss scale.

The gradients that leave a graph are not enough: a gradient inside may overflow at a
scale at which they do not.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.dtypes import needs_loss_scale
from autoamp.node_by_node.observer import Observer


class GradientSizes(Observer):
    """Keeps the largest number of each fp16 gradient in a graph.

    Attributes:
        magnitudes: one 0-dim fp32 tensor for each gradient, in the order of the
            backward, at the scale the graph ran with; infinite where the size is
            unknown (inside `vmap`).
    """

    def __init__(self, magnitudes: list[torch.Tensor]) -> None:
        self.magnitudes = magnitudes

    def after(self, _: fx.Interpreter, n: fx.Node, value: Any) -> Any:
        """Returns the value; hooks its gradient where the value is fp16."""
        if (
            n.op == "call_function"
            and isinstance(value, torch.Tensor)
            and needs_loss_scale(value.dtype)
            and value.requires_grad
        ):
            compat.hook_gradient(value, functools.partial(_note_size, self.magnitudes))
        return value


@compat.never_captured
def _note_size(magnitudes: list[torch.Tensor], grad: torch.Tensor | None) -> None:
    if grad is None:  # no gradient flows back here: a later op cuts it off
        return
    grad = compat.own_memory(grad)  # ranks agree on the largest
    if compat.is_batch(grad):
        unknown = torch.tensor(torch.inf, dtype=torch.float32, device="cpu")
        magnitudes.append(unknown)
    elif grad.numel():
        magnitudes.append(grad.detach().abs().amax().float())
