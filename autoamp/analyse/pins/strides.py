"""Which calls stay fp32 so that strides are those that the model has in fp32.

A cast lays its result out without gaps.  A view with gaps, such as `y[:, ::2]`, keeps
its strides only where the cast comes before the view: the view is then taken of an fp32
tensor that lies as the model's does.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.facts import Facts
from autoamp.analyse.nodes import tensors_of
from autoamp.op_names import base_name
from autoamp.rules import family

RETURNED = "its result, or a view of it, is returned with gaps"
READ = "its layout is read by as_strided, which a cast would change"


def held_by_strides(gm: fx.GraphModule, facts: Facts) -> Mapping[str, str]:
    """The calls that make or view values whose strides matter, each to the reason."""
    nodes = {n.name: n for n in gm.graph.nodes}
    why = {v: RETURNED for v in facts.returned if _has_gaps(nodes[v])}
    for node in gm.graph.nodes:
        if _reads_strides(node):
            read = [o.value for o in facts.nodes[node.name].operands[:1]]
            why |= dict.fromkeys((node.name, *read), READ)
    found: dict[str, str] = {}
    for value in (v for v in why if facts.nodes[v].makes_floats):
        views, base = views_down_to(value, facts)
        made = [*views, base] if _has_gaps(nodes[base]) else views
        found |= dict.fromkeys(made, why[value])
    return found


def views_down_to(value: str, facts: Facts) -> tuple[list[str], str]:
    """The makers of `value` and of the views below it, and the maker of the base."""
    storage = facts.nodes[value].storage
    views: list[str] = []
    while True:
        maker = facts.producer(value)
        below = (o.value for o in facts.nodes[maker].operands)
        value = next((v for v in below if facts.nodes[v].storage == storage), "")
        if not value:
            return views, maker
        views.append(maker)


def _reads_strides(node: fx.Node) -> bool:
    if not isinstance(node.target, compat.OpOverload):
        return False
    return base_name(node.target) in family("reads_strides")


def _has_gaps(node: fx.Node) -> bool:
    """Whether a node makes a tensor with gaps, or whose elements share memory."""
    return any(
        t.layout is torch.strided and not _is_dense(t)
        for t in tensors_of(node.meta.get("val"))
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a copy of `tensor` has its strides; a symbolic size is taken as it was.

    A dimension of one element may have any stride.
    """
    sizes = [compat.hint(s) for s in tensor.shape]
    strides = [compat.hint(s) for s in tensor.stride()]
    expected = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size != 1 and stride != expected:
            return 0 in sizes
        expected *= size
    return True
