"""What autograd keeps of each call for the backward, as autograd itself says.

Each kind of call is made once, on tensors without data, and a hook sees what is saved.
No tensor is one of a GPU, whatever the graph is for: where there is none, autograd
aborts the process.  Without data no random number is drawn either.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE
from autoamp.passes.ops import base_name, is_view
from autoamp.passes.rules import family
from autoamp.passes.see.facts import Facts, Kept
from autoamp.passes.see.nodes import tensors_of


def kept_by_calls(gm: fx.GraphModule, facts: Facts) -> Mapping[str, Kept]:
    """What is kept of each call of ATen graph `gm`; calls without are left out.

    Of a call that is no op of torch's, or does not run without data, all operands
    count.
    """
    found: dict[str, Kept] = {}
    known: dict[Hashable, _Saved | None] = {}
    with ExitStack() as on:
        for node in _calls_with_gradients(gm, facts):
            fact, saved = facts.nodes[node.name], None
            if _can_be_asked(node):
                if not known:
                    on.enter_context(compat.autocast_off())
                    on.enter_context(torch.enable_grad())
                key = _key(node, facts)
                if key not in known:
                    known[key] = _saved(node, facts)
                saved = known[key]
                # Only numbers inside depend on sizes.
                if saved is not None and saved.inside:
                    key = key, _sizes(node)
                    if key not in known:
                        known[key] = _saved(node, facts)
                    saved = known[key]
            if saved is None:
                kept = Kept(frozenset(o.value for o in fact.operands))
            else:
                read = _read(node)
                operands = frozenset(read[at].name for at in saved.operands)
                kept = Kept(operands, saved.result and fact.is_value, saved.inside)
            if kept != Kept():
                found[node.name] = kept
    return found


def _calls_with_gradients(gm: fx.GraphModule, facts: Facts) -> Iterator[fx.Node]:
    """The calls that a gradient flows through, beside views, which keep nothing."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and facts.nodes[node.name].requires_grad:
            fact = facts.nodes[node.name]
            read = {facts.nodes[o.value].storage for o in fact.operands}
            is_op = isinstance(node.target, compat.OpOverload)
            shows = is_op and is_view(node.target) and fact.storage in read
            if fact.involves_floats and not shows:
                yield node


def _can_be_asked(node: fx.Node) -> bool:
    target = node.target
    # Without data, recurrent nets run as one op that keeps nothing.
    return isinstance(target, compat.OpOverload) and (
        base_name(target) not in family("recurrent")
    )


def _read(node: fx.Node) -> list[fx.Node]:
    """The nodes whose tensors a call reads, in order, each as often as it is read."""
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    nodes = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
    return [n for n in nodes if isinstance(n.meta.get("val"), torch.Tensor)]


def _key(node: fx.Node, facts: Facts) -> Hashable:
    """Equal for calls of which autograd keeps the same operands, and the result or not.

    Of sizes only the order of strides tells: an operand that lies otherwise than a
    kernel wants is copied, and the copy is kept.
    """
    described: list[Hashable] = []
    for leaf in pytree.tree_leaves((node.args, node.kwargs)):
        value = leaf.meta.get("val") if isinstance(leaf, fx.Node) else leaf
        if isinstance(value, torch.Tensor):
            trains = facts.nodes[leaf.name].passes_gradient
            described.append((_lies(value), value.dtype, trains))
        else:
            described.append((type(leaf).__name__, str(value)))
    return node.target, tuple(node.kwargs), tuple(described)


def _lies(value: torch.Tensor) -> Hashable:
    """The order of a tensor's dimensions in memory, and whether there are gaps."""
    if value.layout != torch.strided:
        return value.layout
    sizes = [compat.hint(size) for size in value.shape]
    steps = [compat.hint(step) for step in value.stride()]
    order = sorted(range(len(steps)), key=steps.__getitem__)
    is_dense = all(
        sizes[at] == 1 or steps[at] == math.prod(sizes[inner] for inner in order[:i])
        for i, at in enumerate(order)
    )
    return tuple(order), is_dense, 0 in steps


def _sizes(node: fx.Node) -> Hashable:
    shapes = (n.meta["val"].shape for n in _read(node))
    return tuple(tuple(map(compat.hint, shape)) for shape in shapes)


@dataclass(frozen=True)
class _Saved:
    """As `Kept`, with the operands by their places in `_read`."""

    operands: frozenset[int]
    result: bool
    inside: int


def _saved(node: fx.Node, facts: Facts) -> _Saved | None:
    """What autograd saves of a call; None if the call cannot be made without data."""
    given: list[torch.Tensor] = []
    saved: dict[int, torch.Tensor] = {}
    # Without fake tensors a norm of a batch is asked in a sixth of the time; but on the
    # meta device attention keeps its scores, which no other kernel does.
    is_attention = base_name(node.target) in family("attention")
    device = "cpu" if is_attention else "meta"

    def argument(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device(device)
        value = leaf.meta.get("val") if isinstance(leaf, fx.Node) else leaf
        made = compat.like(value, device=device)
        if isinstance(value, torch.Tensor):
            if facts.nodes[leaf.name].passes_gradient:
                made.requires_grad_()
            # A copy, since no op may write into a leaf.
            given.append(made.clone())
            return given[-1]
        return made

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.setdefault(compat.storage_id(tensor), tensor)
        return tensor

    target: Any = node.target
    try:
        with compat.new_fake_mode(symbolic=False) if is_attention else nullcontext():
            args, kwargs = pytree.tree_map(argument, (node.args, node.kwargs))
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
                result = target(*args, **kwargs)
    except Exception:  # noqa: BLE001 - an op may have no rule for tensors without data
        return None
    operands = [compat.storage_id(tensor) for tensor in given]
    single = isinstance(result, torch.Tensor)
    ends = {compat.storage_id(t) for t in tensors_of(result) if single}
    inside = [tensor for at, tensor in saved.items() if at not in {*operands, *ends}]
    return _Saved(
        # An op that writes in place keeps what it has made of its operand.
        frozenset(
            place
            for place, at in enumerate(operands)
            if at in saved and at not in ends and given[place].dtype == HIGH_DTYPE
        ),
        bool(ends & saved.keys()),
        sum(t.untyped_storage().nbytes() for t in inside if t.dtype == HIGH_DTYPE)
        // HIGH_DTYPE.itemsize,
    )
