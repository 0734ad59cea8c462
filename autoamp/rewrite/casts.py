"""Applies an assignment to a graph: the only module that inserts casts.

A cast is made where the first reader needs it and shared by the readers of the same
value in the same region (grad mode, autocast) between two writes to its storage.

Before, with `linear` low and `exp` fp32:

    linear = linear(x, weight);  exp = exp(linear)

after:

    x_bf16 = _to_copy(x, bf16);  weight_bf16 = _to_copy(weight, bf16)
    linear = linear(x_bf16, weight_bf16)
    linear_fp32 = _to_copy(linear, fp32);  exp = exp(linear_fp32)
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.classify import FACTORIES
from autoamp.analyse.facts import NodeFacts
from autoamp.analyse.verdict import Mode
from autoamp.dtypes import HIGH_DTYPE, largest, short_name
from autoamp.graph_functions import low_weight, saturating_cast
from autoamp.ops import base_name, is_out_variant, is_view
from autoamp.place.assign import Assignment

CAST_KIND = "autoamp_cast"
"""Set in the `meta` of every inserted cast: "weight", "down" or "up"."""

MANY_USES = 8
"""Uses of one cast beyond which its gradients are summed in fp32, use by use.

Summing n terms in bf16 (8 bits) may lose n/2 units of the last place of the largest;
up to 8 terms that stays within what one more rounding of the result costs.  (Autocast,
which casts per use, always sums in fp32.)"""

_CAST = torch.ops.aten._to_copy.default


@dataclass(frozen=True)
class Cast:
    """One inserted cast.

    Attributes:
        name: its node.
        kind: "weight", "down" or "up".
        value: the node it casts.
        dtype: what it casts to.
        bytes: bytes it writes (a hint where the size is symbolic).
    """

    name: str
    kind: str
    value: str
    dtype: torch.dtype
    bytes: int


def insert_casts(
    gm: fx.GraphModule,
    assignment: Assignment,
    extreme: frozenset[str],
    low: torch.dtype,
    fake_mode: compat.FakeTensorMode,
) -> tuple[fx.GraphModule, list[Cast]]:
    """A new module with `assignment` applied, and the casts it holds, in graph order.

    `gm` is not changed; parameters and sub-modules are shared with it.  Casts of the
    values in `extreme` saturate.
    """
    emitter = _Emitter(gm, assignment, extreme, low, fake_mode)
    for node in gm.graph.nodes:
        emitter.emit(node)
    rewritten = fx.GraphModule(gm, emitter.graph)
    rewritten.meta.update(gm.meta)
    return rewritten, emitter.casts


class _Emitter:
    def __init__(
        self,
        gm: fx.GraphModule,
        assignment: Assignment,
        extreme: frozenset[str],
        low: torch.dtype,
        fake_mode: compat.FakeTensorMode,
    ) -> None:
        self.facts = facts = assignment.facts
        self.verdicts = assignment.verdicts
        self.extreme = extreme
        self.assignment = assignment
        self.low = low
        self.fake_mode = fake_mode
        self.graph = fx.Graph()
        self.old = {n.name: n for n in gm.graph.nodes}
        self.new: dict[str, fx.Node] = {}
        self.inserted: set[str] = set()
        self.names_tried: Counter[str] = Counter()
        self.copies: dict[tuple[str, torch.dtype, int, int], fx.Node] = {}
        self.casts: list[Cast] = []
        self.fakes: dict[Any, torch.Tensor] = {}
        self.returned_from: dict[str, fx.Node] = {}
        self.weight_storage = {
            facts.nodes[w].storage: w for w in sorted(facts.weights, reverse=True)
        }
        self.low_reads = self._count_low_reads()

    def emit(self, node: fx.Node) -> None:
        if node.op == "output":
            result = fx.map_arg(node.args[0], self._returned)
            self.graph.output(result).meta = dict(node.meta)
            return
        if node.name not in self.verdicts:
            new = self.graph.node_copy(node, lambda n: self.new[n.name])
            new.meta = dict(node.meta)
            if node.name in self.facts.element_of:
                self._retype_element(new)
        else:
            new = self._emit_op(node)
        self.new[node.name] = new
        if node.name in self.assignment.returned_inside and _dtype(new) == self.low:
            self.new[node.name] = self._cast(node.name, HIGH_DTYPE)
            self.returned_from[node.name] = new

    # -- ops -----------------------------------------------------------------------

    def _emit_op(self, node: fx.Node) -> fx.Node:
        fact, verdict = self.facts.nodes[node.name], self.verdicts[node.name]
        is_low = node.name in self.assignment.low
        reads = iter(zip(fact.operands, verdict.modes, strict=True))

        def operand(leaf: fx.Node) -> fx.Node:
            value = leaf.meta.get("val")
            if not (isinstance(value, torch.Tensor) and value.dtype == HIGH_DTYPE):
                return self.new[leaf.name]
            read, mode = next(reads)
            wanted = self._wanted(mode, is_low)
            if wanted is None:
                return self.new[leaf.name]
            return self._in_dtype(leaf.name, wanted, fact, read.epoch)

        args = tuple(fx.map_arg(a, operand) for a in node.args)
        kwargs = {k: fx.map_arg(v, operand) for k, v in node.kwargs.items()}
        if self.casts and self._is_copy_by_layout(node, fact):
            assert isinstance(args[0], fx.Node)
            args = (self._clone(args[0]), *args[1:])
        args, kwargs = self._adapt_literals(node, args, kwargs, is_low)
        new = self.graph.create_node(node.op, node.target, args, kwargs, node.name)
        new.meta = dict(node.meta)
        if is_low and fact.makes_floats:
            new.meta["val"] = self._low_result(node.meta["val"])
        return new

    def _is_copy_by_layout(self, node: fx.Node, fact: NodeFacts) -> bool:
        """Whether an op like `reshape` copies here and the copy is written or returned.

        A cast lays a tensor out anew, without gaps: of that it could be a view, and the
        write would reach every reader of the cast.
        """
        apart = self.facts.mutated | {
            self.facts.nodes[v].storage for v in self.facts.returned
        }
        return (
            fact.storage in apart
            and len(fact.operands) == 1
            and isinstance(node.args[0], fx.Node)
            and self.facts.nodes[fact.operands[0].value].storage != fact.storage
            and isinstance(node.target, compat.OpOverload)
            and is_view(node.target)
        )

    def _clone(self, value: fx.Node) -> fx.Node:
        name = self._free_name(f"{value.name}_copy")
        new = self.graph.create_node(
            "call_function", torch.ops.aten.clone.default, (value,), {}, name
        )
        new.meta = {k: v for k, v in value.meta.items() if k != CAST_KIND}
        with self.fake_mode:
            new.meta["val"] = value.meta["val"].clone()
        return new

    def _wanted(self, mode: Mode, is_low: bool) -> torch.dtype | None:
        if mode == "any":
            return None
        return self.low if is_low and mode != "high" else HIGH_DTYPE

    def _adapt_literals(
        self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], is_low: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Dtype arguments and numbers beyond the range of a low op."""
        if not isinstance(node.target, compat.OpOverload):
            return args, kwargs
        if is_low:
            args = tuple(self._adapt(a) for a in args)
            kwargs = {k: self._adapt(v) for k, v in kwargs.items()}
        makes_data = base_name(node.target) in FACTORIES
        makes_data &= not is_out_variant(node.target)
        if makes_data and self.facts.nodes[node.name].makes_floats:
            kwargs = {**kwargs, "dtype": self.low if is_low else HIGH_DTYPE}
        return args, kwargs

    def _adapt(self, value: Any) -> Any:
        if value is HIGH_DTYPE:
            return self.low
        if isinstance(value, float) and math.isfinite(value):
            return max(-largest(self.low), min(largest(self.low), value))
        return value

    def _low_result(self, value: Any) -> Any:
        """The fake result of an op that gave `value` in fp32."""
        if isinstance(value, (list, tuple)):
            return type(value)(self._low_result(item) for item in value)
        if isinstance(value, torch.Tensor) and value.dtype == HIGH_DTYPE:
            return self._fake(value, self.low)
        return value

    def _fake(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A fake tensor like `like` in `dtype`; one serves all of the same size."""
        sizes = (*like.shape, *like.stride())
        static = all(type(size) is int for size in sizes)
        key = (sizes, dtype, like.device) if static else None
        if key in self.fakes:
            return self.fakes[key]
        with self.fake_mode:
            made = like.to(dtype)
        if key is not None:
            self.fakes[key] = made
        return made

    def _retype_element(self, new: fx.Node) -> None:
        source, index = new.args
        assert isinstance(source, fx.Node)
        assert isinstance(index, int)
        new.meta["val"] = source.meta["val"][index]

    # -- operands ------------------------------------------------------------------

    def _in_dtype(
        self, value: str, dtype: torch.dtype, reader: NodeFacts, epoch: int
    ) -> fx.Node:
        """`value` in `dtype`, for one read by `reader`."""
        at = self.new[value]
        if _dtype(at) == dtype:
            return self._view_per_use(value, reader) or at
        if value in self.returned_from and dtype == self.low:
            return self._use_of(value, self.returned_from[value])
        key = (value, dtype, reader.region, epoch)
        copy = self.copies.get(key)
        if copy is None:
            copy = self.copies[key] = self._cast(value, dtype)
        if dtype != HIGH_DTYPE and self._sums_in_fp32(value, reader, epoch):
            return self._use_of(value, copy)
        return copy

    def _sums_in_fp32(self, value: str, reader: NodeFacts, epoch: int) -> bool:
        """Whether each use of a shared cast needs an autograd node of its own."""
        if not (self.facts.nodes[value].requires_grad and reader.requires_grad):
            return False
        uses = self.low_reads[value, reader.region, epoch]
        of_weight = self.facts.nodes[value].storage in self.weight_storage
        return uses > (1 if of_weight else MANY_USES)

    def _use_of(self, value: str, copy: fx.Node) -> fx.Node:
        name = self._free_name(f"{copy.name}_use")
        new = self.graph.create_node(
            "call_function", low_weight, (self.new[value], copy), {}, name
        )
        new.meta = dict(copy.meta)
        new.meta.pop(CAST_KIND, None)
        return new

    def _view_per_use(self, value: str, reader: NodeFacts) -> fx.Node | None:
        """A fresh view chain for one use of a low view of a weight, or None.

        `w.t()` computed once and used often would sum its gradients in low precision
        where the uses meet; repeating the view (no data moves) lets them meet in fp32.
        """
        fact = self.facts.nodes[value]
        weight = self.weight_storage.get(fact.storage)
        if (
            weight is None
            or not (fact.requires_grad and reader.requires_grad)
            or fact.storage in self.facts.mutated
            or self.low_reads[value, fact.region, 0] < 2
            or _dtype(self.new[value]) != self.low
        ):
            return None
        maker = self.new[value]
        if value in self.facts.element_of:
            return self._piece_per_use(value, reader)
        operands = fact.operands
        if len(operands) != 1 or maker.op != "call_function":
            return None
        return self._repeated(value, operands[0].value, reader)

    def _piece_per_use(self, value: str, reader: NodeFacts) -> fx.Node | None:
        """The same for one of the pieces `chunk` or `split` cut a weight into."""
        whole = self.facts.element_of[value]
        operands = self.facts.nodes[whole].operands
        if len(operands) != 1 or whole not in self.verdicts:
            return None
        cut = self._repeated(whole, operands[0].value, reader)
        args = (cut, *self.old[value].args[1:])
        name = self._free_name(value)
        new = self.graph.create_node("call_function", operator.getitem, args, {}, name)
        new.meta = dict(self.new[value].meta)
        return new

    def _repeated(self, view: str, below: str, reader: NodeFacts) -> fx.Node:
        """View op `view` of `below` again, down to a use of the weight of its own."""
        if below in self.facts.constants:
            region = self.facts.nodes[view].region  # where the view's own cast is
            source = self._use_of(below, self.copies[below, self.low, region, 0])
        else:
            source = self._view_per_use(below, reader) or self.new[below]
        old = self.old[view]
        args = fx.map_arg(old.args, lambda n: self._swap(n, below, source))
        name = self._free_name(old.name)
        new = self.graph.create_node("call_function", old.target, args, {}, name)
        new.kwargs = fx.map_arg(old.kwargs, lambda n: self._swap(n, below, source))
        new.meta = dict(self.new[view].meta)
        return new

    def _free_name(self, wanted: str) -> str:
        """A name for a new node: one that no node has, nor one still to come.

        What is known of a node, and what `verify` compares, is found by its name.
        """
        name, count = wanted, self.names_tried[wanted]
        while name in self.old or name in self.inserted:
            count += 1
            name = f"{wanted}_{count}"
        self.names_tried[wanted] = count
        self.inserted.add(name)
        return name

    def _swap(self, node: fx.Node, below: str, source: fx.Node) -> fx.Node:
        return source if node.name == below else self.new[node.name]

    def _returned(self, node: fx.Node) -> fx.Node:
        new = self.new[node.name]
        fact = self.facts.nodes[node.name]
        if fact.is_value and _dtype(new) != HIGH_DTYPE:
            return self._cast_once(node.name)
        return new

    def _cast_once(self, value: str) -> fx.Node:
        key = (value, HIGH_DTYPE, -1, -1)
        if key not in self.copies:
            self.copies[key] = self._cast(value, HIGH_DTYPE)
        return self.copies[key]

    def _cast(self, value: str, dtype: torch.dtype) -> fx.Node:
        at = self.new[value]
        kind = "up" if dtype == HIGH_DTYPE else "down"
        written = self.facts.nodes[value].storage in self.facts.mutated
        if kind == "down" and value in self.facts.weights and not written:
            kind = "weight"  # one copy, made before the graph runs, serves every use
        name = self._free_name(f"{value}_{short_name(dtype)}")
        if kind == "down" and value in self.extreme:
            new = self.graph.create_node(
                "call_function", saturating_cast, (at, dtype), {}, name
            )
        else:
            new = self.graph.create_node(
                "call_function", _CAST, (at,), {"dtype": dtype}, name
            )
        for key in ("nn_module_stack", "stack_trace"):
            if key in at.meta:
                new.meta[key] = at.meta[key]
        new.meta["val"] = self._fake(at.meta["val"], dtype)
        new.meta[CAST_KIND] = kind
        numel = self.facts.nodes[value].numel
        cast = Cast(new.name, kind, value, dtype, numel * dtype.itemsize)
        self.casts.append(cast)
        return new

    def _count_low_reads(self) -> Mapping[tuple[str, int, int], int]:
        """How many reads of each value, per region and epoch, are in the low dtype."""
        counts: Counter[tuple[str, int, int]] = Counter()
        for name, verdict in self.verdicts.items():
            if name not in self.assignment.low:
                continue
            fact = self.facts.nodes[name]
            for operand, mode in zip(fact.operands, verdict.modes, strict=True):
                if mode in ("same", "follow"):
                    counts[operand.value, fact.region, operand.epoch] += 1
        return counts


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None
