"""Why a node must stay fp32 whatever its op's category: facts about this very call."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence

import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.facts import Facts, NodeFacts, argument
from autoamp.ops import base_name

LAYER_NORMS = frozenset({"aten::layer_norm", "aten::native_layer_norm"})

LAYER_NORM_ROWS = 256
"""Rows beyond which a sum of ones is no longer exact in bf16 (8 bits).

On torch 2.13's CPU a bf16 layer norm gave 512 as the weight gradient over 16000 rows of
ones, an fp16 one 4096."""

_GATHERS = frozenset(
    {"aten::embedding", "aten::index", "aten::index_select", "aten::gather"}
)


def pin_reason(
    node: fx.Node, fact: NodeFacts, graph: Facts, keep: Sequence[str]
) -> str | None:
    """Why this call must stay fp32, or None.

    Args:
        keep: the user's module-path patterns.
    """
    for pattern in keep:
        if any(fnmatch.fnmatchcase(module, pattern) for module in fact.modules):
            return f"kept in fp32 by keep={pattern!r}"
    if fact.autocast is not None:
        state = "on" if fact.autocast else "off"
        return f"inside the model's own torch.autocast region, switched {state}"
    if fact.mixes_floats:
        return "has operands of another float dtype: left as the user wrote it"
    assert isinstance(node.target, compat.OpOverload)
    if torch.Tag.nondeterministic_seeded in node.target.tags and not fact.operands:
        return "draws random numbers: another dtype would draw others"
    if fact.storage in graph.mutated and fact.storage in graph.outside:
        return "writes to, or views, a tensor that exists outside the graph"
    return _sums_gradients_low(node, fact, graph)


def _sums_gradients_low(node: fx.Node, fact: NodeFacts, graph: Facts) -> str | None:
    """Ops whose backward kernels would sum many gradients in the low dtype."""
    assert isinstance(node.target, compat.OpOverload)
    base = base_name(node.target)
    if not fact.requires_grad:
        return None
    if base in _GATHERS and fact.operands:
        table = fact.operands[0].value
        if table in graph.weights and graph.nodes[table].requires_grad:
            return (
                "its backward sums the gradients of rows used many times in the "
                "dtype of the table"
            )
    if base in LAYER_NORMS and fact.device == "cpu" and len(fact.operands) > 1:
        size = math.prod(compat.hint(s) for s in argument(node, "normalized_shape"))
        if fact.numel >= LAYER_NORM_ROWS * size:
            return (
                "torch's CPU kernel sums its weight gradient over the rows in the low "
                "dtype"
            )
    return None
