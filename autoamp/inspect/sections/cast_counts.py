"""The number of casts that one forward and one backward over a graph run.

A cast of the forward is a node.  A cast of the backward is not: autograd makes it where
the dtype of a gradient is not the dtype of the gradient's value.  The rules below say
where; `tests/inspect/test_cast_counts.py` compares them with casts counted at torch's
dispatcher while the models of the tests run.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autoamp.analyse.facts import Facts
from autoamp.analyse.nodes import tensors_of
from autoamp.dtypes import HIGH_DTYPE, LOW_DTYPES
from autoamp.graph_functions import (
    LEAF_FUNCTIONS,
    WITH_FP32_STATE,
    saturating_cast,
    scaled_result,
    unscaled_weights,
)
from autoamp.inspect.costs import bytes_text
from autoamp.inspect.rows import Section
from autoamp.inspect.text import counted
from autoamp.kernels.rotary.function import rotary
from autoamp.rewrite.emitted import CAST_KIND, TOGETHER, USES, WEIGHT_PATH
from autoamp.rewrite.layouts import LAST

CHECKPOINTED = "checkpointed"

_CASTS = {torch.ops.aten._to_copy.default, saturating_cast, scaled_result}
_RECURRENT = frozenset(WITH_FP32_STATE.values())
_WITHOUT_GRADIENT_CASTS = LEAF_FUNCTIONS - _RECURRENT


@dataclass(frozen=True)
class CastCounts:
    """Casts run by one forward and one backward over the graphs.

    Casts that the user's own code makes are not counted, nor those inside a kernel of
    torch (attention in low precision with dropout, on CPUs; a recurrent call, which may
    cast at each step).  A body of a loop counts as run once.

    Attributes:
        forward: casts that run in each forward, without copies kept between calls.
        backward: casts of gradients, and casts that checkpointed regions run again.
        kept: weights with a low copy that is kept until the weight changes.
        kept_bytes: the memory of all these copies; a weight may have two, one of them
            with the channels last.
        recurrent: recurrent calls that keep an fp32 state, inside of which torch casts.
    """

    forward: int
    backward: int
    kept: int
    kept_bytes: int
    recurrent: int


def counts_text(counts: CastCounts, low: str) -> str:
    """The counts as a sentence.

    Args:
        low: the short name of the compute dtype.
    """
    forward = "runs" if counts.forward == 1 else "run"
    text = f"{counted(counts.forward, 'cast')} {forward} in each forward"
    if counts.backward:
        text += f", {counts.backward:,} in each backward"
    if counts.kept:
        size = bytes_text(counts.kept_bytes)
        have = "has a copy" if counts.kept == 1 else "have copies"
        text += f". {counted(counts.kept, 'weight')} {have} in {low} ({size})"
    if counts.recurrent:
        calls = counted(counts.recurrent, "recurrent call")
        text += f". Casts that torch makes inside of {calls} are not counted"
    return f"{text}."


def cast_counts(sections: Sequence[Section]) -> CastCounts:
    """The casts of all the sections together."""
    forward = sum(len(_casts(section)) for section in sections)
    forward += sum(_in_embeddings(section)[0] for section in sections)
    backward = sum(_in_backward(section) for section in sections)
    sizes = _kept_copies(sections)
    weights = {weight for weight, _ in sizes}
    recurrent = sum(
        node.target in _RECURRENT
        for section in sections
        for node in section.gm.graph.nodes
    )
    kept_bytes = sum(sizes.values())
    return CastCounts(forward, backward, len(weights), kept_bytes, recurrent)


def _kept_copies(sections: Sequence[Section]) -> dict[tuple[str, bool | None], int]:
    """The bytes of each low copy that graphs are called with.

    The key is the path of the weight and the layout of the copy.  Graphs of one model
    share copies, and a graph hands its copies to its bodies.
    """
    found = {}
    for section in sections:
        if section.body:
            continue
        for node in section.gm.graph.find_nodes(op="placeholder"):
            if node.meta.get(CAST_KIND) == "weight":
                copy = node.meta["val"]
                weight = node.meta[WEIGHT_PATH] or f"{section.key} {node.name}"
                found[weight, node.meta.get(LAST)] = copy.numel() * copy.element_size()
    return found


def _casts(section: Section) -> list[fx.Node]:
    nodes = section.gm.graph.nodes
    return [n for n in nodes if n.target in _CASTS and CAST_KIND in n.meta]


def _in_backward(section: Section) -> int:
    facts, casts = section.rewritten.facts, _casts(section)
    count = sum(_casts_the_gradient(node, facts) for node in casts)
    count += _in_embeddings(section)[1]
    if section.caller == CHECKPOINTED:
        count += sum(_runs_again(node) for node in casts)
    for node in section.gm.graph.nodes:
        if node.target in TOGETHER:
            count += len(node.users) * (node.target is not unscaled_weights)
        elif node.target in USES:
            count += 1
        elif node.target not in _WITHOUT_GRADIENT_CASTS:
            count += _widened_operands(node, facts)
    return count


def _in_embeddings(section: Section) -> tuple[int, int]:
    """The casts in the forward and in the backward of rotary embeddings."""
    forward = backward = 0
    for node in section.gm.graph.find_nodes(op="call_function", target=rotary):
        data, result = (_is_low(n) for n in (node.args[0], node))
        widens = node.meta["val"].device.type == "cpu"
        forward += (data and widens) + result
        if _needs_grad(node.args[0], section.rewritten.facts):
            backward += (result and widens) + data
    return forward, backward


def _is_low(node: object) -> bool:
    assert isinstance(node, fx.Node)
    return _float_dtype(node) in LOW_DTYPES.values()


def _casts_the_gradient(cast: fx.Node, facts: Facts) -> bool:
    """Whether the gradient of a cast is cast back by the cast itself.

    The gradient of a `scaled_result` is rounded by the kernel that scales it; the
    gradient of a value read through `low_uses` is summed in fp32 there.
    """
    if cast.target is scaled_result or all(u.target in USES for u in cast.users):
        return False
    return _needs_grad(cast.args[0], facts)


def _runs_again(cast: fx.Node) -> bool:
    """Whether the backward of a checkpointed region runs the cast once more.

    The second run of a region stops at the last value that the backward reads, which
    comes before the casts of the region's results.
    """
    return any(user.op != "output" for user in cast.users)


def _widened_operands(node: fx.Node, facts: Facts) -> int:
    """Low operands of an op with an fp32 result: autograd rounds their gradients."""
    fact = facts.nodes.get(node.name)
    if node.op != "call_function" or node.target is operator.getitem:
        return 0
    if fact is None or not fact.requires_grad or _float_dtype(node) != HIGH_DTYPE:
        return 0
    return sum(
        _is_low(operand) and _needs_grad(operand, facts)
        for operand in node.all_input_nodes
    )


def _needs_grad(node: object, facts: Facts) -> bool:
    """Whether a gradient flows to a node; true for nodes that the pass has added."""
    assert isinstance(node, fx.Node)
    fact = facts.nodes.get(node.name)
    return fact is None or fact.requires_grad


def _float_dtype(node: fx.Node) -> torch.dtype | None:
    """The dtype of the first float tensor of a node's result, or None."""
    found = tensors_of(node.meta.get("val"))
    return next((t.dtype for t in found if t.is_floating_point()), None)
