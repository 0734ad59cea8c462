"""Proves a rewritten graph legal, from the graph alone.

Shares no code with what it checks: dtypes are not read from the metadata the rewrite
wrote but found by running the graph on stand-in tensors, and what an op accepts is
stated here again.  FX's own lint has no dtype check, and fake tensors let a bf16
`linear` with an fp32 weight pass, so neither would notice.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping

import torch
from torch import fx

from autoamp import compat
from autoamp.errors import VerificationError
from autoamp.graph_functions import (
    WITH_FP32_STATE,
    low_weight,
    op_with_its_state,
    saturating_cast,
)
from autoamp.rewrite.same_program import check_same_program, check_same_wiring
from autoamp.rewrite.standin import Memo, StandIns, dtypes_of, named, where

_CONVERTS = frozenset({"aten::to", "aten::_to_copy", "aten::copy_", "aten::type_as"})
"""Ops whose job is to take one dtype and give another."""

_CPU_FP32_PARAMETERS = {
    name: frozenset({"weight", "bias"})
    for name in (
        "aten::layer_norm",
        "aten::native_layer_norm",
        "aten::group_norm",
        "aten::native_group_norm",
        "aten::rms_norm",
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


class Verifier:
    """Checks rewritten graphs against the ATen graph `original` they were made from."""

    def __init__(self, original: fx.GraphModule) -> None:
        self.original = original
        self._memo: Memo = {}
        self._before = StandIns(original, self._memo)

    def _after(self, rewritten: fx.GraphModule) -> StandIns:
        """The rewritten graph on stand-ins."""
        return StandIns(rewritten, self._memo, original=self._before)

    def verify(
        self,
        rewritten: fx.GraphModule,
        must_make_high: Collection[str] = (),
        must_read_high: Collection[str] = (),
    ) -> None:
        """Raises at the first thing wrong in `rewritten`.

        Args:
            must_make_high, must_read_high: nodes of the original that may make, or
                read, no low tensor where they made, or read, an fp32 one.

        Raises:
            VerificationError: what is wrong: node, op, dtypes, source line.
        """
        before, after = self._before, self._after(rewritten)
        check_same_program(self.original, rewritten, before, after)
        for node in rewritten.graph.nodes:
            _metadata_is_true(node, after)
            _operands_agree(node, after, before)
        _denied_nodes_make_fp32(rewritten, set(must_make_high), before, after)
        _denied_nodes_read_fp32(rewritten, set(must_read_high), before, after)
        _no_stale_casts(self.original, rewritten, after)
        check_same_wiring(self.original, rewritten)

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
        before, after = self._before, self._after(rewritten)
        total = 0
        for node in rewritten.graph.nodes:
            if node.name in op_prices:
                total += op_prices[node.name][_runs_low(node, before, after)]
            elif _is_inserted_cast(node, before):
                source, way = _cast_of(node, after)
                total += (up_prices if way == "up" else down_prices)[source]
        return total

    def not_as_promised(
        self,
        rewritten: fx.GraphModule,
        low: Collection[str],
        casts: Mapping[tuple[str, str], int],
    ) -> list[str]:
        """The original nodes that a wrong recount is about.

        The first op in the wrong precision: the next ones may follow from it.  Where
        all are right, the values with other casts, and what reads them.

        Args:
            low: the nodes that the placement has low.
            casts: how many casts it has of each value, "down" and "up".
        """
        before, after = self._before, self._after(rewritten)
        found: list[str] = []
        made: Counter[tuple[str, str]] = Counter()
        for node in rewritten.graph.nodes:
            if node.name in before.nodes and node.op == "call_function":
                if _runs_low(node, before, after) != (node.name in low):
                    return [node.name]
            elif _is_inserted_cast(node, before):
                made[_cast_of(node, after)] += 1
        for value, way in sorted({*made, *casts}):
            if made[value, way] != casts.get((value, way), 0):
                found += [value, *(n.name for n in before.nodes[value].users)]
        return found


def _metadata_is_true(node: fx.Node, after: StandIns) -> None:
    if node.users and all(user.target is operator.getitem for user in node.users):
        return  # what is read of it is checked there
    said = dtypes_of(node.meta.get("val"))
    true = dtypes_of(after.values[node.name])
    if node.op != "output" and said != true:
        raise VerificationError(
            f"{where(node)} is recorded as {said} but computes {true}",
            nodes=named(node),
        )


def _operands_agree(node: fx.Node, after: StandIns, before: StandIns) -> None:
    """No op meets float dtypes that eager would reject or silently promote."""
    if node.target in WITH_FP32_STATE.values():
        _state_is_fp32(node, after)
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
    one_is_wide = torch.float32 in found.values()
    if name in _WIDEN and widened and one_is_wide:
        return
    twin = before.nodes.get(node.name)
    if twin is not None and _operand_dtypes(twin, before, exempt) == found:
        return  # the user mixed them, and they are as the user left them
    raise VerificationError(
        f"{where(node)} has operands of different dtypes: "
        + ", ".join(f"{k}: {v}" for k, v in found.items()),
        nodes=named(node),
    )


def _state_is_fp32(node: fx.Node, after: StandIns) -> None:
    """An op that keeps its state fp32 reads that in fp32 and all else in one dtype."""
    op = op_with_its_state(node.target)
    state = [a.name for a in op._schema.arguments].index("hx")
    read: list[set[torch.dtype]] = [set(), set()]
    for place, value in enumerate(node.args):
        operands: list[fx.Node] = []
        fx.map_arg(value, operands.append)
        floats = {d for n in operands for d in dtypes_of(after.values[n.name])}
        read[place == state] |= {d for d in floats if d.is_floating_point}
    if read[True] != {torch.float32} or len(read[False]) > 1:
        raise VerificationError(
            f"{where(node)} reads {read[False]}, and a state of {read[True]}",
            nodes=named(node),
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


def _denied_nodes_make_fp32(
    rewritten: fx.GraphModule, names: set[str], before: StandIns, after: StandIns
) -> None:
    for node in rewritten.graph.nodes:
        if node.name not in names:
            continue
        old = dtypes_of(before.values[node.name])
        new = dtypes_of(after.values[node.name])
        if old != new:
            raise VerificationError(
                f"{where(node)} must stay fp32 but its result became {new}",
                nodes=named(node),
            )


def _denied_nodes_read_fp32(
    rewritten: fx.GraphModule, names: set[str], before: StandIns, after: StandIns
) -> None:
    for node in rewritten.graph.nodes:
        if node.name not in names or _reads_as_it_comes(node):
            continue
        old = _read_dtypes(before.nodes[node.name], before)
        new = _read_dtypes(node, after)
        if old != new:
            raise VerificationError(
                f"{where(node)} must stay fp32 but reads {new} where it read {old}",
                nodes=named(node),
            )


def _reads_as_it_comes(node: fx.Node) -> bool:
    """Whether an op converts its operand itself, or reads but the shape of it."""
    if not isinstance(node.target, compat.OpOverload):
        return False
    name = node.target._schema.name
    shape_only = name.endswith("_like") or name.startswith("aten::new_")
    asks = torch.float32 in (*node.args, *node.kwargs.values())
    return shape_only or asks or name in _CONVERTS


def _read_dtypes(node: fx.Node, run: StandIns) -> list[torch.dtype]:
    """The dtypes of the float operands that an op computes with."""
    if isinstance(node.target, compat.OpOverload):
        return list(_operand_dtypes(node, run, ()).values())
    values = [run.values[n.name] for n in node.all_input_nodes]
    return [d for v in values for d in dtypes_of(v) if d.is_floating_point]


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
                    "cast of a tensor that was written to since",
                    nodes=[*named(node), cast],
                )
            crosses = regions.get(source.name, region) != region
            # A use of a weight has its gradient from the weight, not through the cast.
            if crosses and source.name not in returned and node.target != low_weight:
                raise VerificationError(
                    f"{where(node)} reads {source.name}, a cast made in another "
                    "grad-mode or autocast region",
                    nodes=named(node),
                )
        for written in _written(node, rewritten):
            storage = _storage(after, written)
            if storage in copies:
                raise VerificationError(
                    f"{where(node)} writes to {written.name}, which is or views "
                    f"{copies[storage][0]}, a cast: the write is lost",
                    nodes=named(node),
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
    """Whether a sub-graph, of ATen ops or as Dynamo wrote it, may write to an input."""
    nodes = list(body.graph.nodes)
    if any(n.op == "call_method" or "val" not in n.meta for n in nodes[:-1]):
        return any(_writes_by_name(n) or _written(n, body) for n in nodes)
    run = StandIns(body, {})
    given = {_storage(run, n) for n in nodes if n.op in ("placeholder", "get_attr")}
    return any(
        _storage(run, w) in given - {-1} for n in nodes for w in _written(n, body)
    )


def _writes_by_name(node: fx.Node) -> bool:
    """Whether a method, function or operator of Python's writes, going by its name."""
    name = str(getattr(node.target, "__name__", node.target))
    in_place = name.endswith("_") and not name.startswith("_")
    return node.op.startswith("call") and (in_place or name in _WRITING)


_WRITING = frozenset({"setitem", "iadd", "isub", "imul", "itruediv", "ipow"})


def _is_cast(node: fx.Node) -> bool:
    if node.target is saturating_cast:
        return True
    return (
        isinstance(node.target, compat.OpOverload)
        and node.target._schema.name == "aten::_to_copy"
    )


def _is_inserted_cast(node: fx.Node, before: StandIns) -> bool:
    return node.name not in before.nodes and _is_cast(node)


def _cast_of(node: fx.Node, after: StandIns) -> tuple[str, str]:
    """The original value a cast copies, and whether "up" or "down".

    Through a cast of a returned value.
    """
    up = dtypes_of(after.values[node.name])[0] == torch.float32
    source = node.all_input_nodes[0]
    while _is_cast(source) and source.meta.get("autoamp_cast"):
        source = source.all_input_nodes[0]
    return source.name, "up" if up else "down"


def _runs_low(node: fx.Node, before: StandIns, after: StandIns) -> bool:
    """Whether an op computes low now where it computed in fp32."""
    old = dtypes_of(before.values[node.name])
    new = dtypes_of(after.values[node.name])
    if node.target in WITH_FP32_STATE.values():
        return True
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
