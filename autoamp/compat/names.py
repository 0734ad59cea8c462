"""Functions and operators that torch has under private names alone."""

from __future__ import annotations

from typing import Any

import torch
import torch._higher_order_ops.wrap
from torch._functorch import predispatch

# Targets of nodes that change the mode of the nodes after them in a graph.
SET_GRAD = torch._C._set_grad_enabled
ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast
CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
COND = torch.ops.higher_order.cond
MAP = torch.ops.higher_order.map_impl
SCAN = torch.ops.higher_order.scan
WHILE_LOOP = torch.ops.higher_order.while_loop
# Dynamo's graphs call this function for `x.data`; the stubs do not know the name.
GET_DATA: Any = getattr(torch._C._autograd, "_get_data_attr")  # noqa: B009
MODE_CHANGES = frozenset({SET_GRAD, ENTER_AUTOCAST, EXIT_AUTOCAST})

# Where a transform of torch.func starts and ends in Dynamo's graphs.
TRANSFORM_ENTRIES, TRANSFORM_EXITS = (
    frozenset(
        getattr(module, f"_{transform}_{change}_nesting")
        for module in (torch._C._functorch, predispatch)
        for transform in ("vmap", "grad", "jvp")
        if hasattr(module, f"_{transform}_{change}_nesting")  # 2.11 has two of "jvp"
    )
    for change in ("increment", "decrement")
)
# An op that calls a sub-graph, and does nothing else.
WRAP = torch.ops.higher_order.wrap

# The op that calls a captured custom autograd Function: a forward and a backward.
CUSTOM_FUNCTION: Any = torch._functorch.autograd_function.autograd_function_apply

# The module and name by which `clip_grad_norm_` finds its norm function.
TOTAL_NORM: tuple[Any, str] = (torch.nn.utils.clip_grad, "_get_total_norm")


def under_custom_fwd(body: torch.fx.GraphModule) -> bool:
    """Whether the graph is of a `forward` decorated with `torch.amp.custom_fwd`.

    Dynamo's graphs keep nothing of the decorator but its frame in the stack traces.
    Without stack traces the answer is no.
    """
    return any(map(in_custom_fwd, body.graph.nodes))


def in_custom_fwd(node: torch.fx.Node) -> bool:
    """Whether a call was made in a `forward` decorated with `torch.amp.custom_fwd`."""
    return "in decorate_fwd" in (node.stack_trace or "")
