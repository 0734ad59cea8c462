"""The numbers a graph computes with that are known when it is captured.

`x * 1e-8`, `x * torch.tensor(1e-8)` and `x * x.new_full((), 1e-8)` mean the same: with
a Python number, with a tensor that the graph holds, with a tensor that the graph fills.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.dtypes import largest, short_name, smallest
from autoamp.passes.decide.verdict import Classified
from autoamp.passes.ops import base_name, is_pointwise, is_random, mutates
from autoamp.passes.rules import Category, Rule, family
from autoamp.passes.see.facts import Facts
from autoamp.passes.see.nodes import argument, named_arguments
from autoamp.passes.see.normalise import NUMBER

Known = Mapping[str, int | float]
"""Nodes whose tensors hold one number throughout, and the number."""

_FILLERS = {
    "aten::fill": "value",
    "aten::full": "fill_value",
    "aten::full_like": "fill_value",
    "aten::new_full": "fill_value",
    "aten::scalar_tensor": "s",
}
"""Ops whose result is one number throughout, and the argument that holds it."""


def known_numbers(gm: fx.GraphModule) -> Known:
    """The number that each node holds: attributes, the model's own tensors, fillings.

    The numbers in the caller's tensors are not known.  A tensor that is written to
    later is taken to hold its first number: at worst an op stays in fp32 for that
    number, which harms nothing.
    """
    known: dict[str, int | float] = {}
    for node in gm.graph.nodes:
        number = node.meta.get(NUMBER)
        if node.op == "get_attr":
            number = compat.held_number(operator.attrgetter(str(node.target))(gm))
        elif isinstance(node.target, compat.OpOverload):
            number = _made(node, known)
        if number is not None:
            known[node.name] = number
    return known


def numbers(node: fx.Node, known: Known) -> Iterator[int | float]:
    """The numbers among a call's arguments, in tensors or by themselves."""
    for value in (*node.args, *node.kwargs.values()):
        number = _number(value, known)
        if number is not None:
            yield number


def filling(node: fx.Node, known: Known) -> int | float | None:
    """The number that a call of a torch op fills a tensor with; None without one."""
    assert isinstance(node.target, compat.OpOverload)
    name = _FILLERS.get(base_name(node.target).removesuffix("_"))
    return _number(argument(node, name), known) if name is not None else None


def _number(value: object, known: Known) -> int | float | None:
    if isinstance(value, fx.Node):
        return known.get(value.name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number else None  # type: ignore[return-value]


def _made(node: fx.Node, known: Known) -> int | float | None:
    """The one number in the result of a torch op, if the operands determine it."""
    assert isinstance(node.target, compat.OpOverload)
    number = filling(node, known)
    operands = node.all_input_nodes
    if number is not None or not operands:
        return number
    if any(operand.name not in known for operand in operands):
        return None
    aliases = [r.alias_info for r in compat.schema(node.target).returns]
    views = any(alias is not None and not alias.is_write for alias in aliases)
    if views or base_name(node.target) in family("keeps_its_number"):
        return known[operands[0].name]
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return None
    if mutates(node.target) or is_random(node.target) or not is_pointwise(node.target):
        return None

    def operand(leaf: fx.Node) -> Any:
        # float64 rounds no number of the model's; the process may have another default
        # device.
        return torch.tensor(known[leaf.name], dtype=torch.float64, device="cpu")

    # `-torch.tensor(1e9)` is computed now.
    args, kwargs = fx.map_arg((node.args, node.kwargs), operand)
    return float(node.target(*args, **kwargs))


def scales(target: compat.OpOverload, category: Category) -> bool:
    """Whether an op does arithmetic with its numbers: none is a limit or a filling."""
    limits = base_name(target).rstrip("_") in family("limits_or_fills")
    return is_pointwise(target) and not (limits or category is Category.CLEAR)


def literal_reason(
    node: fx.Node, low: torch.dtype, known: Known, category: Category
) -> str | None:
    """Why arithmetic with a number beyond the range of `low` must stay fp32, or None.

    A limit or a filling may be cut off at the range; a factor or a divisor may not.
    No number may become zero: `functional.normalize` divides by a norm that it keeps
    above 1e-12.

    Args:
        known: the numbers that tensors hold.
        category: the category of the op; clear ops do no arithmetic.
    """
    target = node.target
    assert isinstance(target, compat.OpOverload)
    filled = filling(node, known)
    if filled is None and not is_pointwise(target):
        return None
    for value in numbers(node, known) if filled is None else (filled,):
        # Every float dtype has infinity and NaN.
        if not math.isfinite(value):
            continue
        # Half of the smallest number is a tie, which goes to the even neighbour: 0.
        if 0 < abs(value) <= smallest(low) / 2:
            return f"computes with {value:g}, which {short_name(low)} rounds to zero"
        if abs(value) > largest(low) and filled is None and scales(target, category):
            return f"computes with {value:g}, which is beyond {short_name(low)}'s range"
    return None


def cut_off(node: fx.Node, low: torch.dtype, known: Known) -> bool:
    """Whether a call fills a tensor with a number beyond the range of `low`.

    In `low` the number is cut off: a mask can use the new number, a divisor cannot.
    """
    filled = filling(node, known)
    return filled is not None and largest(low) < abs(filled) < math.inf


def extreme_values(
    gm: fx.GraphModule,
    classified: Classified,
    rules: Mapping[str, Rule | None],
    low: torch.dtype,
) -> frozenset[str]:
    """The nodes of a graph whose values may be masks beyond the range of `low`.

    Args:
        rules: the rule of each node, None where it has none.
    """
    limit = largest(low)
    facts = classified.facts
    # Allow ops, and all nodes that are computed from allow ops.
    products: set[fx.Node] = set()
    extreme: set[str] = set()
    for node in gm.graph.nodes:
        allowed = classified.is_allowed(node.name)
        if allowed or any(n in products for n in node.all_input_nodes):
            products.add(node)
        if node.op == "get_attr":
            number = compat.held_number(operator.attrgetter(str(node.target))(gm))
            is_extreme = number is not None and limit * 0.99 < abs(number) < math.inf
        else:
            is_extreme = (
                node.op == "call_function"
                and not (allowed or _is_bounded(node, rules.get(node.name), limit))
                and (
                    _holds_extreme(node, limit)
                    or any(
                        n.name in extreme and facts.nodes[n.name].makes_floats
                        for n in node.all_input_nodes
                    )
                )
            )
        if is_extreme:
            extreme.add(node.name)
    _masks_given_from_outside(gm, facts, products, extreme)
    return frozenset(extreme)


def _is_bounded(node: fx.Node, rule: Rule | None, limit: float) -> bool:
    """Whether an op's result is within `limit` whatever its operands are."""
    if rule is None or not rule.restores_given:
        return rule is not None and rule.restores
    assert isinstance(node.target, compat.OpOverload)
    defaults = {a.name: a.default_value for a in compat.schema(node.target).arguments}
    bounds = [argument(node, n, defaults.get(n)) for n in rule.restores_given]
    is_given = all(isinstance(n, int | float) for n in bounds)
    return is_given and bool(max(map(abs, bounds)) <= limit)


def _holds_extreme(node: fx.Node, limit: float) -> bool:
    """Whether a call computes with, or fills in, a number next to the limit or beyond.

    `where(mask, x, finfo.min)` and similar calls carry the number as a scalar.  A
    divisor fills nothing.
    """
    if not isinstance(node.target, compat.OpOverload):
        return False
    if base_name(node.target).removesuffix("_") in family("division"):
        return False
    return any(
        # 0.99, so that `finfo(low).min` itself counts, and what fp32 makes of it.
        isinstance(value, float) and math.isfinite(value) and abs(value) > limit * 0.99
        for _, value in named_arguments(node)
    )


def _masks_given_from_outside(
    gm: fx.GraphModule, facts: Facts, products: set[fx.Node], extreme: set[str]
) -> None:
    """Marks float inputs used as attention masks, which often hold `finfo.min`.

    A mask is added to scores; a product has made the scores, but not the mask.
    """
    for node in gm.graph.nodes:
        if not isinstance(node.target, compat.OpOverload):
            continue
        masks: list[fx.Node] = []
        if base_name(node.target) == "aten::scaled_dot_product_attention":
            masks = [v for k, v in named_arguments(node) if k == "attn_mask" and v]
        elif base_name(node.target) in family("softmax"):
            scores: Any = node.args[0]
            made_by = getattr(scores, "target", None)
            if isinstance(made_by, compat.OpOverload) and base_name(made_by) in family(
                "addition"
            ):
                added = scores.all_input_nodes
                if any(a in products for a in added):
                    masks = [a for a in added if a not in products]
        # A mask is extreme with all the values that it is made from.
        while masks:
            source = masks.pop()
            fact = facts.nodes.get(source.name)
            # What takes a gradient is computed with, and is no mask.
            if fact is None or fact.requires_grad or source.name in extreme:
                continue
            extreme.add(source.name)
            if source.op == "call_function":
                masks.extend(source.all_input_nodes)
