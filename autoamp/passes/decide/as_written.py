"""Verdicts on calls that stay as the user wrote them: casts, functions, `out=`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE, short_name
from autoamp.passes.decide.verdict import AUTHOR, Mode, Verdict, all_of
from autoamp.passes.functions import checkpointed
from autoamp.passes.ops import base_name, bodies_of, is_custom, is_out_variant, mutates
from autoamp.passes.rules import Category, family
from autoamp.passes.see.facts import Facts, NodeFacts
from autoamp.passes.see.nodes import argument, named_arguments, tensors_of
from autoamp.passes.see.normalise import WIDENED
from autoamp.passes.see.regions import BODY_LEFT, LOWERED_BODY

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
    return replace(_denied(reason, fact), listed=False)


def _denied(reason: str, fact: NodeFacts, origin: str = "autoamp") -> Verdict:
    return Verdict(Category.DENY, reason, origin, True, all_of("same", fact))


def _cleared(reason: str, *modes: Mode) -> Verdict:
    return Verdict(Category.CLEAR, reason, "autoamp", False, modes)


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
    return _denied(reason, fact)


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
            return _cleared(reason, mode)
        # Rounded first, 2.999 would become 3.
        reason = "turns floats to integers: reads the value its producer made"
        return _cleared(reason, "follow")
    whole = not (read.is_floating_point or read.is_complex)
    if read == torch.bool or (to_the_letter and whole):
        reason = "0 and 1 are exact in any dtype"
        if read != torch.bool:
            reason = "whole numbers take their readers' precision, as in TensorFlow"
        return _cleared(reason)
    # `x.to(device)` arrives as an overload with a device; torch fills in its dtype.
    moves = str(node.target) in _MOVES or argument(node, "dtype") is None
    if read == HIGH_DTYPE and moves:
        return _cleared("moves data without changing it", "same")
    return _denied("the model casts to fp32 here: a boundary the user drew", fact)


def as_authors_say(node: fx.Node, fact: NodeFacts, low: torch.dtype) -> Verdict | None:
    """The verdict that an op's author asks for; None where no author has said anything.

    Args:
        low: the compute dtype.
    """
    op = node.target
    assert isinstance(op, compat.OpOverload)
    asks = is_custom(op) and fact.operands
    if not asks or not compat.has_autocast_kernel(op, fact.device):
        return None
    dtype = compat.registered_dtype(op, fact.device)
    # A registered dtype is known to torch. A kernel written by hand is called once on
    # fake tensors, and what it hands to the op is looked at.
    if dtype is not None:
        wanted = [dtype] * len(fact.operands)
        said = f"its author registered {short_name(dtype)} for autocast"
    else:
        wanted = _handed_on(node, fact, low) or []
        said = "its author's autocast kernel"
    verdict = verdict_on(said, wanted, fact, low, writes=mutates(op))
    return with_its_results(verdict, node, wanted, fact) if verdict.asked else verdict


def with_its_results(
    verdict: Verdict, node: fx.Node, wanted: Sequence[torch.dtype], fact: NodeFacts
) -> Verdict:
    """The verdict on a custom op, with the dtypes of its results for low operands.

    An op may give fp32 whatever it reads, as attention does that returns its logarithms
    of sums.  An op of which only some results follow its operands stays fp32.

    Args:
        wanted: one dtype for each fp32 operand.
    """
    given = _results(node, wanted)
    if HIGH_DTYPE not in given:
        return verdict
    if given == {HIGH_DTYPE}:
        return replace(verdict, fp32_results=True)
    reason = f"{verdict.reason}, but only some of its results follow: it stays fp32"
    return _denied(reason, fact, verdict.origin)


def verdict_on(
    said: str,
    wanted: Sequence[torch.dtype],
    fact: NodeFacts,
    low: torch.dtype,
    *,
    writes: bool = False,
) -> Verdict:
    """The verdict on a call whose author wants its fp32 operands in given dtypes.

    Args:
        said: how the author has said it, for the reason.
        wanted: one dtype for each fp32 operand; empty where the author's kernel does
            not tell.
        low: the compute dtype.
        writes: whether the call writes to its operands.
    """
    # An op that asks for fp16 in a graph of bf16 gets fp32, which is no less true.
    asks_low = low in wanted and set(wanted) <= {low, HIGH_DTYPE}
    if asks_low and not writes:
        modes = tuple[Mode, ...]("same" if dtype == low else "high" for dtype in wanted)
        reason = said
        if not said.startswith("its author registered"):
            reason = f"{said} casts to {short_name(low)}"
        return Verdict(Category.ALLOW, reason, AUTHOR, False, modes, asked=True)
    if not wanted:
        reason = f"{said} does not tell its dtypes: it stays fp32"
    elif asks_low:
        reason = f"{said}, but it writes to its operands, and a cast would lose a write"
    elif set(wanted) == {HIGH_DTYPE}:
        reason = (
            said if said.endswith("autocast") else f"{said} casts to no lower dtype"
        )
    else:
        reason = f"{said}, and this graph computes in {short_name(low)}: it stays fp32"
    return _denied(reason, fact, AUTHOR)


def _results(node: fx.Node, wanted: Sequence[torch.dtype]) -> set[torch.dtype]:
    """The dtypes of the op's fp32 results once it reads its operands as wanted.

    The set is empty where the op does not run on such operands: the check of the graph
    then says so.
    """
    dtypes = iter(wanted)

    def cast(operand: fx.Node) -> Any:
        value = operand.meta["val"]
        high = isinstance(value, torch.Tensor) and value.dtype == HIGH_DTYPE
        return value.to(next(dtypes)) if high else value

    try:
        with torch.no_grad():
            args = [fx.map_arg(value, cast) for value in node.args]
            kwargs = {k: fx.map_arg(value, cast) for k, value in node.kwargs.items()}
            result = node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:  # noqa: BLE001 (the op is the user's)
        return set()
    pairs = zip(tensors_of(node.meta["val"]), tensors_of(result), strict=False)
    return {new.dtype for old, new in pairs if old.dtype == HIGH_DTYPE}


def _handed_on(
    node: fx.Node, fact: NodeFacts, low: torch.dtype
) -> list[torch.dtype] | None:
    """The dtypes in which an autocast kernel hands an op's fp32 operands to the op.

    The answer is None where the kernel does anything else, such as a cast of the
    result, whose readers autocast would then have compute in another dtype.
    """
    op: Any = node.target
    names, args = _positional(node, fact.device)
    state = compat.AutocastState(fact.device, low, enabled=True)
    passed = compat.passed_under_autocast(op, args, state)
    if passed is None or len(passed.args) != len(args):
        return None
    # The kernel may cast what the op gave: then it is more than a cast of operands.
    dtypes = [t.dtype for t in tensors_of(passed.result)]
    if dtypes != [t.dtype for t in tensors_of(passed.given)]:
        return None
    found: dict[str, list[torch.dtype]] = {}
    for name, before, after in zip(names, args, passed.args, strict=True):
        pairs = zip(pytree.tree_leaves(before), pytree.tree_leaves(after), strict=False)
        found[name] = [
            new.dtype
            for old, new in pairs
            if isinstance(old, torch.Tensor) and old.dtype == HIGH_DTYPE
        ]
    wanted = [d for name, _ in named_arguments(node) for d in found.get(name, [])]
    return wanted if len(wanted) == len(fact.operands) else None


def _positional(node: fx.Node, device: str) -> tuple[list[str], list[Any]]:
    """The arguments of a call in the order of its schema, as fake tensors."""
    op: Any = node.target
    given = dict(named_arguments(node))
    names: list[str] = []
    args: list[Any] = []
    for each in compat.schema(op).arguments:
        if not each.kwarg_only:
            names.append(each.name)
            args.append(given.get(each.name, each.default_value))
    values = fx.map_arg(args, lambda n: compat.fake_on(n.meta["val"], device))
    return names, list(values)
