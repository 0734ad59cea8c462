"""Finds attention whose mask is the causal one, computed from sizes alone.

Captured, a model of transformers makes its causal mask from index numbers, and the
attention reads the mask, widens it and keeps it for the backward.  A kernel that is
told `is_causal=True` needs no mask, and skips the products that the mask hides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from autoamp import compat
from autoamp.ops import has_effect

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
MASK, DROPOUT, CAUSAL = 3, 4, 5
"""The positions of `attn_mask`, `dropout_p` and `is_causal` among the arguments."""

_LARGEST = 2**26
"""The most elements of a mask that is computed here: 8192 queries by 8192 keys."""


def causal_attention(graph: fx.Graph) -> Iterator[fx.Node]:
    """The calls of attention with a mask that hides just the keys after each query."""
    known: dict[fx.Node, bool] = {}
    for node in graph.find_nodes(op="call_function", target=ATTENTION):
        mask = node.args[MASK] if len(node.args) > MASK else None
        says_causal = len(node.args) > CAUSAL and node.args[CAUSAL]
        if not isinstance(mask, fx.Node) or says_causal:
            continue
        if mask not in known:
            known[mask] = _is_causal(mask)
        if known[mask]:
            yield node


def _is_causal(mask: fx.Node) -> bool:
    value = mask.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() < 2:
        return False
    sizes = value.shape
    if not all(isinstance(s, int) for s in sizes) or math.prod(sizes) > _LARGEST:
        return False
    calls = made_from_sizes(mask)
    if calls is None:
        return False
    with compat.on_real_numbers():
        try:
            found = computed(calls)
        except Exception:  # noqa: BLE001 - the graph runs as it is, with its mask
            return False
        seen = torch.ones(sizes[-2:], dtype=torch.bool, device="cpu").tril()
        if found.dtype == torch.bool:
            return bool((found == seen).all())
        hidden = found <= torch.finfo(torch.float32).min
        return bool(((found == 0) & seen | hidden & ~seen).all())


def made_from_sizes(mask: fx.Node) -> list[fx.Node] | None:
    """The calls that make `mask`, in order; None if they read any input or weight."""
    found: dict[fx.Node, None] = {}
    todo = [mask]
    while todo:
        node = todo.pop()
        if not isinstance(node.target, compat.OpOverload) or has_effect(node):
            return None
        found.pop(node, None)
        found[node] = None
        todo.extend(node.all_input_nodes)
    order = {node: i for i, node in enumerate(mask.graph.nodes)}
    return sorted(found, key=order.__getitem__)


def computed(calls: list[fx.Node]) -> Tensor:
    values: dict[fx.Node, Any] = {}
    for node in calls:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        args, kwargs = fx.node.map_aggregate((args, kwargs), _on_cpu)
        assert callable(node.target)
        values[node] = node.target(*args, **kwargs)
    result: Tensor = values[calls[-1]]
    return result


def _on_cpu(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value
