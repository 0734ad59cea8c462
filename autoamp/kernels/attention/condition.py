"""Where attention that is written out may become one call, and where that is faster."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from torch import fx

from autoamp import compat
from autoamp.analyse.nodes import tensors_of, written_values
from autoamp.kernels.attention.function.scores import Kind
from autoamp.kernels.attention.recognise import WrittenAttention, written_attention
from autoamp.kernels.shared.condition import Allowed
from autoamp.kernels.table import ATTENTION
from autoamp.pass_options import PassOptions
from autoamp.place.devices import Device


def leave_out(
    device: Device, options: PassOptions, *, own_ops: bool
) -> tuple[str, ...]:
    """The kernels that are left out of a graph because of where and how it runs.

    `autoamp::attention` has a kernel for CPUs alone.  The backward of torch's kernels
    for other devices has an error of its own, which has yet to be held against
    autocast's.

    Args:
        own_ops: whether the graph may call ops of autoamp's.
    """
    slow = device.attends_by_products and options.objective != "memory"
    has_kernel = own_ops and device.type == "cpu"
    return () if has_kernel and not slow else (ATTENTION,)


def replaceable(graph: fx.Graph, allowed: Allowed) -> list[WrittenAttention]:
    """The attentions written out that may each become one call."""
    if ATTENTION in allowed.off:
        return []
    found = written_attention(graph)
    return [e for e in found if allowed.takes(e.nodes) and _may_be_one(graph, e)]


def _may_be_one(graph: fx.Graph, found: WrittenAttention) -> bool:
    """Whether no change of mode, and no write to an operand, lies between the calls.

    Numbers that are added may not be written to later either: a sum does not keep them
    for its backward, and the one call does.
    """
    own = set(found.nodes)
    read = {n for node in found.nodes for n in node.all_input_nodes} - own
    storages = _storages(read)
    order = list(graph.nodes)
    first, last = (order.index(found.nodes[at]) for at in (0, -1))

    def parts(node: fx.Node) -> bool:
        if not isinstance(node.target, compat.OpOverload):
            return node.target is not operator.getitem and node.op != "get_attr"
        return not storages.isdisjoint(_storages(written_values(node)))

    if any(parts(node) for node in order[first:last] if node not in own):
        return False
    added = [s.tensor for s in found.steps if s.kind is Kind.ADD and s.tensor]
    kept = _storages(added)
    later = (written_values(node) for node in order[last:])
    return kept.isdisjoint(_storages(n for written in later for n in written))


def _storages(nodes: Iterable[fx.Node]) -> set[int]:
    values = (tensor for node in nodes for tensor in tensors_of(node.meta.get("val")))
    return {compat.storage_id(value) for value in values}
