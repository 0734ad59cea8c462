"""An op: its names, as rules and users write them, and what its schema tells."""

from __future__ import annotations

import difflib
import functools
from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import fx
from torch._ops import OpOverload

from autoamp import compat

_PREFIX = "torch.ops."

_OPS = 4096
"""The ops whose names are kept at most: torch makes them anew each time."""


@functools.lru_cache(maxsize=_OPS)
def op_name(target: OpOverload) -> str:
    """The full name of `target`: `aten::sum.dim_IntList`, `aten::linear.default`."""
    schema = compat.schema(target)
    return f"{schema.name}.{schema.overload_name or 'default'}"


@functools.lru_cache(maxsize=_OPS)
def base_name(target: OpOverload) -> str:
    """The name of `target` without its overload: `aten::sum`."""
    name: str = compat.schema(target).name
    return name


def split_key(key: str) -> tuple[str, str, str]:
    """The namespace, name and overload (empty: all of them) of a canonical key."""
    namespace, _, rest = key.partition("::")
    name, _, overload = rest.partition(".")
    return namespace, name, overload


def parse_op_name(text: str) -> str:
    """The canonical key of an op as a user may spell it; the op need not exist.

    `linear`, `aten.linear`, `aten::linear` and `torch.ops.aten.linear` give
    `aten::linear`, which means every overload; `sum.dim_IntList`,
    `aten.sum.dim_IntList` and `aten::sum.dim_IntList` give the one overload.
    Two names joined by a dot are read as an overload of an ATen op if such an
    overload exists, or else as namespace and op if such an op exists.
    """
    text = text.strip().removeprefix(_PREFIX)
    if "::" in text:
        return text
    parts = text.split(".")
    if len(parts) == 1:
        return f"aten::{text}"
    if len(parts) > 2:
        return f"{parts[0]}::{parts[1]}.{'.'.join(parts[2:])}"
    overload, other = f"aten::{text}", f"{parts[0]}::{parts[1]}"
    if not exists(overload) and (exists(other) or parts[0] == "aten"):
        return other
    return overload


def overloads(key: str) -> list[OpOverload]:
    """Every overload the canonical `key` names in this torch; empty if none."""
    namespace, name, overload = split_key(key)
    # `torch.ops` makes and keeps an empty namespace for whatever name it is asked for.
    if not (namespace.isidentifier() and name.isidentifier()):
        return []
    try:
        packet = getattr(getattr(torch.ops, namespace), name)
        names = [overload] if overload else packet.overloads()
        return [getattr(packet, each) for each in names]
    except (AttributeError, RuntimeError):
        return []


def exists(key: str) -> bool:
    """Whether this torch has the op, or the overload, that the key names."""
    return bool(overloads(key))


def close_names(key: str) -> list[str]:
    """Up to three ops with names like `key`, the most similar first, for a message."""
    namespace, name, overload = split_key(key)
    if overload and (siblings := overloads(f"{namespace}::{name}")):
        names = [op_name(sibling) for sibling in siblings]
        return difflib.get_close_matches(key, names, 3, 0.0)
    wanted = [(namespace, name)]
    if overload:  # `sofmtax.int`, or an unknown namespace
        wanted.append(("aten", overload))
    for space, word in [*wanted, ("aten", name)]:
        close = difflib.get_close_matches(word, _alike(space, word), 12)
        found = [f"{space}::{each}" for each in close if exists(f"{space}::{each}")]
        if found:
            return found[:3]
    return []


_COMPARED = 40
"""The names compared letter by letter with an unknown one, which takes long."""


def _alike(namespace: str, word: str) -> list[str]:
    """The names of a namespace that share the most of their pairs with `word`."""
    if namespace == "aten":
        index = _aten_by_pairs()
    else:
        index = _by_pairs(dir(getattr(torch.ops, namespace, None)))
    shared = Counter(name for pair in _pairs(word) for name in index.get(pair, ()))
    # Among both words' pairs: else a long name, which has many, comes before `linear`.
    size = len(word)
    share = {name: count / (size + len(name)) for name, count in shared.items()}
    return sorted(share, key=lambda name: -share[name])[:_COMPARED]


@functools.cache
def _aten_by_pairs() -> Mapping[str, list[str]]:
    """Names that ops of ATen may have; torch has no public list of them."""
    places = (torch.ops.aten, torch, torch.nn.functional, torch.Tensor)
    return _by_pairs(sorted({name for place in places for name in dir(place)}))


def _by_pairs(names: Iterable[str]) -> Mapping[str, list[str]]:
    """The names that have a pair of letters, by the pair; none of ops in place."""
    found: dict[str, list[str]] = {}
    for name in names:
        for pair in () if name.endswith("_") else _pairs(name):
            found.setdefault(pair, []).append(name)
    return found


def _pairs(word: str) -> list[str]:
    """The pairs of neighbours in a word, its two ends included."""
    word = f" {word} "
    return sorted({word[at : at + 2] for at in range(len(word) - 1)})


# -- properties that an op's name, schema and tags alone decide ----------------------

STATISTICS = ("running_mean", "running_var")

HIDDEN_WRITES: dict[str, tuple[str, ...]] = {
    "aten::_batch_norm_impl_index": STATISTICS,
    "aten::batch_norm": STATISTICS,
    "aten::batch_norm_gather_stats": STATISTICS,
    "aten::batch_norm_gather_stats_with_counts": STATISTICS,
    "aten::batch_norm_update_stats": STATISTICS,
    "aten::cudnn_batch_norm": STATISTICS,
    "aten::instance_norm": STATISTICS,
    "aten::miopen_batch_norm": STATISTICS,
    "aten::native_batch_norm": STATISTICS,
}
"""Arguments that an op writes although its schema does not say so.

The arguments are running statistics, which the op writes in training mode.
"""

MAYBE_ALIAS: dict[str, tuple[str, ...]] = {
    "aten::_unsafe_view": ("self",),
    "aten::alpha_dropout": ("input",),
    "aten::atleast_1d": ("self", "tensors"),
    "aten::atleast_2d": ("self", "tensors"),
    "aten::atleast_3d": ("self", "tensors"),
    "aten::broadcast_tensors": ("tensors",),
    "aten::cartesian_prod": ("tensors",),
    "aten::conj_physical": ("self",),
    "aten::dequantize": ("self",),
    "aten::dropout": ("input",),
    "aten::einsum": ("tensors",),
    "aten::feature_alpha_dropout": ("input",),
    "aten::feature_dropout": ("input",),
    "aten::histogramdd": ("bins",),
    "aten::meshgrid": ("tensors",),
    "aten::sum_to_size": ("self",),
    "aten::to_dense": ("self",),
    "aten::type_as": ("self",),
    "aten::unsafe_chunk": ("self",),
    "aten::unsafe_split": ("self",),
    "aten::unsafe_split_with_sizes": ("self",),
}
"""Arguments that an op's output may share storage with, undeclared by its schema.

`dropout` returns its input outside training; `einsum` of one operand is a permutation;
`type_as` returns its input when the dtype fits already.
"""


@functools.lru_cache(maxsize=4096)
def mutated_arguments(target: OpOverload) -> tuple[str, ...]:
    """The names of the arguments that `target` writes, declared or hidden."""
    hidden = HIDDEN_WRITES.get(base_name(target), ())
    return compat.written_arguments(target) + hidden


_OVERWRITES = frozenset({"aten::copy_", "aten::fill_", "aten::zero_"})


@functools.lru_cache(maxsize=4096)
def overwritten_arguments(target: OpOverload) -> tuple[str, ...]:
    """The names of the arguments whose numbers `target` never reads.

    `target` overwrites them, or takes a shape and a dtype from them.
    """
    arguments, name = compat.schema(target).arguments, base_name(target)
    makes = name.endswith("_like") or name.startswith("aten::new_")
    first = arguments[:1] if makes or name in _OVERWRITES else []
    return tuple(a.name for a in (*first, *(a for a in arguments if a.is_out)))


_OF_TORCH = frozenset({"aten", "prims", "prim", "autoamp"})


def is_custom(target: object) -> bool:
    """Whether `target` is an op that neither torch nor this package defines."""
    return isinstance(target, OpOverload) and target.namespace not in _OF_TORCH


def mutates(target: OpOverload) -> bool:
    """Whether `target` may write one of its arguments, hidden writes included."""
    return bool(mutated_arguments(target))


@functools.lru_cache(maxsize=4096)
def is_out_variant(target: OpOverload) -> bool:
    """Whether `target` writes its result to the tensor given as `out=`."""
    return any(argument.is_out for argument in compat.schema(target).arguments)


@functools.lru_cache(maxsize=4096)
def is_inplace(target: OpOverload) -> bool:
    """Whether `target` writes and returns its first argument, as `add_` does."""
    arguments, returns = compat.schema(target).arguments, compat.schema(target).returns
    if not arguments or len(returns) != 1:
        return False
    first, result = arguments[0].alias_info, returns[0].alias_info
    # `out=` is keyword-only.
    if first is None or result is None or arguments[0].kwarg_only:
        return False
    return first.is_write and bool(first.before_set & result.before_set)


@functools.lru_cache(maxsize=4096)
def aliasing_arguments(target: OpOverload) -> tuple[str, ...]:
    """The names of the arguments whose storage an output of `target` may share."""
    shared: set[str] = set()
    for result in compat.schema(target).returns:
        if result.alias_info is not None:
            shared |= result.alias_info.before_set | result.alias_info.after_set
    # `Tensor(a -> *)` says that an element of a list of results may be the operand.
    shared.add("*")
    undeclared = MAYBE_ALIAS.get(base_name(target), ())
    return tuple(
        a.name
        for a in compat.schema(target).arguments
        if a.name in undeclared
        or (
            a.alias_info is not None
            and not shared.isdisjoint(a.alias_info.before_set | a.alias_info.after_set)
        )
    )


@functools.lru_cache(maxsize=4096)
def takes_tensors(target: OpOverload) -> bool:
    """Whether some argument of `target` is a tensor or a list of tensors."""
    return any("Tensor" in str(a.type) for a in compat.schema(target).arguments)


@functools.lru_cache(maxsize=4096)
def is_view(target: OpOverload) -> bool:
    """Whether an output may share storage with an argument that is not written."""
    return bool(aliasing_arguments(target)) and not mutates(target)


@functools.cache
def lays_out_anew(name: str) -> bool:
    """Whether ATen op `name` changes its operand's shape or memory, as `t_` does."""
    return any(torch.Tag.inplace_view in op.tags for op in overloads(f"aten::{name}"))


def is_random(target: OpOverload) -> bool:
    """Whether `target` may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in target.tags


def is_pointwise(target: OpOverload) -> bool:
    """Whether torch tags `target` as computing each output element by itself."""
    return torch.Tag.pointwise in target.tags


_WRITING_OPERATORS = frozenset(
    {"setitem", *(f"i{name}" for name in ("add", "sub", "mul", "truediv", "pow"))}
)


def bodies_of(node: fx.Node) -> list[fx.GraphModule]:
    """The sub-graphs that a call takes as operands."""
    root = node.graph.owning_module
    operands = [n for n in node.all_input_nodes if n.op == "get_attr"]
    found = [getattr(root, str(n.target), None) for n in operands]
    return [body for body in found if isinstance(body, fx.GraphModule)]


def has_effect(node: fx.Node) -> bool:
    """Whether a call writes in place or draws random numbers, used or not.

    An ATen op is judged by its schema; a method, function or operator, in a graph as
    Dynamo wrote it, by its name; a higher-order op by its bodies.
    """
    if isinstance(node.target, OpOverload):
        return mutates(node.target) or is_random(node.target)
    if not node.op.startswith("call"):
        return False
    if any(has_effect(n) for b in bodies_of(node) for n in b.graph.nodes):
        return True
    name = getattr(node.target, "__name__", str(node.target))
    # Names such as `__and__` end with an underscore too.
    in_place = name.endswith("_") and not name.startswith("_")
    return in_place or name in _WRITING_OPERATORS or "dropout" in name


def drop_dead(graph: fx.Graph) -> None:
    """Erases nodes that nothing reads and that have no effect.

    FX's own elimination is not used, because in sub-graphs it erases method calls such
    as `x.mul_(2)`.
    """
    # Backwards, as the operands of a dead node may be dead without it.
    for node in reversed(graph.nodes):
        if is_dead(node):
            graph.erase_node(node)


def is_dead(node: fx.Node) -> bool:
    """Whether nothing reads a node and it has no effect."""
    if node.op in ("placeholder", "output") or node.users:
        return False
    # Nothing reads the entry of a `no_grad` block, and the calls behind it depend on
    # it.
    lasts = node.target in compat.MODE_CHANGES or node.target is compat.REGISTER_HOOK
    return not (lasts or node.is_impure() or has_effect(node))
