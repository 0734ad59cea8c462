"""Watches how large the fp16 gradients inside a graph are, for the loss scale to fit.

The gradients that leave a graph do not tell: a gradient inside may overflow long before
they do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.graph_functions import checkpointed
from autoamp.node_by_node.promised import Promised
from autoamp.overflow.recorder import Recorder
from autoamp.overflow.trail import Trail


class Watched(Promised):
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
        see_gradient(self.magnitudes, n, value)
        return value

    def body(self, gm: fx.GraphModule) -> Callable[..., Any]:
        """The function that runs the body of a checkpointed region."""
        return Watched(gm, self.magnitudes).run


def see_gradient(magnitudes: list[torch.Tensor], n: fx.Node, value: Any) -> None:
    """Hooks the gradient of a node's result, if that is fp16, for its magnitude."""
    if (
        n.op == "call_function"
        and isinstance(value, torch.Tensor)
        and value.dtype == torch.float16
        and value.requires_grad
    ):
        compat.hook_gradient(value, functools.partial(_see, magnitudes))


@compat.never_captured
def _see(magnitudes: list[torch.Tensor], grad: torch.Tensor | None) -> None:
    if grad is None:  # no gradient flows back here: a later op cuts it off
        return
    if compat.is_batch(grad):
        magnitudes.append(torch.tensor(torch.inf))
    elif grad.numel():
        magnitudes.append(grad.detach().abs().amax().float())


def watched_run(
    gm: fx.GraphModule, trail: Trail | None, magnitudes: list[torch.Tensor] | None
) -> Callable[..., Any]:
    """A function that runs `gm` once, node by node, and watches its numbers.

    Args:
        trail: the trail that values and gradients are to leave, if any.
        magnitudes: a list for the magnitudes of fp16 gradients, if any.
    """
    also = None if magnitudes is None else functools.partial(see_gradient, magnitudes)
    if trail is not None:
        return Recorder(gm, trail, also=also).run
    assert magnitudes is not None, "nothing is to be watched"
    watched = Watched(gm, magnitudes)

    def run(*args: Any) -> Any:
        try:
            return watched.run(*args)
        finally:
            watched.env.clear()  # an error may hold `watched`, which holds inputs

    return run


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
