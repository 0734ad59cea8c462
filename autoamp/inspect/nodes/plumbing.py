"""Nodes that the page hides at first: running statistics and counters.

A batch norm in training writes its running mean and variance, and counts its calls.
ResNet-50 has 159 such buffers, none of which has a precision to be decided.
"""

from __future__ import annotations

from collections.abc import Container
from itertools import zip_longest

from torch import fx

from autoamp import compat

_STATISTICS = ("running_mean", "running_var")


def plumbing_of(graph: fx.Graph, ops: Container[str]) -> frozenset[str]:
    """The nodes of `graph` that are plumbing.

    Plumbing is the running statistics of normalizations, and each node whose result
    reaches neither a float op nor the output, except float ops and unread inputs.

    Args:
        ops: the names of the float ops.
    """
    found: set[str] = set()
    for node in reversed(graph.nodes):
        readers = list(node.users)
        if node.op in ("placeholder", "get_attr"):
            hidden = bool(readers) and all(
                reader.name in found or _is_statistic(node, reader)
                for reader in readers
            )
        else:
            hidden = (
                node.op != "output"
                and node.name not in ops
                and all(reader.name in found for reader in readers)
            )
        if hidden:
            found.add(node.name)
    return frozenset(found)


def _is_statistic(node: fx.Node, reader: fx.Node) -> bool:
    """Whether `reader` reads `node` as running statistics only."""
    if not isinstance(reader.target, compat.OpOverload):
        return False
    names = [argument.name for argument in compat.schema(reader.target).arguments]
    read = dict(zip_longest(names[: len(reader.args)], reader.args)) | reader.kwargs
    roles = [name for name, value in read.items() if value is node]
    return bool(roles) and all(role in _STATISTICS for role in roles)
