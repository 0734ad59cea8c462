"""Watches how large the fp16 gradients inside a graph are, for the loss scale to fit.

The gradients that leave a graph do not tell: a gradient inside may overflow long before
they do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.graph_functions import checkpointed


class Watched(fx.Interpreter):
    """Runs a graph as it is, and keeps the largest number of each fp16 gradient in it.

    Attributes:
        magnitudes: one 0-dim fp32 tensor for each gradient, in the order of the
            backward, at the scale the graph ran with; infinite where the size cannot be
            told.
    """

    def __init__(self, gm: fx.GraphModule, magnitudes: list[torch.Tensor]) -> None:
        super().__init__(gm)
        self.magnitudes = magnitudes

    def run_node(self, n: fx.Node) -> Any:
        """Runs one node and hooks the gradient of its result, if that is fp16."""
        value = super().run_node(n)
        if (
            n.op == "call_function"
            and isinstance(value, torch.Tensor)
            and value.dtype == torch.float16
            and value.requires_grad
        ):
            compat.hook_gradient(value, self._see)
        return value

    def call_function(self, target: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs one call; a checkpointed region's body runs node by node as well."""
        if target is checkpointed:
            body, *rest = args
            args = (Watched(body, self.magnitudes).run, *rest)
        return super().call_function(target, args, kwargs)

    @compat.never_captured
    def _see(self, grad: torch.Tensor | None) -> None:
        if grad is None:  # no gradient flows back here: a later op cuts it off
            return
        if compat.is_batch(grad):
            self.magnitudes.append(torch.tensor(torch.inf))
        elif grad.numel():
            self.magnitudes.append(grad.detach().abs().amax().float())


def can_watch(gm: fx.GraphModule) -> bool:
    """Whether every op of `gm` is run as a node: ops of branches and loops are not."""
    bodies = [n for n in gm.graph.nodes if n.op == "get_attr" and _body(gm, n)]
    return all(
        user.target is checkpointed and can_watch(_body(gm, node))
        for node in bodies
        for user in node.users
    )


def _body(gm: fx.GraphModule, node: fx.Node) -> Any:
    """The graph that a node names, or None."""
    found: Any = gm
    for name in str(node.target).split("."):
        found = getattr(found, name)
    return found if isinstance(found, fx.GraphModule) else None
