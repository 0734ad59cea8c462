"""Proves a rewritten graph legal, from the graph alone.

Shares no code with what it checks: dtypes are not read from the metadata the rewrite
wrote but found by running the graph on stand-in tensors, and what an op accepts is
stated here again.  FX's own lint has no dtype check, and fake tensors let a bf16
`linear` with an fp32 weight pass, so neither would notice.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.errors import VerificationError
from autoamp.graph_functions import low_weight, saturating_cast
from autoamp.rewrite.standin import Memo, StandIns, dtypes_of, where

_CONVERTS = frozenset({"aten::to", "aten::_to_copy", "aten::copy_", "aten::type_as"})
"""Ops whose job is to take one dtype and give another."""

_CPU_FP32_PARAMETERS = {
    name: frozenset({"weight", "bias"})
    for name in (
        "aten::layer_norm",
        "aten::native_layer_norm",
        "aten::group_norm",
        "aten::native_group_norm",
    )
}
"""The same for kernels of the CPU alone: CUDA's want parameters of the data's dtype."""

_FP32_PARAMETERS = {
    name: frozenset({"weight", "bias", "running_mean", "running_var"})
    for name in (
        "aten::batch_norm",
        "aten::native_batch_norm",
        "aten::cudnn_batch_norm",
        "aten::instance_norm",
        "aten::miopen_batch_norm",
        "aten::_native_batch_norm_legit",
        "aten::_native_batch_norm_legit_functional",
        "aten::_native_batch_norm_legit_no_training",
        "aten::_batch_norm_impl_index",
        "aten::_batch_norm_no_update",
        "aten::_batch_norm_with_update",
        "aten::_batch_norm_with_update_functional",
    )
}
"""Operands whose kernels take fp32 beside low data."""


_WIDEN = frozenset(
    f"aten::{name}"
    for name in (
        "add",
        "addcmul",
        "div",
        "maximum",
        "minimum",
        "mul",
        "sub",
        "true_divide",
        "where",
    )
)
"""Ops whose kernels widen a low operand as they read it, which is exact."""

_NARROWER = frozenset({torch.float16, torch.bfloat16, torch.float32})


class Verifier:
    """Checks rewritten graphs against the ATen graph `original` they were made from."""

    def __init__(self, original: fx.GraphModule) -> None:
        self.original = original
        self._memo: Memo = {}
        self._before = StandIns(original, self._memo)

    def verify(
        self, rewritten: fx.GraphModule, must_stay_high: Collection[str] = ()
    ) -> None:
        """Raises at the first thing wrong in `rewritten`.

        Args:
            must_stay_high: nodes of the original that may neither read nor make low
                tensors where they read and made fp32.

        Raises:
            VerificationError: what is wrong: node, op, dtypes, source line.
        """
        before, after = self._before, StandIns(rewritten, self._memo)
        _same_interface(self.original, rewritten, before, after)
        _same_program(self.original, rewritten)
        for node in rewritten.graph.nodes:
            _metadata_is_true(node, after)
            _operands_agree(node, after, before)
        _denied_nodes_are_fp32(rewritten, set(must_stay_high), before, after)
        _no_stale_casts(self.original, rewritten, after)

    def recount(
        self,
        rewritten: fx.GraphModule,
        op_prices: Mapping[str, tuple[int, int]],
        down_prices: Mapping[str, int],
        up_prices: Mapping[str, int],
    ) -> int:
        """The cost of `rewritten` by looking at it: each op as it runs, each cast.

        Called before clean-up, it must equal what the placement promised.
        """
        before, after = self._before, StandIns(rewritten, self._memo)
        total = 0
        for node in rewritten.graph.nodes:
            if node.name in op_prices:
                total += op_prices[node.name][_runs_low(node, before, after)]
            elif _is_inserted_cast(node, before):
                source = _cast_source(node)
                up = dtypes_of(after.values[node.name])[0] == torch.float32
                total += (up_prices if up else down_prices)[source]
        return total


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
            f"the output dtypes changed from {dtypes_of(old)} to {dtypes_of(new)}"
        )


def _same_program(original: fx.GraphModule, rewritten: fx.GraphModule) -> None:
    """Every call of the original is there once, in order, and calls the same op.

    A view may instead be repeated under other names, one for each of its uses.
    """
    original_nodes = {n.name: n for n in original.graph.nodes}

    def calls(gm: fx.GraphModule) -> list[tuple[str, Any]]:
        return [
            (n.name, n.target)
            for n in gm.graph.nodes
            if n.op not in ("placeholder", "get_attr", "output")
        ]

    before, after = calls(original), calls(rewritten)
    names = {name for name, _ in before}
    kept = [call for call in after if call[0] in names]
    present = set(kept)
    for name, target in before:
        idle = not original_nodes[name].users and not _has_effect(target)
        if (name, target) in present or idle:
            continue
        repeated = any(t is target for n, t in after if n not in names)
        if not (repeated and (_is_view(target) or target is operator.getitem)):
            raise VerificationError(f"{name} ({target}) got lost in the rewrite")
    if [call for call in before if call in present] != kept:
        raise VerificationError("the rewrite changed the order of the program")


def _has_effect(target: Any) -> bool:
    """Whether a call matters that nobody reads: it writes, or draws random numbers."""
    return isinstance(target, compat.OpOverload) and (
        target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags
    )


def _is_view(target: Any) -> bool:
    """Whether the result of `target` is its operand under other sizes."""
    return isinstance(target, compat.OpOverload) and any(
        r.alias_info is not None and not r.alias_info.is_write
        for r in target._schema.returns
    )


def _metadata_is_true(node: fx.Node, after: StandIns) -> None:
    if node.users and all(user.target is operator.getitem for user in node.users):
        return  # what is read of it is checked there
    said = dtypes_of(node.meta.get("val"))
    true = dtypes_of(after.values[node.name])
    if node.op != "output" and said != true:
        raise VerificationError(
            f"{where(node)} is recorded as {said} but computes {true}"
        )


def _operands_agree(node: fx.Node, after: StandIns, before: StandIns) -> None:
    """No op meets float dtypes that eager would reject or silently promote."""
    if not isinstance(node.target, compat.OpOverload):
        return
    name = node.target._schema.name
    if name in _CONVERTS:
        return
    exempt = _FP32_PARAMETERS.get(name, frozenset())
    if _on_cpu(node):
        exempt |= _CPU_FP32_PARAMETERS.get(name, frozenset())
    found = _operand_dtypes(node, after, exempt)
    if len(set(found.values())) <= 1:
        return
    widened = dtypes_of(after.values[node.name]) == [torch.float32]
    if name in _WIDEN and widened and set(found.values()) <= _NARROWER:
        return
    twin = before.nodes.get(node.name)
    if twin is not None and _operand_dtypes(twin, before, exempt) == found:
        return  # the user mixed them, and they are as the user left them
    raise VerificationError(
        f"{where(node)} has operands of different dtypes: "
        + ", ".join(f"{k}: {v}" for k, v in found.items())
    )


def _on_cpu(node: fx.Node) -> bool:
    values = [n.meta.get("val") for n in node.all_input_nodes]
    return all(v.device.type == "cpu" for v in values if isinstance(v, torch.Tensor))


def _operand_dtypes(
    node: fx.Node, run: StandIns, exempt: Collection[str]
) -> dict[str, torch.dtype]:
    """Float operands that take part in type promotion, by argument name."""
    assert isinstance(node.target, compat.OpOverload)
    names = [a.name for a in node.target._schema.arguments]
    arguments = [*zip(names, node.args, strict=False), *node.kwargs.items()]
    pointwise = torch.Tag.pointwise in node.target.tags
    found: dict[str, torch.dtype] = {}
    dims: dict[str, int] = {}
    for name, value in arguments:
        leaves: list[fx.Node] = []
        fx.map_arg(value, leaves.append)
        for i, leaf in enumerate(leaves):
            tensor = run.values[leaf.name]
            floats = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
            if floats and name not in exempt:
                found[f"{name}[{i}]" if i else name] = tensor.dtype
                dims[f"{name}[{i}]" if i else name] = tensor.dim()
    if pointwise and any(dims.values()):
        # 0-dim tensors are not promoted to, and promote nothing of their own kind.
        found = {k: v for k, v in found.items() if dims[k]}
    if pointwise and _writes_its_first_operand(node.target):
        # What is written to keeps its dtype; the kernel takes the others as they are.
        found = {k: v for k, v in found.items() if k == names[0]}
    return found


def _writes_its_first_operand(target: compat.OpOverload) -> bool:
    if target._schema.name == "aten::lerp_":  # which insists on one dtype
        return False
    first = target._schema.arguments[0].alias_info
    return first is not None and first.is_write


def _denied_nodes_are_fp32(
    rewritten: fx.GraphModule, names: set[str], before: StandIns, after: StandIns
) -> None:
    for node in rewritten.graph.nodes:
        if node.name not in names:
            continue
        old = dtypes_of(before.values[node.name])
        new = dtypes_of(after.values[node.name])
        if old != new:
            raise VerificationError(
                f"{where(node)} must stay fp32 but its result became {new}"
            )


def _no_stale_casts(
    original: fx.GraphModule, rewritten: fx.GraphModule, after: StandIns
) -> None:
    """No cast is written to, or read in another region or after a write below it."""
    known = {n.name for n in original.graph.nodes}
    returned = {n.name for n in rewritten.graph.output_node().all_input_nodes}
    version: dict[int, int] = defaultdict(int)
    region = 0
    regions: dict[str, int] = {}
    copies: dict[int, tuple[str, int, int]] = {}
    for node in rewritten.graph.nodes:
        if node.target in compat.MODE_CHANGES:
            region += 1
        for source in node.all_input_nodes:
            if node.op == "output":
                continue
            cast, storage, at = copies.get(_storage(after, source), ("", -1, 0))
            if cast and version[storage] != at:
                raise VerificationError(
                    f"{where(node)} reads {source.name}, which is or views {cast}, a "
                    "cast of a tensor that was written to since"
                )
            crosses = regions.get(source.name, region) != region
            # A use of a weight has its gradient from the weight, not through the cast.
            if crosses and source.name not in returned and node.target != low_weight:
                raise VerificationError(
                    f"{where(node)} reads {source.name}, a cast made in another "
                    "grad-mode or autocast region"
                )
        for written in _written(node, rewritten):
            storage = _storage(after, written)
            if storage in copies:
                raise VerificationError(
                    f"{where(node)} writes to {written.name}, which is or views "
                    f"{copies[storage][0]}, a cast: the write is lost"
                )
            version[storage] += 1
        if node.name not in known and _is_cast(node):
            storage = _storage(after, node.all_input_nodes[0])
            regions[node.name] = region
            copies[_storage(after, node)] = (node.name, storage, version[storage])


def _storage(run: StandIns, node: fx.Node) -> int:
    """The storage of a tensor's stand-in; -1 for what is not a tensor."""
    value = run.values[node.name]
    return compat.storage_id(value) if isinstance(value, torch.Tensor) else -1


def _written(node: fx.Node, gm: fx.GraphModule) -> list[fx.Node]:
    if isinstance(node.target, compat.HigherOrderOperator):
        taken = [n for n in node.all_input_nodes if n.op == "get_attr"]
        bodies = [operator.attrgetter(str(n.target))(gm) for n in taken]
        if any(_may_write(b) for b in bodies if isinstance(b, fx.GraphModule)):
            # It may write: hand it no copy.
            return [n for n in node.all_input_nodes if n.op != "get_attr"]
    if not isinstance(node.target, compat.OpOverload):
        return []
    names = {
        a.name
        for a in node.target._schema.arguments
        if a.alias_info is not None and a.alias_info.is_write
    }
    order = [a.name for a in node.target._schema.arguments]
    found: list[fx.Node] = []
    for name, value in [*zip(order, node.args, strict=False), *node.kwargs.items()]:
        if name in names:
            fx.map_arg(value, found.append)
    return found


def _may_write(body: fx.GraphModule) -> bool:
    """Whether a sub-graph may write to what it is handed."""
    nodes = list(body.graph.nodes)
    if any(n.op == "call_method" or "val" not in n.meta for n in nodes[:-1]):
        return "_(" in body.code  # not ATen's spelling: does it call anything in place?
    run = StandIns(body, {})
    given = {_storage(run, n) for n in nodes if n.op in ("placeholder", "get_attr")}
    return any(
        _storage(run, w) in given - {-1} for n in nodes for w in _written(n, body)
    )


def _is_cast(node: fx.Node) -> bool:
    if node.target is saturating_cast:
        return True
    return (
        isinstance(node.target, compat.OpOverload)
        and node.target._schema.name == "aten::_to_copy"
    )


def _is_inserted_cast(node: fx.Node, before: StandIns) -> bool:
    return node.name not in before.nodes and _is_cast(node)


def _cast_source(node: fx.Node) -> str:
    """The original value a cast copies, through a cast of a returned value."""
    source = node.all_input_nodes[0]
    while _is_cast(source) and source.meta.get("autoamp_cast"):
        source = source.all_input_nodes[0]
    return source.name


def _runs_low(node: fx.Node, before: StandIns, after: StandIns) -> bool:
    """Whether an op computes low now where it computed in fp32."""
    old = dtypes_of(before.values[node.name])
    new = dtypes_of(after.values[node.name])
    if torch.float32 in old:
        return old != new
    return any(
        torch.float32 in dtypes_of(before.values.get(b.name))
        and torch.float32 not in dtypes_of(after.values[a.name])
        for a, b in zip(
            node.all_input_nodes,
            before.nodes[node.name].all_input_nodes,
            strict=False,
        )
    )
