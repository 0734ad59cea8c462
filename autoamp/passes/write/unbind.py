"""Puts one `unbind` in the place of selects that together show a whole tensor.

    query = qkv[0];  key = qkv[1];  value = qkv[2]

The backward of each select writes zeros as large as `qkv` and one part of it, and the
three are then added.  The backward of `unbind` stacks the three gradients: the same
numbers, with a fifth of the bytes.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterator

import torch
from torch import fx

from autoamp.passes.see.facts import Facts
from autoamp.passes.write.copied import copied

_ATEN = torch.ops.aten
_SELECT = _ATEN.select.int


def with_unbind(
    gm: fx.GraphModule, facts: Facts, left: Collection[str] = ()
) -> fx.GraphModule:
    """`gm` with its selects replaced where that saves; `gm` itself where none does.

    Graphs inside, of which `facts` says nothing, stay as they are.

    Args:
        facts: the facts of the captured graph.
        left: names of nodes that stay as they are.
    """
    if not any(_wholes(gm.graph, facts, left)):
        return gm
    copy, _ = copied(gm)
    for selects in [*_wholes(copy.graph, facts, left)]:
        first, size = selects[0], len(selects)
        source, dim, _ = first.args
        # At the place of the first select: the selects read what the tensor held there,
        # and nothing writes to the storage.
        with copy.graph.inserting_before(first):
            whole = copy.graph.call_function(_ATEN.unbind.int, (source, dim))
        parts = {int(node.args[2]) % size: node for node in selects}  # type: ignore[arg-type]
        whole.meta = {**first.meta, "val": [parts[i].meta["val"] for i in range(size)]}
        for at, node in parts.items():
            node.target, node.args = operator.getitem, (whole, at)
    return copy


def _wholes(
    graph: fx.Graph, facts: Facts, left: Collection[str]
) -> Iterator[list[fx.Node]]:
    """The selects of one tensor along one dimension, each position once, in order."""
    kept = facts.mutated | {facts.nodes[name].storage for name in facts.returned}
    groups: dict[tuple[fx.Node, int, int], list[fx.Node]] = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=_SELECT):
        fact = facts.nodes.get(node.name)
        if fact is None or not fact.requires_grad or node.name in left:
            continue
        if fact.storage in kept:  # what `unbind` gives cannot be written to
            continue
        # Dimension -1 and the last one are the same dimension.
        source, dim, _ = node.args
        dimensions = source.meta["val"].dim()
        groups[source, int(dim) % dimensions, fact.region].append(node)
    for (source, dim, _), selects in groups.items():
        size = source.meta["val"].shape[dim]
        places = [node.args[2] for node in selects]
        if not all(isinstance(at, int) for at in (size, *places)) or size < 2:
            continue
        # With a position missing or read twice, the gradient of `unbind` would not be
        # the sum of the gradients of the selects.
        if sorted(at % size for at in places) == [*range(size)]:
            yield selects
