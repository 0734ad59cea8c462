"""Danger as a data-flow fact: it spreads through every op, known or not.

TensorFlow's pass walks lists, so any op it does not know launders the danger of an
`exp` above it.  Here a taint passes through everything until something ends it.

* RANGE: a denied op made it (`exp`, a long sum); what follows may leave the low dtype's
  range.  Ends at range-restoring ops (softmax, tanh, norms, clamp) and at allow ops.
* POSITION: exact integers (positions, coordinates); bf16 holds integers only to 256.
  Ends likewise, and where a huge factor makes a mask of it.
* SIZE: in fp16, what nobody has bounded: the caller's data, buffers, residual streams,
  what arithmetic with a number beyond the range makes.  Rounded before it is normalised
  it may be infinite, or zero; torch.autocast rounds it after that.  Ends likewise.
* extreme: a mask that holds numbers beyond the low dtype's range; not a danger to what
  follows, but a cast of it must saturate.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.facts import Facts, argument, named_arguments, tensors_of
from autoamp.analyse.verdict import Verdict
from autoamp.dtypes import HIGH_DTYPE, largest
from autoamp.ops import base_name
from autoamp.rules import Category, Rule

RANGE = "range"
POSITION = "position"
SIZE = "size"

_MASKING_FACTOR = 1e4
"""A factor this large makes a mask: 0/1 become 0/-huge, positions are gone."""

_NARROW_INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8})
"""Integer dtypes whose values every low dtype holds exactly (to 255)."""


@dataclass(frozen=True)
class Taints:
    """Which dangers each node reads and carries on, and where they began."""

    reads: Mapping[str, frozenset[str]]
    carries: Mapping[str, frozenset[str]]
    source: Mapping[str, str]
    extreme: frozenset[str]


def spread_taints(
    gm: fx.GraphModule,
    facts: Facts,
    verdicts: Mapping[str, Verdict],
    rules: Mapping[str, Rule],
    low: torch.dtype,
    *,
    unbounded: Collection[str] = (),
) -> Taints:
    """Follows every taint through the graph, in order, storages included.

    Args:
        unbounded: values whose size is a danger, where SIZE begins.
    """
    spread = _Spread(facts, verdicts, rules, largest(low), frozenset(unbounded))
    for node in gm.graph.nodes:
        if node.op == "call_function":
            spread.visit(node)
    _masks_given_from_outside(gm, facts, verdicts, spread.extreme)
    return Taints(
        spread.reads, spread.carries, spread.source, frozenset(spread.extreme)
    )


class _Spread:
    def __init__(
        self,
        facts: Facts,
        verdicts: Mapping[str, Verdict],
        rules: Mapping[str, Rule],
        limit: float,
        unbounded: frozenset[str],
    ) -> None:
        self.facts = facts
        self.verdicts = verdicts
        self.rules = rules
        self.limit = limit
        self.unbounded = unbounded
        self.reads: dict[str, frozenset[str]] = {}
        self.carries: dict[str, frozenset[str]] = {}
        self.source: dict[str, str] = {}
        self.extreme: set[str] = set()
        self.by_storage: dict[int, frozenset[str]] = {}
        for name in unbounded & facts.constants:
            self.carries[name] = frozenset({SIZE})
            self.source[name] = name

    def visit(self, node: fx.Node) -> None:
        fact = self.facts.nodes[node.name]
        inputs = list(dict.fromkeys(o.value for o in fact.operands))
        if node.name in self.facts.element_of:
            inputs.append(self.facts.element_of[node.name])
        reads = frozenset[str]().union(*(self._of(name) for name in inputs))
        if SIZE in reads and not self._may_round_unbounded(node):
            reads -= {SIZE}
        self.reads[node.name] = reads
        carried = self._carried(node, reads)
        self.carries[node.name] = carried
        if reads or carried:
            above = (self.source[i] for i in inputs if self._of(i) and i in self.source)
            self.source[node.name] = next(above, node.name)
        if fact.storage in self.facts.mutated and carried:
            known = self.by_storage.get(fact.storage, frozenset())
            self.by_storage[fact.storage] = known | carried
        if self._is_extreme(node, inputs):
            self.extreme.add(node.name)

    def _may_round_unbounded(self, node: fx.Node) -> bool:
        """Whether an operand of any size is one the low dtype would hold, were it low.

        Not statistics that stay fp32 beside low data, nor what only a shape is read of.
        """
        verdict = self.verdicts.get(node.name)
        if verdict is None:
            return True
        pairs = zip(self.facts.nodes[node.name].operands, verdict.modes, strict=True)
        held = (o.value for o, mode in pairs if mode in ("same", "follow"))
        return any(SIZE in self._of(value) for value in held)

    def _of(self, name: str) -> frozenset[str]:
        fact = self.facts.nodes[name]
        return self.carries.get(name, frozenset()) | self.by_storage.get(
            fact.storage, frozenset()
        )

    def _carried(self, node: fx.Node, reads: frozenset[str]) -> frozenset[str]:
        rule = self.rules.get(node.name)
        fact = self.facts.nodes[node.name]
        if self._ends_danger(node, rule):
            return frozenset()
        own: set[str] = set()
        denied = self._category(node) is Category.DENY
        if rule is not None and rule.taints and denied and fact.makes_floats:
            own.add(RANGE)
        counts = rule is not None and rule.positions and fact.makes_floats
        if counts or _casts_integers(node):
            own.add(POSITION)
        if node.name in self.unbounded:
            own.add(SIZE)
        carried = reads | own
        if _largest_scalar(node) >= _MASKING_FACTOR:
            carried -= {POSITION}
        return carried

    def _category(self, node: fx.Node) -> Category | None:
        """The category in force, conditions of the rule considered."""
        verdict = self.verdicts.get(node.name)
        return verdict.category if verdict is not None else None

    def _ends_danger(self, node: fx.Node, rule: Rule | None) -> bool:
        if rule is None:
            return False
        given = [argument(node, n, _default(node, n)) for n in rule.restores_given]
        if given and all(isinstance(n, int | float) for n in given):
            return bool(max(map(abs, given)) <= self.limit)
        if rule.restores and not given:
            return True
        return self._category(node) is Category.ALLOW

    def _is_extreme(self, node: fx.Node, inputs: list[str]) -> bool:
        if self._ends_danger(node, self.rules.get(node.name)):
            return False
        # `where(mask, x, finfo.min)` and friends carry the constant as a scalar.
        if _largest_scalar(node) > self.limit * 0.99 and not _divides(node):
            return True
        return any(name in self.extreme for name in inputs)


def _default(node: fx.Node, name: str) -> Any:
    """What the schema of a torch op gives argument `name` where a call does not."""
    assert isinstance(node.target, compat.OpOverload)
    defaults = {a.name: a.default_value for a in node.target._schema.arguments}
    return defaults.get(name)


def _casts_integers(node: fx.Node) -> bool:
    """Whether `node` turns wide integers to floats."""
    made = tensors_of(node.meta.get("val"))
    if not made or made[0].dtype != HIGH_DTYPE:
        return False
    if not isinstance(node.target, compat.OpOverload):
        return False
    read = [
        t
        for n in node.all_input_nodes
        for t in tensors_of(n.meta.get("val"))
        if n.target is not operator.getitem or isinstance(n.meta["val"], torch.Tensor)
    ]
    converts = base_name(node.target) in ("aten::to", "aten::_to_copy")
    return converts and any(
        not t.is_floating_point()
        and not t.is_complex()
        and t.dtype not in _NARROW_INTEGERS
        for t in read
    )


def _divides(node: fx.Node) -> bool:
    """Whether a number among the arguments of a call is a divisor."""
    target = node.target
    return isinstance(target, compat.OpOverload) and "div" in base_name(target)


def _largest_scalar(node: fx.Node) -> float:
    """The largest magnitude among the float literals of a call."""
    if not isinstance(node.target, compat.OpOverload):
        return 0.0
    finite = [
        abs(value)
        for _, value in named_arguments(node)
        if isinstance(value, float) and math.isfinite(value)
    ]
    return max(finite, default=0.0)


def _masks_given_from_outside(
    gm: fx.GraphModule,
    facts: Facts,
    verdicts: Mapping[str, Verdict],
    extreme: set[str],
) -> None:
    """Marks float inputs used as attention masks: they often hold `finfo.min`.

    A mask is what is added to scores, which a product has made, and is made by none.
    """
    products = _made_by_products(gm, verdicts)
    for node in gm.graph.nodes:
        if not isinstance(node.target, compat.OpOverload):
            continue
        masks: list[fx.Node] = []
        if base_name(node.target) == "aten::scaled_dot_product_attention":
            masks = [v for k, v in named_arguments(node) if k == "attn_mask" and v]
        elif base_name(node.target) in ("aten::softmax", "aten::_softmax"):
            scores = node.args[0]
            if isinstance(scores, fx.Node) and "add" in str(scores.target):
                added = scores.all_input_nodes
                if any(a in products for a in added):
                    masks = [a for a in added if a not in products]
        for mask in masks:
            chain: list[fx.Node] = [mask]
            while chain:
                at = chain.pop()
                fact = facts.nodes.get(at.name)
                if fact is None or fact.requires_grad or at.name in extreme:
                    continue
                extreme.add(at.name)
                if at.op == "call_function":
                    chain.extend(at.all_input_nodes)


def _made_by_products(
    gm: fx.GraphModule, verdicts: Mapping[str, Verdict]
) -> set[fx.Node]:
    """Allow ops and all that is computed from them."""
    found: set[fx.Node] = set()
    for node in gm.graph.nodes:
        verdict = verdicts.get(node.name)
        allowed = verdict is not None and verdict.category is Category.ALLOW
        if allowed or any(above in found for above in node.all_input_nodes):
            found.add(node)
    return found
