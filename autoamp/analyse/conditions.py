"""The tests a conditional rule may name, each a predicate over one node.

The names are those `autoamp.rules` accepts in `when = [{test = ..., value = ...}]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from autoamp.analyse.facts import Facts, NodeFacts, argument
from autoamp.rules import Condition


def condition_holds(
    condition: Condition, node: fx.Node, facts: NodeFacts, graph: Facts
) -> bool:
    """Whether `condition` is true of `node`."""
    return _TESTS[condition.test](condition, node, facts, graph)


def _reduces_at_least(
    condition: Condition, node: fx.Node, facts: NodeFacts, graph: Facts
) -> bool:
    """Elements read per element written; a scan (cumsum) writes all it reads."""
    shape_in = _shape(node)
    dim = argument(node, "dim")
    if facts.numel and facts.numel == facts.read_numel and isinstance(dim, int):
        return bool(shape_in) and shape_in[dim] >= condition.value
    return facts.read_numel >= condition.value * max(facts.numel, 1)


def _exponent_outside(
    condition: Condition, node: fx.Node, facts: NodeFacts, graph: Facts
) -> bool:
    low, high = condition.value
    exponent = argument(node, "exponent")
    return not isinstance(exponent, (int, float)) or not low <= exponent <= high


def _argument_is(
    condition: Condition, node: fx.Node, facts: NodeFacts, graph: Facts
) -> bool:
    return bool(argument(node, condition.argument) == condition.value)


def _device_is(
    condition: Condition, node: fx.Node, facts: NodeFacts, graph: Facts
) -> bool:
    return facts.device == condition.value


def _shape(node: fx.Node) -> list[int]:
    from autoamp import compat

    first = next((n for n in node.all_input_nodes if "val" in n.meta), None)
    value: Any = first.meta["val"] if first is not None else None
    return [compat.hint(s) for s in getattr(value, "shape", ())]


_TESTS: dict[str, Callable[[Condition, fx.Node, NodeFacts, Facts], bool]] = {
    "reduces_at_least": _reduces_at_least,
    "exponent_outside": _exponent_outside,
    "argument_is": _argument_is,
    "device_is": _device_is,
}
