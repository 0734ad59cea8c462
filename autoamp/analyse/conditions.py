"""The tests a conditional rule may name, each a predicate over one node.

`autoamp.rules` accepts the same names in `when = [{test = ..., value = ...}]`, and has
checked the type of each test's value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from autoamp import compat
from autoamp.analyse.facts import NodeFacts
from autoamp.analyse.nodes import argument, tensors_of
from autoamp.rules import Condition


@dataclass(frozen=True)
class _Site:
    """The input of a test: a node, its facts and the value to compare with."""

    node: fx.Node
    facts: NodeFacts
    argument: str
    value: Any


def condition_holds(condition: Condition, node: fx.Node, facts: NodeFacts) -> bool:
    """Whether `condition` is true of `node`."""
    site = _Site(node, facts, condition.argument, condition.value)
    return _TESTS[condition.test](site)


def _reduces_at_least(site: _Site) -> bool:
    """Whether enough elements are read per element written.

    A scan (cumsum) writes as many elements as it reads, so its axis counts instead.
    """
    facts = site.facts
    dim = argument(site.node, "dim")
    if _reduces_unknown(site.node, dim):
        return True
    if facts.numel and facts.numel == facts.read_numel and isinstance(dim, int):
        shape = _shape_read(site.node)
        return bool(shape) and bool(shape[dim] >= site.value)
    return bool(facts.read_numel >= site.value * max(facts.numel, 1))


def _reduces_unknown(node: fx.Node, dim: object) -> bool:
    """Whether a reduced axis is symbolic: later calls may have it at any length."""
    read, made = _sizes_read(node), tensors_of(node.meta.get("val"))
    kept = made[0].shape if made else ()
    if read == list(kept) and isinstance(dim, int) and read:
        return not isinstance(read[dim], int)
    unknown = Counter(str(s) for s in read if not isinstance(s, int))
    return bool(unknown - Counter(str(s) for s in kept if not isinstance(s, int)))


def _exponent_outside(site: _Site) -> bool:
    low, high = site.value
    exponent = argument(site.node, "exponent")
    return not isinstance(exponent, (int, float)) or not low <= exponent <= high


def _argument_is(site: _Site) -> bool:
    return bool(argument(site.node, site.argument) == site.value)


def _device_is(site: _Site) -> bool:
    return bool(site.facts.device == site.value)


def _contracts(site: _Site) -> bool:
    equation = argument(site.node, "equation")
    if not isinstance(equation, str):  # `einsum` takes lists of numbers as well
        return bool(site.value)
    read, _, made = equation.replace(" ", "").partition("->")
    operands = [set(term) - set(".") for term in read.split(",")]
    times = Counter(index for operand in operands for index in operand)
    letters = Counter(read.replace(",", "").replace(".", ""))
    kept = set(made) if "->" in equation else {i for i in times if letters[i] == 1}
    shared = any(n > 1 and index not in kept for index, n in times.items())
    return bool(shared == site.value)


def _shape_read(node: fx.Node) -> list[int]:
    return [compat.hint(s) for s in _sizes_read(node)]


def _sizes_read(node: fx.Node) -> list[Any]:
    first = next((n for n in node.all_input_nodes if "val" in n.meta), None)
    value = first.meta["val"] if first is not None else None
    return list(getattr(value, "shape", ()))


_TESTS: dict[str, Callable[[_Site], bool]] = {
    "reduces_at_least": _reduces_at_least,
    "exponent_outside": _exponent_outside,
    "argument_is": _argument_is,
    "contracts": _contracts,
    "device_is": _device_is,
}
