"""How many casts a forward and a backward run, and what inductor makes of them.

A cast of the forward is a node.  A cast of the backward is not: autograd makes it where
the dtype of a gradient is not the dtype of the gradient's value.  The rules below say
where; `tests/report/test_cast_counts.py` compares them with casts counted at torch's
dispatcher while the models of the tests run.

The kernels of inductor compute in fp32.  A cast down and the ops that read the cast may
come into one kernel: the value stays fp32 there, and is not rounded.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE, LOW_DTYPES
from autoamp.messages import bytes_text, counted
from autoamp.passes.functions import (
    LEAF_FUNCTIONS,
    WITH_FP32_STATE,
    product,
    saturating_cast,
    scaled_result,
    unscaled_weights,
)
from autoamp.passes.functions.rotary import rotary
from autoamp.passes.report_rows import CastRow, Section
from autoamp.passes.see.facts import Facts
from autoamp.passes.see.nodes import tensors_of
from autoamp.passes.write.emitted import CAST_KIND, TOGETHER, USES, WEIGHT_PATH
from autoamp.passes.write.layouts import LAST

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


def cast_counts(sections: Sequence[Section]) -> CastCounts:
    """The casts of all the sections together."""
    forward = backward = recurrent = 0
    for section in sections:
        embeddings = _in_embeddings(section)
        forward += len(_casts(section)) + embeddings[0]
        backward += _in_backward(section) + embeddings[1]
        recurrent += sum(n.target in _RECURRENT for n in section.gm.graph.nodes)
    sizes = _kept_copies(sections)
    weights = {weight for weight, _ in sizes}
    return CastCounts(forward, backward, len(weights), sum(sizes.values()), recurrent)


def counts_text(counts: CastCounts, low: str) -> str:
    """The counts as a sentence; `low` is the short name of the compute dtype."""
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


def _kept_copies(sections: Sequence[Section]) -> dict[tuple[str, bool | None], int]:
    """The bytes of each low copy that graphs are called with.

    The key is the path of the weight and the layout of the copy.  Graphs of one model
    share copies, and a graph hands its copies to its bodies.
    """
    sizes = {}
    for section in sections:
        if section.body:
            continue
        for node in section.gm.graph.find_nodes(op="placeholder"):
            if node.meta.get(CAST_KIND) == "weight":
                copy = node.meta["val"]
                weight = node.meta[WEIGHT_PATH] or f"{section.key} {node.name}"
                sizes[weight, node.meta.get(LAST)] = copy.numel() * copy.element_size()
    return sizes


def _casts(section: Section) -> list[fx.Node]:
    nodes = section.gm.graph.nodes
    return [n for n in nodes if n.target in _CASTS and CAST_KIND in n.meta]


def _in_backward(section: Section) -> int:
    facts, casts = section.rewritten.facts, _casts(section)
    count = 0
    for cast in casts:
        # The gradient of a `scaled_result` is rounded by the kernel that scales it; the
        # gradient of a value read through `low_uses` is summed in fp32 there.
        is_summed = all(reader.target in USES for reader in cast.users)
        if cast.target is not scaled_result and not is_summed:
            count += _needs_grad(cast.args[0], facts)
    if section.caller == "checkpointed":
        # The second run of a region stops at the last value that the backward reads,
        # which comes before the casts of the region's results.
        count += sum(any(u.op != "output" for u in cast.users) for cast in casts)
    for node in section.gm.graph.nodes:
        if node.target in TOGETHER:
            count += len(node.users) * (node.target is not unscaled_weights)
        elif node.target in USES:
            count += 1
        elif node.target is product and node.kwargs.get("wide"):
            # The kernel that scales a gradient rounds it too.
            count += "loss_scale" not in node.kwargs and _needs_grad(node, facts)
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


def _widened_operands(node: fx.Node, facts: Facts) -> int:
    """Low operands of an op with an fp32 result: autograd rounds their gradients."""
    fact = facts.nodes.get(node.name)
    if node.op != "call_function" or node.target is operator.getitem:
        return 0
    if fact is None or not fact.requires_grad or _float_dtype(node) != HIGH_DTYPE:
        return 0
    return sum(_is_low(n) and _needs_grad(n, facts) for n in node.all_input_nodes)


def _needs_grad(node: object, facts: Facts) -> bool:
    """Whether a gradient flows to a node; true for nodes that the pass has added."""
    assert isinstance(node, fx.Node)
    fact = facts.nodes.get(node.name)
    return fact is None or fact.requires_grad


def _is_low(node: object) -> bool:
    assert isinstance(node, fx.Node)
    return _float_dtype(node) in LOW_DTYPES.values()


def _float_dtype(node: fx.Node) -> torch.dtype | None:
    """The dtype of the first float tensor of a node's result, or None."""
    tensors = tensors_of(node.meta.get("val"))
    return next((t.dtype for t in tensors if t.is_floating_point()), None)


# -- inductor --------------------------------------------------------------------------

_FATES = {
    compat.WRITTEN: "written to memory",
    compat.PARTLY: "written and also read before that",
    compat.INSIDE: "inside a kernel only",
    compat.REMOVED: "removed",
}
UNABLE = "the inductor of this torch cannot be told to round on CPUs"
"""Said where `exact_casts=True` was asked for and a kernel rounds no value."""


def unrounded(sections: Sequence[Section]) -> list[CastRow]:
    """The casts down at which all readers, or some, read an unrounded value."""
    told = _told(sections)
    if all(section.exact_casts for section in told):
        return []
    casts = (cast for section in told for cast in section.casts if cast.kind != "up")
    return [cast for cast in casts if cast.compiled in (compat.PARTLY, compat.INSIDE)]


def _told(sections: Sequence[Section]) -> list[Section]:
    """The compiled graphs of which inductor tells what it makes of casts."""
    return [s for s in sections if s.is_compiled and s.exact_casts is not None]


def compiled_text(sections: Sequence[Section]) -> Iterator[str]:
    """The sentences of a report on casts in the graphs that inductor compiles.

    Weight copies that are kept between calls are made outside of the graphs.
    """
    told = _told(sections)
    untold = sum(section.is_compiled for section in sections) - len(told)
    fates = [c.compiled for section in told for c in section.casts if c.compiled]
    counts = ((fates.count(fate), what) for fate, what in _FATES.items())
    shares = ", ".join(f"{count:,} {what}" for count, what in counts if count)
    if shares:
        yield f"Inductor, of {counted(len(fates), 'cast')}: {shares}."
    if told and all(section.exact_casts for section in told):
        yield "Inductor's kernels round at each cast, as eager does."
    elif told:
        names = [cast.name for cast in unrounded(told)]
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        at = f" (at {', '.join(names[:2])}{more})" if names else ""
        options = told[0].rewritten.options
        way = f"{options.advice('exact_casts', True)} has it round"
        if options.exact_casts:
            way = UNABLE
        yield (
            f"Inside a kernel inductor computes in fp32 and rounds no value{at}; {way}."
        )
    if untold:
        yield (
            f"Of {counted(untold, 'compiled graph')} inductor does not tell "
            "which casts it keeps inside a kernel, where it may round no value."
        )
