"""Rules laid over facts: what each node may do, with a reason a user can read.

Nothing is decided about precision here beyond what cannot be otherwise: a *pin* to
fp32.  Everything not pinned is free, and `place` chooses.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.ceiling import CEILING, under_ceiling
from autoamp.analyse.conditions import condition_holds
from autoamp.analyse.control_flow import BODY_LEFT, LOWERED_BODY
from autoamp.analyse.extreme import extreme_values
from autoamp.analyse.facts import (
    Facts,
    NodeFacts,
    Operand,
    argument,
    tensors_of,
)
from autoamp.analyse.numbers import Known, known_numbers
from autoamp.analyse.pins import (
    LAYER_NORMS,
    cut_off,
    gradient_reason,
    literal_reason,
    pin_reason,
)
from autoamp.analyse.verdict import BACKWARD, GAVE_UP, Mode, Verdict
from autoamp.dtypes import HIGH_DTYPE, short_name
from autoamp.errors import PassError
from autoamp.graph_functions import STATE, checkpointed
from autoamp.ops import (
    FACTORIES,
    NOISE,
    base_name,
    bodies_of,
    is_inplace,
    is_out_variant,
    is_pointwise,
    is_view,
)
from autoamp.rules import Category, Rule, Rules

CASTS = frozenset({"aten::to", "aten::_to_copy"})
_MOVES = frozenset({"aten.to.device", "aten.to.dtype_layout"})
_BITS = frozenset({torch.ops.aten.view.dtype, torch.ops.aten.view_copy.dtype})
_SCALES = frozenset(f"aten::{name}" for name in ("mul", "div", "true_divide", "pow"))
_CPU_MIXED = LAYER_NORMS | {
    "aten::group_norm",
    "aten::native_group_norm",
    "aten::rms_norm",
}
"""Norms whose CPU kernels take fp32 parameters beside low data; CUDA's do not."""


@dataclass(frozen=True)
class Classified:
    """Verdicts of a graph, in graph order, and the values a cast must saturate."""

    verdicts: Mapping[str, Verdict]
    extreme: frozenset[str]

    @property
    def pinned(self) -> frozenset[str]:
        """The nodes that must stay fp32."""
        return frozenset(n for n, v in self.verdicts.items() if v.pinned)

    @property
    def promoted(self) -> frozenset[str]:
        """Those that are left to type promotion, which may widen what they read."""
        return frozenset(n for n, v in self.verdicts.items() if v.origin == CEILING)


def classify(
    gm: fx.GraphModule,
    facts: Facts,
    rules: Rules,
    low: torch.dtype,
    keep: Sequence[str] = (),
    *,
    given_up: Mapping[str, str] | None = None,
    ceiling: bool = True,
    to_the_letter: bool = False,
) -> Classified:
    """A verdict for every node that reads or makes fp32 tensors.

    Args:
        keep: the user's module-path patterns.
        given_up: nodes that stay fp32 whatever they are, and why.
        ceiling: pin what type promotion would leave fp32 (`analyse/ceiling.py`).
        to_the_letter: the rules decide alone, as TensorFlow's lists do there; what
            torch cannot do is pinned all the same (docs/how-it-works.md lists it).
    """
    given_up = given_up or {}
    nodes = {n.name: n for n in gm.graph.nodes}
    under = _Context(facts, rules, low, keep, known_numbers(gm), to_the_letter)
    verdicts: dict[str, Verdict] = {}
    for name, fact in facts.nodes.items():
        if name in facts.constants or not fact.involves_floats:
            continue
        if nodes[name].target is operator.getitem and name in facts.element_of:
            continue
        if name in given_up:
            modes = _all("same", fact)
            verdicts[name] = Verdict(
                Category.DENY, given_up[name], GAVE_UP, True, modes
            )
            continue
        try:
            verdicts[name] = _verdict(nodes[name], fact, under)
        except Exception as error:
            raise PassError.at(name, error) from error
    if ceiling:
        verdicts = under_ceiling(gm, facts, verdicts)
    extreme = extreme_values(gm, facts, verdicts, _rules_by_node(gm, rules), low)
    for name, verdict in verdicts.items():
        verdicts[name] = _casting_extremes(verdict, facts.nodes[name], extreme)
    return Classified(verdicts, extreme)


def _casting_extremes(
    verdict: Verdict, fact: NodeFacts, extreme: frozenset[str]
) -> Verdict:
    """The verdict with numbers in tensors, where they are extreme, cast and not given.

    A kernel that converts `torch.tensor(finfo.min)` itself makes it infinite; our cast
    saturates.  A mask is filled in or added; a factor or a divisor is no mask.
    """
    if not any(o.is_scalar and o.value in extreme for o in fact.operands):
        return verdict
    if fact.op.partition(".")[0].rstrip("_") in _SCALES:
        return verdict
    modes = tuple(
        "same" if mode == "any" and o.is_scalar and o.value in extreme else mode
        for o, mode in zip(fact.operands, verdict.modes, strict=True)
    )
    return replace(verdict, modes=modes)


def _rules_by_node(gm: fx.GraphModule, rules: Rules) -> Mapping[str, Rule]:
    """The rule of each node that has one."""
    found: dict[str, Rule] = {}
    for node in gm.graph.nodes:
        if isinstance(node.target, compat.OpOverload):
            rule = _rule_of(node, rules)
            if rule is not None:
                found[node.name] = rule
    return found


def _rule_of(node: fx.Node, rules: Rules) -> Rule | None:
    """The rule of a call of a torch op; a product of one value by itself squares it."""
    rule = None
    if node.target is torch.ops.aten.mul.Tensor and node.args[0] is node.args[1]:
        rule = rules.lookup(torch.ops.aten.square.default)
    return rule or rules.lookup(node.target)


@dataclass(frozen=True)
class _Context:
    """What every verdict of one graph is given under."""

    facts: Facts
    rules: Rules
    low: torch.dtype
    keep: Sequence[str]
    known: Known
    to_the_letter: bool


def _verdict(node: fx.Node, fact: NodeFacts, under: _Context) -> Verdict:
    if not isinstance(node.target, compat.OpOverload):
        return _opaque(node, fact)
    base = base_name(node.target)
    if base in CASTS:
        return _user_cast(node, fact, under)
    if node.target in _BITS:
        reason = "reads the bits of its operand: another dtype has others"
        return _left(reason, fact)
    if is_out_variant(node.target):
        return _left(
            "writes into a tensor it is given (out=), as the user made it", fact
        )
    rule = _rule_of(node, under.rules)
    if rule is None:
        verdict = _by_schema(node.target, fact)
    else:
        verdict = _by_rule(rule, node, fact, under)
    if base in FACTORIES | NOISE:
        verdict = replace(verdict, modes=_all("any", fact))
    pin = pin_reason(node, fact, under.facts, under.keep)
    if pin is None and not under.to_the_letter:
        pin = literal_reason(node, under.low, under.known, verdict.category)
    if pin is not None:
        return replace(
            verdict, pinned=True, reason=pin, origin="autoamp", may_round=False
        )
    if not under.to_the_letter and cut_off(node, under.low, under.known):
        verdict = replace(verdict, moves=not verdict.pinned)
    backward = gradient_reason(node, fact, under.facts)
    if backward is not None and not verdict.pinned:
        return replace(
            verdict, pinned=True, reason=backward, origin=BACKWARD, may_round=True
        )
    return verdict


def _all(mode: Mode, fact: NodeFacts) -> tuple[Mode, ...]:
    """The same mode for every operand."""
    return (mode,) * len(fact.operands)


def _left(reason: str, fact: NodeFacts) -> Verdict:
    """An op that stays as the user wrote it; no list says so."""
    modes = _all("same", fact)
    return Verdict(Category.DENY, reason, "autoamp", True, modes, listed=False)


def _opaque(node: fx.Node, fact: NodeFacts) -> Verdict:
    name = getattr(node.target, "__name__", str(node.target))
    reason = f"{name} is not traced into: it gets the dtypes it was captured with"
    bodies = bodies_of(node)
    left = [body.meta[BODY_LEFT] for body in bodies if BODY_LEFT in body.meta]
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
        _all("same", fact),
    )


def _user_cast(node: fx.Node, fact: NodeFacts, under: _Context) -> Verdict:
    """`.float()`, `.to(...)`, `.type(...)` as the user wrote them."""
    outputs = tensors_of(node.meta.get("val"))
    inputs = [t for n in node.all_input_nodes for t in tensors_of(n.meta.get("val"))]
    made, read = outputs[0].dtype, inputs[0].dtype
    if made != HIGH_DTYPE:
        if made.is_floating_point or made.is_complex:
            reason = f"the model's own cast to {short_name(made)} takes what comes"
            # Of what is low already it would be no copy, to be written to.
            mode: Mode = "high" if fact.storage in under.facts.mutated else "any"
            return Verdict(Category.CLEAR, reason, "autoamp", False, (mode,))
        reason = "turns floats to integers: reads the value its producer made"
        return Verdict(Category.CLEAR, reason, "autoamp", False, ("follow",))
    whole = not (read.is_floating_point or read.is_complex)
    if read == torch.bool or (under.to_the_letter and whole):
        reason = "0 and 1 are exact in any dtype"
        if read != torch.bool:
            reason = "whole numbers are cast to what reads them, as TensorFlow does"
        return Verdict(Category.CLEAR, reason, "autoamp", False, ())
    # `x.to(device)` arrives as an overload that names a device, the dtype filled in.
    moves = str(node.target) in _MOVES or argument(node, "dtype") is None
    if read == HIGH_DTYPE and moves:
        reason = "moves data without changing it"
        return Verdict(Category.CLEAR, reason, "autoamp", False, ("same",))
    reason = "the model casts to fp32 here: a boundary the user drew"
    return Verdict(Category.DENY, reason, "autoamp", True, _all("same", fact))


def _by_rule(rule: Rule, node: fx.Node, fact: NodeFacts, under: _Context) -> Verdict:
    category, reason = rule.category, rule.reason
    for condition in rule.when:
        if condition_holds(condition, node, fact):
            category, reason = condition.category, condition.reason
            break
    modes = _rule_modes(rule, category, node, fact, under)
    asks_fp32 = argument(node, "dtype") == HIGH_DTYPE and bool(fact.operands)
    if category is Category.DENY:
        rounds = rule.may_round and not asks_fp32
        return Verdict(category, reason, rule.origin, True, modes, may_round=rounds)
    # TensorFlow's deny ops alone deny what follows; other fp32 ops there do not.
    pinned = category if under.to_the_letter else Category.DENY
    if fact.device in rule.no_kernel:
        reason = f"torch has no {short_name(under.low)} kernel of it on {fact.device}"
        return Verdict(pinned, reason, rule.origin, True, modes)
    if asks_fp32:
        reason = "the model asks for an fp32 result (dtype=torch.float32)"
        return Verdict(pinned, reason, "autoamp", True, _all("any", fact))
    return Verdict(category, reason, rule.origin, False, modes)


def _rule_modes(
    rule: Rule, category: Category, node: fx.Node, fact: NodeFacts, under: _Context
) -> tuple[Mode, ...]:
    """What each operand of a listed op needs."""
    assert isinstance(node.target, compat.OpOverload)
    modes = [_rule_mode(rule, node.target, o, fact) for o in fact.operands]
    # Rounded first, `topk` would pick others, `floor(2.999)` be 3.
    picks = rule.jumps or (category is Category.CLEAR and fact.makes_others)
    if under.to_the_letter:
        modes = ["same" if mode == "follow" else mode for mode in modes]
    elif picks:
        modes = ["follow" if mode == "same" else mode for mode in modes]
    return tuple(modes)


def _rule_mode(
    rule: Rule, target: compat.OpOverload, operand: Operand, fact: NodeFacts
) -> Mode:
    if operand.argument in rule.fp32_operands:
        return "high"
    if fact.keeps_state and operand.argument == STATE:
        return "high"
    norm_parameter = operand.argument in ("weight", "bias")
    if norm_parameter and fact.device == "cpu" and base_name(target) in _CPU_MIXED:
        return "high"
    return _mode(target, operand, fact)


def _by_schema(target: compat.OpOverload, fact: NodeFacts) -> Verdict:
    """An op no rule knows: safe by its tags, or fp32."""
    modes = tuple(_mode(target, o, fact) for o in fact.operands)
    if is_pointwise(target):
        reason = "in no list; torch tags it pointwise"
        return Verdict(Category.INFER, reason, "schema", False, modes, listed=False)
    if is_view(target):
        reason = "in no list; its schema says it is a view"
        return Verdict(Category.CLEAR, reason, "schema", False, modes, listed=False)
    reason = "in no list, and not known to be pointwise or a view"
    return Verdict(Category.DENY, reason, "schema", True, modes, listed=False)


def _mode(target: compat.OpOverload, operand: Operand, fact: NodeFacts) -> Mode:
    if base_name(target) == "aten::copy_" and operand.argument == "src":
        return "any"  # copy_ converts; that is what it is for
    if not fact.makes_floats:
        return "follow"  # comparisons, argmax: rounding first could change the answer
    if not is_pointwise(target):
        return "same"
    others = [o for o in fact.operands if not o.is_scalar]
    if operand.is_scalar and others:
        return "any"  # 0-dim tensors take no part in promotion
    written = is_inplace(target) and operand.argument != "self"
    if written and base_name(target) != "aten::lerp_":
        return "any"  # what `add_` writes to has its own dtype, whatever is added
    return "same"
