"""Verdicts on custom ops whose authors have said how they run under autocast.

`torch.library.register_autocast` names a dtype, to which autocast casts the op's fp32
operands.  An autocast kernel written by hand names none: the
kernel runs on fake tensors, which shows the dtypes that it hands to the op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.analyse.facts import NodeFacts
from autoamp.analyse.nodes import named_arguments, tensors_of
from autoamp.analyse.verdict import AUTHOR, Mode, Verdict, all_of
from autoamp.dtypes import HIGH_DTYPE, short_name
from autoamp.ops import is_custom, mutates
from autoamp.rules import Category


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
    return Verdict(Category.DENY, reason, verdict.origin, True, all_of("same", fact))


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
    return Verdict(Category.DENY, reason, AUTHOR, True, all_of("same", fact))


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
    state = compat.autocast_enabled(fact.device, low)
    passed = compat.passed_under_autocast(op, args, state)
    if passed is None or len(passed.args) != len(args):
        return None
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
