"""Names the op that an overflow came from, as far as the gradients still tell."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.nodes import module_paths, source_line
from autoamp.graph_functions import low_weight_unscaled, unscale_grad
from autoamp.op_names import op_name
from autoamp.scaling.graph_run import GraphRun


def blame(runs: Sequence[GraphRun], params: Sequence[torch.Tensor]) -> str:
    """A sentence that names the last op of the forward whose gradient is not finite.

    A backward runs from the end of the forward to its beginning, and a gradient that is
    not finite makes the gradients after it not finite either: so the overflow came from
    the last such op.
    """
    bad = {id(p) for p in params if p.grad is not None and _not_finite(p.grad)}
    for run in reversed(runs):
        if not any(bool(flag) for flag in run.found_inf):
            continue
        captured = run.origin.graph()
        if captured is None:  # the graph was garbage-collected
            continue
        graph = captured.gm.graph
        inputs = [n for n in graph.nodes if n.op == "placeholder"]
        by_id = dict(zip(run.leaves.ids, run.origin.positions, strict=True))
        weights = {inputs[at] for leaf, at in by_id.items() if leaf in bad}
        for node in reversed(graph.nodes):
            hit = next((w for w in _read_weights(node) if w in weights), None)
            if hit is not None:
                return f"the gradient of {_named(hit, node)} is not finite"
        return f"a gradient that leaves {run.scaling.label} is not finite"
    return "the gradients are not finite"


def _not_finite(grad: torch.Tensor) -> bool:
    flag = torch.zeros(1, device=grad.device)
    compat.check_finite(grad, flag)
    return bool(flag)


def _read_weights(node: fx.Node) -> list[fx.Node]:
    """The nodes that op `node` reads; a node of loss scaling stands for its input."""
    if node.target in (low_weight_unscaled, unscale_grad):
        return []  # part of the edge, not an op of the model
    found = []
    for source in node.all_input_nodes:
        if source.target in (low_weight_unscaled, unscale_grad):
            found.append(source.all_input_nodes[0])
        else:
            found.append(source)
    return found


def _named(weight: fx.Node, op: fx.Node) -> str:
    name = op_name(op.target) if isinstance(op.target, compat.OpOverload) else op.name
    paths = module_paths(op)
    where = f" in {paths[-1]}" if paths else ""
    line = source_line(op)
    return f"{weight.name}, read by {name}{where}{f' ({line})' if line else ''},"
