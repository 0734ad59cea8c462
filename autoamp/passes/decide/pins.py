"""The reasons to pin a call whatever its op's category: one table, asked in order."""

from __future__ import annotations

import fnmatch
import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.passes.decide.known_numbers import Known, literal_reason
from autoamp.passes.decide.verdict import BACKWARD, Verdict
from autoamp.passes.functions.norms import OWN_NORMS
from autoamp.passes.ops import base_name, is_pointwise, is_view
from autoamp.passes.rules import Rules, family
from autoamp.passes.see.facts import Facts, NodeFacts
from autoamp.passes.see.nodes import argument, named_arguments, tensors_of
from autoamp.passes.see.strides import made_of


def held_by_strides(gm: fx.GraphModule, facts: Facts) -> Mapping[str, str]:
    """The calls that make or view values whose strides matter, each to the reason.

    A cast lays its result out without gaps.  A view with gaps, such as `y[:, ::2]`,
    keeps its strides only where the cast comes before the view: the view is then taken
    of an fp32 tensor that lies as the model's does.
    """
    nodes = {n.name: n for n in gm.graph.nodes}
    returned = "its result, or a view of it, is returned with gaps"
    why = {v: returned for v in facts.returned if _has_gaps(nodes[v])}
    as_read = "its layout is read by as_strided, which a cast would change"
    for node in gm.graph.nodes:
        if isinstance(node.target, compat.OpOverload) and base_name(
            node.target
        ) in family("reads_strides"):
            read = [o.value for o in facts.nodes[node.name].operands[:1]]
            why |= dict.fromkeys((node.name, *read), as_read)
    found: dict[str, str] = {}
    for value in (v for v in why if facts.nodes[v].makes_floats):
        views, base = views_down_to(value, facts)
        # A cast of a base without gaps lies as the base does.
        made = [*views, base] if _has_gaps(nodes[base]) else views
        found |= dict.fromkeys(made, why[value])
    return found | _held_by_masks(gm, facts)


def _held_by_masks(gm: fx.GraphModule, facts: Facts) -> dict[str, str]:
    """The attentions that would lie otherwise if low, where that is seen.

    Torch's fused kernel takes no mask that requires grad, even where no gradients are
    recorded; a cast that is made there does not require grad.
    """
    why = "without gradients a cast of its mask changes its layout, which is relied on"
    held: dict[str, str] = {}
    mode = compat.new_fake_mode(symbolic=False)
    laid: dict[fx.Node, Any] = {}
    makers: dict[fx.Node, tuple[str, ...]] = {}
    for node in gm.graph.nodes:
        by = tuple(m for n in node.all_input_nodes for m in makers.get(n, ()))
        if node.op == "output":
            return held | dict.fromkeys(by, why)
        is_op = isinstance(node.target, compat.OpOverload)
        if is_op and base_name(node.target) in family("attention"):
            fact = facts.nodes[node.name]
            learned = any(facts.nodes[o.value].requires_grad for o in fact.operands)
            if learned and not fact.requires_grad:
                by = (*by, node.name)
        if not by:
            continue
        # `made_of` has operands that require no grad, as the casts.
        try:
            made = made_of(node, lambda n: laid.get(n, n.meta.get("val")), mode)
        except Exception:  # noqa: BLE001  # a view that cannot be made
            held |= dict.fromkeys(by, why)
            continue
        if _strides(made) != _strides(node.meta.get("val")):
            laid[node], makers[node] = made, by
    return held


def _strides(value: Any) -> list[list[int]]:
    return [[compat.hint(s) for s in t.stride()] for t in tensors_of(value)]


def views_down_to(value: str, facts: Facts) -> tuple[list[str], str]:
    """The makers of `value` and of the views below it, and the maker of the base."""
    storage = facts.nodes[value].storage
    views: list[str] = []
    while True:
        maker = facts.producer(value)
        below = (o.value for o in facts.nodes[maker].operands)
        value = next((v for v in below if facts.nodes[v].storage == storage), "")
        if not value:
            return views, maker
        views.append(maker)


def _has_gaps(node: fx.Node) -> bool:
    """Whether a node makes a tensor with gaps, or whose elements share memory.

    A copy of any other tensor has its strides.  A symbolic size is taken as it was.
    """
    for tensor in tensors_of(node.meta.get("val")):
        if tensor.layout is not torch.strided:
            continue
        sizes = [compat.hint(s) for s in tensor.shape]
        if 0 in sizes:
            continue
        strides = [compat.hint(s) for s in tensor.stride()]
        inside = 1
        # From the innermost dimension out: without gaps each stride is the product of
        # the sizes inside.  A dimension of one element may have any stride.
        for stride, size in sorted(zip(strides, sizes, strict=True)):
            if size != 1 and stride != inside:
                return True
            inside *= size
    return False


@dataclass(frozen=True)
class Context:
    """What all verdicts of one graph share.

    Attributes:
        facts: the facts of the whole graph.
        rules: the op rules.
        low: the compute dtype.
        keep: patterns of the module paths that stay fp32.
        kept: the reasons of these patterns, where they are not the user's `keep=`.
        known: the numbers that tensors hold.
        strides: the calls that stay fp32 for strides' sake, each to the reason.
        to_the_letter: whether TensorFlow's lists decide alone where torch has a choice.
    """

    facts: Facts
    rules: Rules
    low: torch.dtype
    keep: Sequence[str]
    kept: Mapping[str, str]
    known: Known
    strides: Mapping[str, str]
    to_the_letter: bool


@dataclass(frozen=True)
class Site:
    """A call of a torch op, with its facts, and the rules' verdict on it."""

    node: fx.Node
    fact: NodeFacts
    verdict: Verdict
    under: Context

    @functools.cached_property  # most pins ask
    def base(self) -> str:
        """The op's name without its overload."""
        assert isinstance(self.node.target, compat.OpOverload)
        return base_name(self.node.target)


def kept_by(keep: Sequence[str], modules: Sequence[str]) -> str | None:
    """The first of the user's patterns that keeps a call in these modules in fp32.

    A pattern keeps all that is inside the modules it names: nothing calls a ModuleList.
    """
    for pattern in keep:
        for path in modules or ("",):
            if any(fnmatch.fnmatchcase(each, pattern) for each in _around(path)):
                return pattern
    return None


@functools.lru_cache(maxsize=4096)
def _around(path: str) -> tuple[str, ...]:
    """A path and the paths of the modules around it: "a.b" is in "a"."""
    return tuple(itertools.accumulate(path.split("."), "{}.{}".format))


def _kept(at: Site) -> str | None:
    pattern = kept_by(at.under.keep, at.fact.modules)
    if pattern is None:
        return None
    return at.under.kept.get(pattern, f"kept in fp32 by keep={pattern!r}")


def _in_a_region(at: Site) -> str | None:
    if at.fact.autocast is None:
        return None
    if compat.in_custom_fwd(at.node):
        return "in a custom Function under torch.amp.custom_fwd: runs as under autocast"
    state = "on" if at.fact.autocast else "off"
    return f"inside the model's own torch.autocast region, switched {state}"


def _mixes(at: Site) -> str | None:
    if at.fact.mixes_floats:
        return "has operands of another float dtype: left as the user wrote it"
    return None


_NUMBERS = frozenset(
    {
        "batch1",
        "batch2",
        "bias",
        "grid",
        "input",
        "input1",
        "input2",
        "key",
        "mat",
        "mat1",
        "mat2",
        "other",
        "per_sample_weights",
        "query",
        "running_mean",
        "running_var",
        "self",
        "source",
        "src",
        "tensor1",
        "tensor2",
        "value",
        "values",
        "vec",
        "weight",
    }
)
"""Arguments of torch's ops that hold numbers to compute with: no indices, no masks."""


def _mixes_integers(at: Site) -> str | None:
    """The reason to pin a call that torch may refuse, with the dtypes in the error.

    Torch has no tag for ops that take one dtype only, and fake tensors do not refuse
    all that kernels refuse.
    """
    target = at.node.target
    assert isinstance(target, compat.OpOverload)
    if not at.fact.operands or not at.base.startswith("aten::"):
        return None
    if is_pointwise(target) or is_view(target) or at.base in _CONVERT:
        return None
    for name, value in named_arguments(at.node):
        if name in _NUMBERS and isinstance(value, fx.Node):
            found = value.meta.get("val")
            if not isinstance(found, torch.Tensor) or not found.dim():
                continue
            if not (found.is_floating_point() or found.is_complex()):
                return f"{name} holds integers: left as the user wrote it"
    return None


_CONVERT = frozenset({"aten::to", "aten::_to_copy", "aten::copy_", "aten::type_as"})
"""Ops that give one tensor the dtype of another."""


def _draws(at: Site) -> str | None:
    assert isinstance(at.node.target, compat.OpOverload)
    seeded = torch.Tag.nondeterministic_seeded in at.node.target.tags
    if seeded and not at.fact.operands:
        return "draws random numbers, which differ in another dtype"
    return None


def _made_of_no_floats(at: Site) -> str | None:
    out_of_none = at.fact.makes_floats and not at.fact.operands
    if out_of_none and at.base not in family("factory"):
        return "makes fp32 from integers or booleans: the model chose its dtype"
    return None


def _written_unseen(at: Site) -> str | None:
    if at.fact.storage in at.under.facts.written_opaquely:
        return "a function that autoamp cannot look into may write to it"
    return None


def _written_outside(at: Site) -> str | None:
    if (
        # A write to a cast would not reach the tensor outside.
        at.fact.storage in at.under.facts.mutated
        and at.fact.storage in at.under.facts.outside
    ):
        return "writes to, or views, a tensor that exists outside the graph"
    return None


def _statistics(at: Site) -> str | None:
    if at.base not in family("norm_with_statistics"):
        return None
    if all(u.target is operator.getitem and u.args[1] == 0 for u in at.node.users):
        return None  # nothing but the first of its results is read
    return "its statistics are read, and its kernel chooses their dtype"


def _out_of_range(at: Site) -> str | None:
    return literal_reason(at.node, at.under.low, at.under.known, at.verdict.category)


def _sums_rows(at: Site) -> str | None:
    """The reason to pin a look-up in a trained table."""
    if at.base in family("gathers_rows") and at.fact.requires_grad and at.fact.operands:
        table = at.fact.operands[0].value
        if (
            table in at.under.facts.weights
            and at.under.facts.nodes[table].requires_grad
        ):
            return "its backward adds up the gradients of each row"
    return None


def _sums_over_rows(at: Site) -> str | None:
    """The reason to pin a layer norm of many rows on a CPU."""
    fact = at.fact
    sums_low = at.base in family("layer_norm") and fact.device == "cpu"
    if not (sums_low and fact.requires_grad):
        return None
    # Our kernels sum these gradients in fp32 (`passes/functions/norms.py`).
    if at.under.facts.own_kernels and at.node.target in OWN_NORMS:
        return None
    if len(fact.operands) < 2:
        return None
    shape = argument(at.node, "normalized_shape")
    size = math.prod(compat.hint(s) for s in shape)
    made = tensors_of(at.node.meta["val"])[0].shape
    unknown = any(not isinstance(s, int) for s in made)
    # The calls of a norm that is written out sum in fp32, over few rows as well.
    if unknown or fact.chain is not None or fact.numel >= _MANY_ROWS * size:
        return (
            "torch's CPU kernel sums its weight gradient over the rows in the low dtype"
        )
    return None


_MANY_ROWS = 256
"""Rows from which on a sum of ones is no longer exact in bf16 (8 bits).

On torch 2.13's CPU a bf16 layer norm gave 512 as the weight gradient over 16000 rows of
ones, and an fp16 layer norm gave 4096."""


def _keeps_strides(at: Site) -> str | None:
    return at.under.strides.get(at.node.name)


@dataclass(frozen=True)
class Pin:
    """One reason for a call to stay fp32.

    Attributes:
        reason: gives the reason at a call, or None.
        origin: the origin of the verdicts that the pin makes.
        always: whether the pin holds also where TensorFlow's lists decide alone,
            because torch, or an option of the user's, leaves no choice.
        may_round: whether the backward alone needs fp32: the result may be rounded, and
            widens later ops no more than the result of an unpinned call.
    """

    reason: Callable[[Site], str | None]
    origin: str = "autoamp"
    always: bool = True
    may_round: bool = False


PINS: tuple[Pin, ...] = (
    Pin(_kept),  # modules that the user keeps in fp32
    Pin(_in_a_region),  # the model's own autocast regions
    Pin(_mixes),  # the user's mixing of float dtypes
    Pin(_mixes_integers),  # calls that torch may refuse
    Pin(_draws),  # which random numbers are drawn
    Pin(_made_of_no_floats),  # the dtype that torch gives to floats made of none
    Pin(_written_unseen),  # tensors that a function writes to unseen
    Pin(_written_outside),  # tensors of the caller's that are written to
    Pin(_statistics),  # statistics of norms, which kernels give in dtypes of theirs
    Pin(_out_of_range, always=False),  # numbers beyond the compute dtype's range
    Pin(_sums_rows, BACKWARD, may_round=True),  # gradients of a table's rows
    Pin(_sums_over_rows, BACKWARD, may_round=True),  # gradients of a norm's weight
    Pin(_keeps_strides, may_round=True),  # strides of results, which casts change
)
"""The pins, in the order they are asked: the first with a reason decides.

A failed check keeps the nodes it names in fp32 before any pin is asked (`run.py`).  The
ceiling, which looks at the whole graph, comes after the pins (`ceiling.py`)."""


def first_pin(at: Site) -> tuple[Pin, str] | None:
    """The first pin that holds at a call, and its reason; None where none does."""
    for pin in PINS:
        if at.under.to_the_letter and not pin.always:
            continue
        if pin.may_round and at.verdict.pinned:  # the rule's pin widens more
            continue
        reason = pin.reason(at)
        if reason is not None:
            return pin, reason
    return None
