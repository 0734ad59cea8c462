"""Verifies that a rewritten graph is legal, from the graph alone.

The original and the rewritten graph go in; a fault raises `VerificationError`.  The
verifier shares no code with the passes that decide and write: it finds dtypes by
running the graph on stand-in tensors, not in the metadata the rewrite wrote, and states
again which operands an op accepts.  Without the verifier dtype faults would go unseen,
because FX's lint has no dtype check and fake tensors let a bf16 `linear` with an fp32
weight pass.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.errors import VerificationError
from autoamp.passes.check.allowed_changes import INSERTED_CASTS
from autoamp.passes.check.compare import calls_bodies, differences, operands
from autoamp.passes.check.operands import operands_agree, read_dtypes, reads_as_it_comes
from autoamp.passes.check.standin import Memo, StandIns, dtypes_of, named, where
from autoamp.passes.functions import WITH_FP32_STATE, low_weight, saturating_cast
from autoamp.passes.ops import is_custom


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
        """Raises at the first fault in `rewritten`.

        Args:
            must_make_high: nodes of the original whose fp32 results must stay fp32.
            must_read_high: nodes of the original whose fp32 operands must stay fp32.

        Raises:
            VerificationError: the message gives node, op, dtypes and source line.
        """
        before, after = self._before, self._after(rewritten)
        _same_results(rewritten, before, after)
        for node in rewritten.graph.nodes:
            made = dtypes_of(after.values[node.name])
            told = dtypes_of(node.meta.get("val"))
            # Of a call with several results each `getitem` is checked by itself.
            several = node.users and all(
                user.target is operator.getitem for user in node.users
            )
            if told != made and node.op != "output" and not several:
                raise VerificationError(
                    f"{where(node)} is recorded as {told} but computes {made}",
                    nodes=named(node),
                )
            operands_agree(node, after, before)
            stays_high = node.name in must_make_high
            if stays_high and dtypes_of(before.values[node.name]) != made:
                raise VerificationError(
                    f"{where(node)} must stay fp32 but its result became {made}",
                    nodes=named(node),
                )
            if node.name in must_read_high and not reads_as_it_comes(node):
                old = read_dtypes(before.nodes[node.name], before)
                new = read_dtypes(node, after)
                if old != new:
                    raise VerificationError(
                        f"{where(node)} must stay fp32 but reads {new} where it read "
                        f"{old}",
                        nodes=named(node),
                    )
        _same_strides(rewritten, before, after)
        _no_stale_casts(self.original, rewritten, after)
        differences(self.original, rewritten, INSERTED_CASTS)

    def recount(
        self,
        rewritten: fx.GraphModule,
        op_prices: Mapping[str, tuple[int, int]],
        down_prices: Mapping[str, int],
        up_prices: Mapping[str, int],
        wide_prices: Mapping[str, int] = MappingProxyType({}),
    ) -> int:
        """The cost of `rewritten`, counted anew from its ops, as they run, and casts.

        Before clean-up this cost must equal the cost that the placement promised.

        Args:
            wide_prices: value to the price of its only use, where that is a cast up.
        """
        before, after = self._before, self._after(rewritten)
        total = 0
        for node in rewritten.graph.nodes:
            # Counted from dtypes found on stand-ins: a cast that the pass forgot to
            # make, or made twice, shows in the sum.
            if node.name in op_prices:
                total += op_prices[node.name][_runs_low(node, before, after)]
            elif _is_inserted_cast(node, before):
                source, way = _cast_of(node, before, after)
                prices = up_prices if way == "up" else down_prices
                # A product writes fp32 itself only where nothing reads it low.
                is_only_use = len(node.all_input_nodes[0].users) == 1
                if source in wide_prices and way == "up" and is_only_use:
                    prices = wide_prices
                total += prices[source]
        return total

    def not_as_promised(
        self,
        rewritten: fx.GraphModule,
        low: Collection[str],
        casts: Mapping[tuple[str, str], int],
    ) -> list[str]:
        """The original nodes that caused a wrong recount.

        The first op in the wrong precision is returned alone, because later ones may
        follow from it.  If every op has the right precision, the values with another
        number of casts are returned, with their readers.

        Args:
            low: the nodes that the placement makes low.
            casts: the placement's number of casts by (value, "down" or "up").
        """
        before, after = self._before, self._after(rewritten)
        found: list[str] = []
        made: Counter[tuple[str, str]] = Counter()
        for node in rewritten.graph.nodes:
            if node.name in before.nodes and node.op == "call_function":
                if _runs_low(node, before, after) != (node.name in low):
                    return [node.name]
            elif _is_inserted_cast(node, before):
                made[_cast_of(node, before, after)] += 1
        for value, way in sorted({*made, *casts}):
            if made[value, way] != casts.get((value, way), 0):
                found += [value, *(n.name for n in before.nodes[value].users)]
        return found


def _same_results(rewritten: fx.GraphModule, before: StandIns, after: StandIns) -> None:
    """Checks the structure of the results, and their dtypes."""
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


def _same_strides(rewritten: fx.GraphModule, before: StandIns, after: StandIns) -> None:
    """Checks that results, and what `as_strided` reads, lie as before."""
    old, new = (_leaves(run.values["output"]) for run in (before, after))
    # The caller may `view` a result, which raises on other strides than the model's.
    made_by = _leaves(rewritten.graph.output_node().args[0])
    for node, one, other in zip(made_by, old, new, strict=True):
        if _strides(one) != _strides(other):
            raise VerificationError(
                f"{where(node)} is returned with strides {_strides(other)}, "
                f"where the model's has {_strides(one)}",
                nodes=named(node),
            )
    for node in rewritten.graph.nodes:
        is_strided = isinstance(node.target, compat.OpOverload) and (
            compat.schema(node.target).name.startswith("aten::as_strided")
        )
        if not is_strided or node.name not in before.nodes:
            continue
        # A cast packs its operand anew, and `as_strided` would then show other
        # elements.
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


def _is_inserted_cast(node: fx.Node, before: StandIns) -> bool:
    return node.name not in before.nodes and _is_cast(node)


def _cast_of(node: fx.Node, before: StandIns, after: StandIns) -> tuple[str, str]:
    """The original value that a cast copies, and its direction, "up" or "down".

    If the cast reads an added cast or copy of a value, that value counts.
    """
    up = dtypes_of(after.values[node.name])[0] == torch.float32
    source = node.all_input_nodes[0]
    while source.name not in before.nodes:
        source = source.all_input_nodes[0]
    return source.name, "up" if up else "down"


def _runs_low(node: fx.Node, before: StandIns, after: StandIns) -> bool:
    """Whether an op that computed in fp32 runs in low precision after the rewrite."""
    old = dtypes_of(before.values[node.name])
    new = dtypes_of(after.values[node.name])
    if node.target in WITH_FP32_STATE.values():
        return True
    # The author of a custom op may give fp32 whatever the op reads, and a body does.
    may_read_low = is_custom(node.target) or calls_bodies(node)
    if torch.float32 in old and (old != new or not may_read_low):
        return old != new
    return any(
        torch.float32 in dtypes_of(before.values.get(b.name))
        and torch.float32 not in dtypes_of(after.values[a.name])
        # One operand may be given twice: once in fp32, and once low.
        for a, b in zip(operands(node), operands(before.nodes[node.name]), strict=False)
    )


# -- casts that are written to, or out of date -----------------------------------------


def _no_stale_casts(
    original: fx.GraphModule, rewritten: fx.GraphModule, after: StandIns
) -> None:
    """Raises where a cast is written to, is read in another region, or is stale.

    A cast is stale if it is read after a later write to the storage that it copies.
    """
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
            # The gradient of a use goes to the weight, not through the cast.
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
    """The storage id of a node's stand-in; -1 if the stand-in is no tensor."""
    value = run.values[node.name]
    return compat.storage_id(value) if isinstance(value, torch.Tensor) else -1


def _written(node: fx.Node, gm: fx.GraphModule) -> list[fx.Node]:
    if isinstance(node.target, compat.HigherOrderOperator):
        taken = [n for n in node.all_input_nodes if n.op == "get_attr"]
        bodies = [operator.attrgetter(str(n.target))(gm) for n in taken]
        if any(_may_write(b) for b in bodies if isinstance(b, fx.GraphModule)):
            # The body may write to some input, so all its inputs count as written.
            return [n for n in node.all_input_nodes if n.op != "get_attr"]
    if not isinstance(node.target, compat.OpOverload):
        return []
    order = compat.argument_names(node.target)
    names = compat.written_arguments(node.target)
    found: list[fx.Node] = []
    if not names:
        return found
    for name, value in [*zip(order, node.args, strict=False), *node.kwargs.items()]:
        if name in names:
            fx.map_arg(value, found.append)
    return found


def _may_write(body: fx.GraphModule) -> bool:
    """Whether a sub-graph, of ATen ops or as Dynamo wrote it, may write to an input."""
    nodes = list(body.graph.nodes)
    # A body as Dynamo wrote it has no metadata to make stand-ins of.
    if any(n.op == "call_method" or "val" not in n.meta for n in nodes[:-1]):
        for node in nodes:
            name = str(getattr(node.target, "__name__", node.target))
            in_place = name.endswith("_") and not name.startswith("_")
            # A Python method, function or operator is judged by its name.
            by_name = node.op.startswith("call") and (in_place or name in _WRITING)
            if by_name or _written(node, body):
                return True
        return False
    run = StandIns(body, {})
    given = {_storage(run, n) for n in nodes if n.op in ("placeholder", "get_attr")}
    return any(
        _storage(run, w) in given - {-1} for n in nodes for w in _written(n, body)
    )


_WRITING = frozenset({"setitem", "iadd", "isub", "imul", "itruediv", "ipow"})


def _is_cast(node: fx.Node) -> bool:
    """Whether `node` is a cast, inserted by the rewrite or made by the model."""
    if node.target is saturating_cast:
        return True
    return (
        isinstance(node.target, compat.OpOverload)
        and compat.schema(node.target).name == "aten::_to_copy"
    )
