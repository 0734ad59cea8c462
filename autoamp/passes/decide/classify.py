"""Rules laid over facts: the verdict on each node, with a reason a user can read.

The one decision about precision here is a *pin* to fp32, for a node that must not run
low.  Every other node is free, and `place` chooses its precision.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE, short_name
from autoamp.errors import PassError
from autoamp.passes.decide.ceiling import under_ceiling
from autoamp.passes.decide.known_numbers import cut_off, extreme_values, known_numbers
from autoamp.passes.decide.pins import Context, Site, first_pin, held_by_strides
from autoamp.passes.decide.verdict import (
    AUTHOR,
    GAVE_UP,
    Classified,
    Mode,
    Verdict,
    all_of,
)
from autoamp.passes.functions import STATE, checkpointed
from autoamp.passes.ops import (
    base_name,
    bodies_of,
    is_custom,
    is_inplace,
    is_out_variant,
    is_pointwise,
    is_view,
    mutates,
)
from autoamp.passes.rules import (
    Category,
    Condition,
    Rule,
    Rules,
    autocast_rules,
    family,
    is_default,
)
from autoamp.passes.see.facts import Facts, NodeFacts, Operand, read_wide
from autoamp.passes.see.nodes import argument, named_arguments, tensors_of
from autoamp.passes.see.normalise import WIDENED
from autoamp.passes.see.regions import BODY_LEFT, LOWERED_BODY, given_low


def classify(
    gm: fx.GraphModule,
    facts: Facts,
    rules: Rules,
    low: torch.dtype,
    keep: Sequence[str] = (),
    *,
    kept: Mapping[str, str] | None = None,
    given_up: Mapping[str, str] | None = None,
    ceiling: bool = True,
    to_the_letter: bool = False,
) -> Classified:
    """A verdict for every node that reads or makes fp32 tensors.

    Args:
        keep: patterns of the module paths that stay fp32.
        kept: the reasons of patterns that are not from the user's `keep=`.
        given_up: nodes that stay fp32 whatever their ops are, to the reasons.
        ceiling: pin ops that type promotion would leave fp32 (`ceiling.py`).
        to_the_letter: the rules decide alone, as the lists do in TensorFlow; calls are
            pinned all the same where torch has no choice (docs/how-it-works.md).
    """
    given_up = given_up or {}
    nodes = {n.name: n for n in gm.graph.nodes}
    under = Context(
        facts,
        rules,
        low,
        keep=keep,
        kept=kept or {},
        known=known_numbers(gm),
        strides=held_by_strides(gm, facts),
        to_the_letter=to_the_letter,
    )
    verdicts: dict[str, Verdict] = {}
    for name, fact in facts.nodes.items():
        if name in facts.constants or not fact.involves_floats:
            continue
        if nodes[name].target is operator.getitem and name in facts.element_of:
            continue
        # Asked first: it may be the verdict on this very node that has failed.
        if name in given_up:
            modes = all_of("same", fact)
            verdicts[name] = Verdict(
                Category.DENY, given_up[name], GAVE_UP, True, modes
            )
            continue
        try:
            verdicts[name] = _verdict(nodes[name], fact, under)
        except Exception as error:
            raise PassError.at(name, error) from error
    # A call that gives fp32 in either precision widens nothing that it reads.
    wide = {
        name: replace(facts.nodes[name], keeps_state=True)
        for name, verdict in verdicts.items()
        if verdict.fp32_results
    }
    facts = replace(facts, nodes={**facts.nodes, **wide}) if wide else facts
    classified = Classified(facts, verdicts)
    # The ceiling reads the pins of the whole graph, so every call has its verdict by
    # now.
    if ceiling:
        classified = under_ceiling(gm, classified)
    by_node = {name: _rule_of(node, rules) for name, node in nodes.items()}
    extreme = extreme_values(gm, classified, by_node, low)
    verdicts = {
        name: _casting_extremes(verdict, facts.nodes[name], extreme)
        for name, verdict in classified.verdicts.items()
    }
    return Classified(facts, verdicts, extreme)


def _casting_extremes(
    verdict: Verdict, fact: NodeFacts, extreme: frozenset[str]
) -> Verdict:
    """The verdict, with a cast of ours for each 0-dim operand that may be extreme.

    A kernel that converts `torch.tensor(finfo.min)` itself makes the number infinite;
    our cast saturates.  A mask is filled in or added; a factor or divisor is no mask.
    """
    if not any(o.is_scalar and o.value in extreme for o in fact.operands):
        return verdict
    if fact.base.rstrip("_") in family("computes_with_its_number"):
        return verdict
    modes = tuple(
        "same" if mode == "any" and o.is_scalar and o.value in extreme else mode
        for o, mode in zip(fact.operands, verdict.modes, strict=True)
    )
    return replace(verdict, modes=modes)


def _rule_of(node: fx.Node, rules: Rules) -> Rule | None:
    """The rule of a call; a product of a value and itself is a square."""
    rule = None
    # `x * x` leaves the range of fp16 at 256, as `x.square()` does.
    if node.target is torch.ops.aten.mul.Tensor and node.args[0] is node.args[1]:
        rule = rules.lookup(torch.ops.aten.square.default)
    return rule or rules.lookup(node.target)


def _verdict(node: fx.Node, fact: NodeFacts, under: Context) -> Verdict:
    written = as_written(
        node, fact, under.facts, under.low, to_the_letter=under.to_the_letter
    )
    if written is not None:
        return written
    assert isinstance(node.target, compat.OpOverload)
    rule = _rule_of(node, under.rules)
    if rule is None:
        verdict = as_authors_say(node, fact, under.low) or _by_schema(node.target, fact)
    else:
        verdict = _by_rule(rule, node, fact, under)
    if base_name(node.target) in family("factory", "noise"):
        verdict = replace(verdict, modes=all_of("any", fact))
    if not under.to_the_letter and cut_off(node, under.low, under.known):
        verdict = replace(verdict, moves=not verdict.pinned)
    verdict = replace(verdict, autocast=_autocasts(node, fact, rule))
    held = first_pin(Site(node, fact, verdict, under))
    if held is None:
        return verdict
    pin, reason = held
    return replace(
        verdict,
        pinned=True,
        reason=reason,
        origin=pin.origin,
        may_round=pin.may_round,
        moves=False,
    )


def _autocasts(node: fx.Node, fact: NodeFacts, rule: Rule | None) -> Category | None:
    """What autocast's list says of a call: deny, infer, or None where it has no say."""
    assert isinstance(node.target, compat.OpOverload)
    # A rule of the user's goes before autocast's list.  The list of `exp` says nothing
    # of `exp_`, and a kernel's name nothing of the calls that the kernel stands for.
    users = rule is not None and not is_default(rule.origin)
    if users or fact.chain is not None or is_inplace(node.target):
        return None
    listed = autocast_rules(fact.device).lookup(node.target)
    if listed is None:
        return None
    for condition in listed.when:
        if condition_holds(condition, node, fact):
            return condition.category
    return None if listed.category is Category.ALLOW else listed.category


def _by_rule(rule: Rule, node: fx.Node, fact: NodeFacts, under: Context) -> Verdict:
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
    # In TensorFlow only deny ops deny the ops after them; other fp32 ops do not.
    pinned = category if under.to_the_letter else Category.DENY
    if fact.device in rule.no_kernel:
        reason = f"torch has no {short_name(under.low)} kernel of it on {fact.device}"
        return Verdict(pinned, reason, rule.origin, True, modes)
    if asks_fp32:
        reason = "the model asks for an fp32 result (dtype=torch.float32)"
        return Verdict(pinned, reason, "autoamp", True, all_of("any", fact))
    verdict = Verdict(category, reason, rule.origin, False, modes)
    if not is_custom(node.target):
        return verdict
    wanted = [HIGH_DTYPE if mode == "high" else under.low for mode in modes]
    return with_its_results(verdict, node, wanted, fact)


def _rule_modes(
    rule: Rule, category: Category, node: fx.Node, fact: NodeFacts, under: Context
) -> tuple[Mode, ...]:
    """The mode of each operand of an op that a rule lists."""
    assert isinstance(node.target, compat.OpOverload)
    # CPU kernels of these norms take fp32 parameters beside low data; CUDA's do not.
    norm = fact.device == "cpu" and (
        base_name(node.target) in family("fp32_parameters_on_cpu")
    )
    wide = {
        *rule.fp32_operands,
        *([STATE] if fact.keeps_state else []),
        *(["weight", "bias"] if norm else []),
    }
    modes: list[Mode] = [
        "high" if o.argument in wide else _mode(node.target, o, fact)
        for o in fact.operands
    ]
    # After rounding, `topk` would pick other elements and `floor(2.999)` would be 3.
    picks = rule.jumps or (category is Category.CLEAR and fact.makes_others)
    if under.to_the_letter:
        modes = ["same" if mode == "follow" else mode for mode in modes]
    elif picks:
        modes = ["follow" if mode == "same" else mode for mode in modes]
    if fact.keeps_state:
        cast_inside = read_wide(node, under.low)
        for at, operand in enumerate(fact.operands):
            # The op casts these at each read, and their gradients are summed over the
            # reads in fp32; one cast of ours would sum them in the low dtype.
            if operand.value in cast_inside and operand.argument != STATE:
                modes[at] = "any"
    return tuple(modes)


def _by_schema(target: compat.OpOverload, fact: NodeFacts) -> Verdict:
    """The verdict on an op that no rule knows: free if its schema or tags allow it."""
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
        return "any"  # `copy_` converts its source by itself
    if not fact.makes_floats:
        return "follow"  # comparisons, argmax: rounding first could change the answer
    if not is_pointwise(target):
        return "same"
    others = [o for o in fact.operands if not o.is_scalar]
    if operand.is_scalar and others:
        return "any"  # 0-dim tensors take no part in promotion
    written = is_inplace(target) and operand.argument != "self"
    if written and base_name(target) != "aten::lerp_":
        return "any"  # `add_` keeps the dtype of `self`, whatever is added
    return "same"


# -- the tests that a rule's condition may name ----------------------------------------


def condition_holds(condition: Condition, node: fx.Node, facts: NodeFacts) -> bool:
    """Whether `condition` is true of `node`; its value's type has been checked."""
    value: Any = condition.value
    match condition.test:
        case "reduces_at_least":
            return _reduces_at_least(node, facts, value)
        case "exponent_outside":
            exponent = argument(node, "exponent")
            is_number = isinstance(exponent, int | float)
            return not is_number or not value[0] <= exponent <= value[1]
        case "argument_is":
            return bool(argument(node, condition.argument) == value)
        case "device_is":
            return bool(facts.device == value)
        case "contracts":
            return _contracts(node, value)
    raise AssertionError(condition.test)


def _reduces_at_least(node: fx.Node, facts: NodeFacts, count: int) -> bool:
    """Whether enough elements are read per element written.

    A scan (cumsum) writes as many elements as it reads, so its axis counts instead.
    """
    dim = argument(node, "dim")
    first = next((n for n in node.all_input_nodes if "val" in n.meta), None)
    read = list(getattr(first.meta["val"], "shape", ())) if first is not None else []
    results = tensors_of(node.meta.get("val"))
    written = list(results[0].shape) if results else []
    # A reduced axis of symbolic size may have any length at a later call.
    if read == written and isinstance(dim, int) and read:
        if not isinstance(read[dim], int):
            return True
    elif _symbols(read) - _symbols(written):
        return True
    if facts.numel and facts.numel == facts.read_numel and isinstance(dim, int):
        return bool(read) and bool(compat.hint(read[dim]) >= count)
    return bool(facts.read_numel >= count * max(facts.numel, 1))


def _symbols(sizes: Sequence[Any]) -> Counter[str]:
    return Counter(str(size) for size in sizes if not isinstance(size, int))


def _contracts(node: fx.Node, wanted: bool) -> bool:
    """Whether an `einsum` sums over an index that two operands share, as `wanted`."""
    equation = argument(node, "equation")
    if not isinstance(equation, str):  # `einsum` takes lists of numbers as well
        return wanted
    read, _, made = equation.replace(" ", "").partition("->")
    operands = [set(term) - set(".") for term in read.split(",")]
    times = Counter(index for operand in operands for index in operand)
    letters = Counter(read.replace(",", "").replace(".", ""))
    # Without `->` the result has the letters that stand once in the equation.
    kept = set(made) if "->" in equation else {i for i in times if letters[i] == 1}
    return wanted == any(n > 1 and index not in kept for index, n in times.items())


# -- calls that stay as the user wrote them: casts, functions, `out=` ------------------

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
        if WIDENED not in node.meta:
            return _user_cast(node, fact, graph, to_the_letter)
        # Our capture cast to fp32 a result that is half under autocast.  In the compute
        # dtype the result stays as it is; an fp16 result in a graph of bf16 is rounded
        # once, where a reader would round it.
        (read,) = (
            t for n in node.all_input_nodes for t in tensors_of(n.meta.get("val"))
        )
        reason = f"the {short_name(read.dtype)} result of a Function under custom_fwd"
        written = fact.storage in graph.mutated
        if read.dtype == low and not written:
            return Verdict(Category.ALLOW, reason, AUTHOR, False, (), asked=True)
        return Verdict(Category.CLEAR, reason, AUTHOR, written, ())
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
    elif any(LOWERED_BODY in body.meta for body in bodies):
        what = name
        if node.target is checkpointed:
            what = "a checkpointed region"
        taken = given_low(node, bodies)
        reason = f"{what}: rewritten inside, fp32 at its edges"
        if taken:
            reason = f"{what}: rewritten inside, takes {', '.join(sorted(taken))} low"
            modes = tuple[Mode, ...](
                "same" if o.value in taken else "high" for o in fact.operands
            )
            return Verdict(
                Category.INFER,
                reason,
                "autoamp",
                False,
                modes,
                asked=True,
                fp32_results=True,
            )
    return _denied(reason, fact)


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
    by_name = dict(named_arguments(node))
    positional = [a for a in compat.schema(op).arguments if not a.kwarg_only]
    args = [by_name.get(a.name, a.default_value) for a in positional]

    def fake(operand: fx.Node) -> Any:
        value = operand.meta["val"]
        if not isinstance(value, compat.FakeTensor) or value.device.type == device:
            return value
        with value.fake_mode:
            return torch.empty_like(value, device=device)

    return [a.name for a in positional], list(fx.map_arg(args, fake))
