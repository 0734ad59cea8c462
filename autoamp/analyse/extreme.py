"""Values whose cast must saturate: masks with numbers beyond the low dtype's range.

Such numbers are no danger to later ops, but `torch.finfo(torch.float32).min` would
become -inf in fp16 and in bf16, and a row that is all -inf makes softmax NaN.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.classified import Classified
from autoamp.analyse.facts import Facts
from autoamp.analyse.nodes import argument, named_arguments
from autoamp.dtypes import largest
from autoamp.op_names import base_name
from autoamp.rules import Rule, family


def extreme_values(
    gm: fx.GraphModule,
    classified: Classified,
    rules: Mapping[str, Rule],
    low: torch.dtype,
) -> frozenset[str]:
    """The nodes of a graph whose values may be masks beyond the range of `low`.

    Args:
        rules: the rule of each node that has one.
    """
    limit = largest(low)
    facts = classified.facts
    products = _made_by_products(gm, classified)
    found = {n.name for n in gm.graph.nodes if _is_extreme_number(gm, n, limit)}
    for node in gm.graph.nodes:
        if node.op == "call_function":
            rule = rules.get(node.name)
            allowed = node in products and classified.is_allowed(node.name)
            if not (allowed or _is_bounded(node, rule, limit)) and (
                _holds_extreme(node, limit)
                or any(n.name in found for n in _float_inputs(node, facts))
            ):
                found.add(node.name)
    _masks_given_from_outside(gm, facts, products, found)
    return frozenset(found)


def _float_inputs(node: fx.Node, facts: Facts) -> list[fx.Node]:
    """The nodes whose floats a node reads."""
    return [
        n
        for n in node.all_input_nodes
        if n.name in facts.nodes and facts.nodes[n.name].makes_floats
    ]


def _is_bounded(node: fx.Node, rule: Rule | None, limit: float) -> bool:
    """Whether an op's result is within `limit` whatever its operands are."""
    if rule is None:
        return False
    given = [argument(node, n, _default(node, n)) for n in rule.restores_given]
    if given and all(isinstance(n, int | float) for n in given):
        return bool(max(map(abs, given)) <= limit)
    return rule.restores and not given


def _default(node: fx.Node, name: str) -> Any:
    """The default that the schema of a torch op gives for argument `name`."""
    assert isinstance(node.target, compat.OpOverload)
    defaults = {a.name: a.default_value for a in compat.schema(node.target).arguments}
    return defaults.get(name)


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
        isinstance(value, float) and math.isfinite(value) and abs(value) > limit * 0.99
        for _, value in named_arguments(node)
    )


def _is_extreme_number(gm: fx.GraphModule, node: fx.Node, limit: float) -> bool:
    """Whether an attribute holds one extreme number: `torch.tensor(finfo.min)`."""
    if node.op != "get_attr":
        return False
    number = compat.held_number(operator.attrgetter(str(node.target))(gm))
    return number is not None and limit * 0.99 < abs(number) < math.inf


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
            scores = node.args[0]
            if isinstance(scores, fx.Node) and _is_sum(scores):
                added = scores.all_input_nodes
                if any(a in products for a in added):
                    masks = [a for a in added if a not in products]
        _mark_with_sources(masks, facts, extreme)


def _is_sum(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, compat.OpOverload) and (
        base_name(target) in family("addition")
    )


def _mark_with_sources(masks: list[fx.Node], facts: Facts, extreme: set[str]) -> None:
    """Marks masks and the values they are made from, except values with gradients."""
    chain = list(masks)
    while chain:
        at = chain.pop()
        fact = facts.nodes.get(at.name)
        if fact is None or fact.requires_grad or at.name in extreme:
            continue
        extreme.add(at.name)
        if at.op == "call_function":
            chain.extend(at.all_input_nodes)


def _made_by_products(gm: fx.GraphModule, classified: Classified) -> set[fx.Node]:
    """Allow ops and all nodes that are computed from allow ops."""
    found: set[fx.Node] = set()
    for node in gm.graph.nodes:
        above = any(n in found for n in node.all_input_nodes)
        if above or classified.is_allowed(node.name):
            found.add(node)
    return found
