"""Moves: the nodes that round nothing that their readers would not round in any case.

A graph with the verdicts on its nodes goes in, and the names of the moves come out.

Rounding commutes with moving numbers.  It commutes with a view only where the view lies
in memory as a cast of the view would: a cast lays its result out without gaps, a slice
of a cast has gaps, and kernels choose by layout how they sum and how often they round.
`linear` of three dimensions adds its bias inside the product if the data are without
gaps; else it rounds the product, adds, and rounds again.  torch.autocast casts behind
the views, and so does this pass behind each view that would show the difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.passes.decide.verdict import PROMOTE, Classified, Verdict
from autoamp.passes.ops import base_name, is_view
from autoamp.passes.rules import Category, family
from autoamp.passes.see.facts import NodeFacts
from autoamp.passes.see.nodes import tensors_of


def find_moves(
    gm: fx.GraphModule, classified: Classified, kernels: Container[str]
) -> set[str]:
    """Nodes that round nothing their readers would not round, if all of these are low.

    Their readers find each operand in the layout that a cast behind the node gives it.
    Gradients have the same bits too: where a gradient flows, each element goes to one
    place and is read once there, since gradients are summed on the fp32 side of a cast.
    (Each use of a weight or of its views has an autograd node of its own:
    `passes/write/casts.py`.)

    Args:
        kernels: the kernels that stand for calls which widen, and that read low values.
    """
    facts, verdicts = classified.facts, classified.verdicts
    reads = Counter(o.value for name in verdicts for o in facts.nodes[name].operands)
    elements: dict[str, list[str]] = {}
    for value, maker in facts.element_of.items():
        elements.setdefault(maker, []).append(value)
    of_weights = {facts.nodes[w].storage for w in facts.weights}
    found: set[str] = set()
    for node in gm.graph.nodes:
        verdict, fact = verdicts.get(node.name), facts.nodes.get(node.name)
        # What is written to a moved value later would be rounded as well.
        if verdict is None or fact is None or fact.storage in facts.mutated:
            continue
        values = elements.get(node.name, [node.name])
        once = all(
            reads[v] <= 1 or facts.nodes[v].storage in of_weights for v in values
        )
        moves = node.name in kernels or _is_move(node, fact, verdict)
        if moves and (once or not fact.requires_grad):
            found.add(node.name)
    return found


def _is_move(node: fx.Node, fact: NodeFacts, verdict: Verdict) -> bool:
    if verdict.category is not Category.CLEAR:
        return False
    assert isinstance(node.target, compat.OpOverload)
    base = base_name(node.target)
    if base in family("factory") or not fact.operands:
        return True  # a constant, or a mask of zeros and ones
    if not all(mode in PROMOTE for mode in verdict.modes):
        return False
    if base in family("repeats"):  # the gradient of an element in two places is a sum
        return not fact.requires_grad and _keeps_layout(node)
    return (base in family("copies") or is_view(node.target)) and _keeps_layout(node)


def _keeps_layout(node: fx.Node) -> bool:
    """Whether a result lies the same with a cast before the node as with one behind."""
    given = [t for n in node.all_input_nodes for t in tensors_of(n.meta.get("val"))]
    made = tensors_of(node.meta["val"])
    as_cast = [_cast(t).stride() for t in made]
    if all(_cast(t).stride() == _strides(t) for t in given):
        return as_cast == [*map(_strides, made)]  # the casts leave the operands alone
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _cast(n.meta["val"]))
    try:
        found = tensors_of(node.target(*args, **kwargs))  # type: ignore[operator]
    except Exception:  # noqa: BLE001 (it cannot run without data)
        return False
    return as_cast == [t.stride() for t in found]


def _cast(value: Any) -> Any:
    """A tensor without data that lies as a cast of `value` would."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_cast, value))
    empty = compat.like(value, device="meta")
    return empty.clone() if isinstance(empty, torch.Tensor) else empty


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(map(compat.hint, tensor.stride()))
