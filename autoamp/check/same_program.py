"""Checks that a rewritten graph is the same program: interface, calls and wiring.

Both graphs and their stand-in runs go in; a difference raises `VerificationError`.
Every node that the rewrite added (a cast, a use of a cast, a view repeated for a use)
stands for a node of the original.  With each added node replaced by the node it stands
for, every call must read the operands that it read in the original.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.check.call_facts import has_effect, is_view, literals, operands
from autoamp.check.standin import StandIns, dtypes_of, named, where
from autoamp.errors import VerificationError
from autoamp.graph_functions import (
    low_uses,
    low_weight,
    op_with_its_state,
    saturating_cast,
)


def check_same_program(
    original: fx.GraphModule,
    rewritten: fx.GraphModule,
    before: StandIns,
    after: StandIns,
) -> None:
    """Raises where `rewritten` has another interface or other calls than `original`.

    Raises:
        VerificationError: inputs, outputs or calls differ.
    """
    _same_interface(original, rewritten, before, after)
    _same_calls(original, rewritten)


def _same_interface(
    original: fx.GraphModule,
    rewritten: fx.GraphModule,
    before: StandIns,
    after: StandIns,
) -> None:
    def inputs(gm: fx.GraphModule) -> list[str]:
        return [n.name for n in gm.graph.nodes if n.op == "placeholder"]

    if inputs(original) != inputs(rewritten):
        raise VerificationError(
            f"the inputs changed from {inputs(original)} to {inputs(rewritten)}"
        )
    old, new = before.values["output"], after.values["output"]
    old_spec = torch.utils._pytree.tree_structure(old)
    if old_spec != torch.utils._pytree.tree_structure(new):
        raise VerificationError("the structure of the outputs changed")
    if dtypes_of(old) != dtypes_of(new):
        raise VerificationError(
            f"the output dtypes changed from {dtypes_of(old)} to {dtypes_of(new)}",
            nodes=[
                n.name
                for n in rewritten.graph.output_node().all_input_nodes
                if dtypes_of(before.values.get(n.name))
                != dtypes_of(after.values[n.name])
            ],
        )


def check_same_strides(
    rewritten: fx.GraphModule, before: StandIns, after: StandIns
) -> None:
    """Raises where a result, or what `as_strided` reads, lies otherwise than before.

    Raises:
        VerificationError: the strides differ, or the place in memory that is read.
    """
    old, new = (_leaves(run.values["output"]) for run in (before, after))
    made_by = _leaves(rewritten.graph.output_node().args[0])
    for node, one, other in zip(made_by, old, new, strict=True):
        if _strides(one) != _strides(other):
            raise VerificationError(
                f"{where(node)} is returned with strides {_strides(other)}, "
                f"where the model's has {_strides(one)}",
                nodes=named(node),
            )
    for node in rewritten.graph.nodes:
        if not _is_strided_read(node.target) or node.name not in before.nodes:
            continue
        read, twin = node.args[0], before.nodes[node.name].args[0]
        assert isinstance(read, fx.Node)
        assert isinstance(twin, fx.Node)
        one, other = before.values[twin.name], after.values[read.name]
        if _place(one) != _place(other):
            raise VerificationError(
                f"{where(node)} reads {read.name} with offset and strides "
                f"{_place(other)}, where it read {_place(one)}",
                nodes=[*named(node), *(n.name for n in read.all_input_nodes)],
            )


def _leaves(value: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(value)


def _strides(value: Any) -> tuple[int, ...] | None:
    """The strides that tell elements apart: none where there is one, or no element."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    if not value.numel():
        return None
    pairs = zip(value.shape, value.stride(), strict=True)
    return tuple(stride for size, stride in pairs if size != 1)


def _place(value: Any) -> tuple[Any, ...]:
    return (value.storage_offset(), _strides(value))


def _is_strided_read(target: Any) -> bool:
    """Whether a call takes elements of its operand by their places in memory."""
    is_op = isinstance(target, compat.OpOverload)
    return is_op and compat.schema(target).name.startswith("aten::as_strided")


def _same_calls(original: fx.GraphModule, rewritten: fx.GraphModule) -> None:
    """Raises unless every call of the original is there once, in order, unchanged.

    A call that nothing reads and that has no effect may be gone.  A view may instead be
    repeated under other names, one for each of its uses.
    """
    original_nodes = {n.name: n for n in original.graph.nodes}

    def calls(gm: fx.GraphModule) -> list[tuple[str, Any]]:
        return [
            (n.name, op_with_its_state(n.target))
            for n in gm.graph.nodes
            if n.op not in ("placeholder", "get_attr", "output")
        ]

    before, after = calls(original), calls(rewritten)
    names = {name for name, _ in before}
    kept = [call for call in after if call[0] in names]
    present = set(kept)
    for name, target in before:
        idle = not original_nodes[name].users and not has_effect(target)
        if (name, target) in present or idle:
            continue
        repeated = any(t is target for n, t in after if n not in names)
        if not (repeated and (is_view(target) or target is operator.getitem)):
            raise VerificationError(
                f"{name} ({target}) got lost in the rewrite", nodes=[name]
            )
    wanted = [call for call in before if call in present]
    if wanted != kept:
        moved = [a for (a, _), (b, _) in zip(wanted, kept, strict=False) if a != b]
        raise VerificationError(
            "the rewrite changed the order of the program", nodes=moved[:1]
        )


def check_same_wiring(original: fx.GraphModule, rewritten: fx.GraphModule) -> None:
    """Raises where a call, or the output, reads another value than in `original`.

    Equal views of one tensor count as one value, whatever their names.

    Raises:
        VerificationError: an operand differs, or an added node is neither a cast nor
            a use of one.
    """
    before = {n.name: n for n in original.graph.nodes}
    views: dict[Any, str] = {}
    known: dict[str, str] = {}
    for node in original.graph.nodes:
        if is_view(node.target) or node.target is operator.getitem:
            key = _key(node, [known.get(n.name, n.name) for n in operands(node)])
            known[node.name] = views.setdefault(key, node.name)
    stands_for = dict(known)
    for node in rewritten.graph.nodes:
        read = [stands_for.get(n.name, n.name) for n in operands(node)]
        twin = before.get(node.name)
        if twin is not None:
            wanted = [known.get(n.name, n.name) for n in operands(twin)]
            if wanted != read:
                raise VerificationError(
                    f"{where(node)} reads {', '.join(read)}, where it read "
                    f"{', '.join(wanted)}",
                    nodes=[node.name],
                )
        elif _passes_on(node) and len(set(read)) == 1:
            stands_for[node.name] = read[0]
        elif (again := views.get(_key(node, read))) is not None:
            stands_for[node.name] = again
        else:
            raise VerificationError(
                f"{where(node)} was added, and is neither a cast nor a use of one",
                nodes=named(node),
            )


def _key(node: fx.Node, read: list[str]) -> Any:
    """The op, operands and literals that decide which elements a view shows."""
    return (node.target, *read, *literals(node))


def _passes_on(node: fx.Node) -> bool:
    """Whether an added node stands for its operand, in the same or another dtype.

    A use has two operands, a value and its low copy; both must stand for one node.
    """
    if node.target in (low_uses, low_weight, saturating_cast):
        return True
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and source.target is low_uses
    if not isinstance(node.target, compat.OpOverload):
        return False
    return compat.schema(node.target).name in ("aten::_to_copy", "aten::clone")
