"""Verdicts on calls that stay as the user wrote them: casts, functions, `out=`."""

from __future__ import annotations

import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.facts import Facts, NodeFacts
from autoamp.analyse.nodes import argument, tensors_of
from autoamp.analyse.verdict import AUTHOR, Mode, Verdict, all_of
from autoamp.dtypes import HIGH_DTYPE, short_name
from autoamp.graph_functions import checkpointed
from autoamp.op_names import base_name
from autoamp.ops import bodies_of, is_out_variant
from autoamp.rules import Category, family
from autoamp.trace.control_flow import BODY_LEFT, LOWERED_BODY
from autoamp.trace.normalise import WIDENED

_MOVES = frozenset({"aten.to.device", "aten.to.dtype_layout"})
_BITS = frozenset({torch.ops.aten.view.dtype, torch.ops.aten.view_copy.dtype})


def as_written(
    node: fx.Node,
    fact: NodeFacts,
    graph: Facts,
    low: torch.dtype,
    *,
    to_the_letter: bool,
) -> Verdict | None:
    """The verdict on a call that no rule decides; None where the rules decide.

    Args:
        graph: the facts of the whole graph.
        low: the compute dtype.
        to_the_letter: TensorFlow's lists decide alone; they cast whole numbers too.
    """
    if not isinstance(node.target, compat.OpOverload):
        return _opaque(node, fact)
    if base_name(node.target) in family("cast"):
        if WIDENED in node.meta:
            return _widened(node, fact, graph, low)
        return _user_cast(node, fact, graph, to_the_letter)
    if node.target in _BITS:
        return _left(
            "reads the bits of its operand, which differ in another dtype", fact
        )
    if is_out_variant(node.target):
        reason = "writes into the tensor given as out=, which keeps its dtype"
        return _left(reason, fact)
    return None


def _left(reason: str, fact: NodeFacts) -> Verdict:
    """The verdict on an op that stays as the user wrote it; no list decides."""
    modes = all_of("same", fact)
    return Verdict(Category.DENY, reason, "autoamp", True, modes, listed=False)


def _opaque(node: fx.Node, fact: NodeFacts) -> Verdict:
    name = getattr(node.target, "__name__", str(node.target))
    reason = f"{name} is not traced into: it gets the dtypes it was captured with"
    bodies = bodies_of(node)
    left = [body.meta[BODY_LEFT] for body in bodies if BODY_LEFT in body.meta]
    if node.target is compat.CUSTOM_FUNCTION and any(
        map(compat.under_custom_fwd, bodies)
    ):
        under = "a custom Function under torch.amp.custom_fwd"
        reason = f"{under}: it stays fp32: autocast is off there, or it fails low"
        if fact.autocast is not None:
            made = tensors_of(node.meta.get("val"))
            given = sorted({short_name(t.dtype) for t in made if t.is_floating_point()})
            reason = f"{under}: runs as under autocast, and gives {' and '.join(given)}"
    if left:
        reason = f"{name} has a body that stays as it is: {left[0]}"
    elif node.target is checkpointed:
        reason = "a checkpointed region: rewritten inside, fp32 at its edges"
    elif any(LOWERED_BODY in body.meta for body in bodies):
        reason = f"{name}: rewritten inside, fp32 at its edges"
    return Verdict(
        Category.DENY,
        reason,
        "autoamp",
        True,
        all_of("same", fact),
    )


def _widened(node: fx.Node, fact: NodeFacts, graph: Facts, low: torch.dtype) -> Verdict:
    """The verdict on the cast to fp32 of a result that is half under autocast.

    Our capture made the cast.  In the compute dtype the result stays as it is; an fp16
    result in a graph of bf16 is rounded once, where a reader would round it.
    """
    (read,) = [t for n in node.all_input_nodes for t in tensors_of(n.meta.get("val"))]
    reason = f"the {short_name(read.dtype)} result of a Function under custom_fwd"
    written = fact.storage in graph.mutated
    if read.dtype == low and not written:
        return Verdict(Category.ALLOW, reason, AUTHOR, False, (), asked=True)
    return Verdict(Category.CLEAR, reason, AUTHOR, written, ())


def _user_cast(
    node: fx.Node, fact: NodeFacts, graph: Facts, to_the_letter: bool
) -> Verdict:
    """The verdict on `.float()`, `.to(...)`, `.type(...)` as the user wrote them."""
    outputs = tensors_of(node.meta.get("val"))
    inputs = [t for n in node.all_input_nodes for t in tensors_of(n.meta.get("val"))]
    made, read = outputs[0].dtype, inputs[0].dtype
    if made != HIGH_DTYPE:
        if made.is_floating_point or made.is_complex:
            reason = (
                f"the model's own cast to {short_name(made)} reads its operand as it is"
            )
            # A cast of an operand that is low already would be no copy, and a write to
            # its result would reach the operand.
            mode: Mode = "high" if fact.storage in graph.mutated else "any"
            return Verdict(Category.CLEAR, reason, "autoamp", False, (mode,))
        reason = "turns floats to integers: reads the value its producer made"
        return Verdict(Category.CLEAR, reason, "autoamp", False, ("follow",))
    whole = not (read.is_floating_point or read.is_complex)
    if read == torch.bool or (to_the_letter and whole):
        reason = "0 and 1 are exact in any dtype"
        if read != torch.bool:
            reason = "whole numbers take their readers' precision, as in TensorFlow"
        return Verdict(Category.CLEAR, reason, "autoamp", False, ())
    # `x.to(device)` arrives as an overload with a device; torch fills in its dtype.
    moves = str(node.target) in _MOVES or argument(node, "dtype") is None
    if read == HIGH_DTYPE and moves:
        reason = "moves data without changing it"
        return Verdict(Category.CLEAR, reason, "autoamp", False, ("same",))
    reason = "the model casts to fp32 here: a boundary the user drew"
    return Verdict(Category.DENY, reason, "autoamp", True, all_of("same", fact))
