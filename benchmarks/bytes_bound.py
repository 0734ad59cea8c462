"""The least bytes of a training step under the ceiling: a cut with free casts.

Every op of the captured graphs is called by itself in each precision that it may have,
forward and backward, and its bytes are counted.  The placement problem of the graph is
then solved with these bytes as prices, and with no price for a cast inside the graph.
The constraints are those of the pass: no op is computed in less precision than under
`torch.autocast`.

What remains beside the ops is what every placement pays: the low copy of a weight that
a low op reads and the fp32 gradient of that weight, and the sums of the gradients of a
value that several ops read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE
from autoamp.passes.decide.cost import Prices
from autoamp.passes.decide.devices import NEUTRAL
from autoamp.passes.decide.problem import build_problem, least_cost
from autoamp.passes.decide.verdict import Classified
from autoamp.passes.functions.attention import attention
from autoamp.passes.kernels.attention import attention_at
from autoamp.passes.kernels.norms import softmax_at
from autoamp.passes.record import Rewritten
from autoamp.passes.speeds.prices import Operand, op_specimen
from autoamp.tools.count import count_traffic

_BESIDE_SUM = 3
"""Tensors that the sum of two gradients moves: two are read, and one is written."""


def bytes_bound(graphs: Iterable[Rewritten]) -> int:
    """The least bytes of one step of the graphs; ops that cannot be called count 0.

    The calls are those of the graph that was placed.  A step may lie below the bound
    where a later edit of the graph fuses several of the calls (rotary embeddings).
    """
    # A graph that was captured twice, as under a counting mode, is one of the step's.
    return sum(map(_of_graph, {g.before.code: g for g in graphs}.values()))


def _of_graph(graph: Rewritten) -> int:
    prices = _prices(graph)
    return least_cost(build_problem(graph.classified, prices))[1]


def _prices(graph: Rewritten) -> Prices:
    facts = graph.facts
    device, known = NEUTRAL, dict[str, int]()
    fixed = frozenset(graph.assignment.pinned)
    calls = _Calls(graph.classified, graph.low, fixed, known)
    nodes = {n.name: n for n in graph.before.graph.nodes}
    ops = {}
    for name in graph.classified.verdicts:
        high = calls.bytes(nodes[name], None)
        low = high if name in fixed else calls.bytes(nodes[name], graph.low)
        ops[name] = high, low
    for name, (high, low) in _sums(graph.classified, graph.low, fixed).items():
        if name in ops:
            ops[name] = ops[name][0] + high, ops[name][1] + low
    casts = {f.name: 0 for f in facts.nodes.values() if f.is_value}
    moved = HIGH_DTYPE.itemsize + graph.low.itemsize
    of_weights = {
        name: moved * facts.nodes[name].numel * (1 + facts.nodes[name].requires_grad)
        for name in facts.weights & casts.keys()
    }
    return Prices(ops, casts | of_weights, casts, 0, True, device)


def _sums(
    classified: Classified, low: torch.dtype, fixed: Collection[str]
) -> dict[str, tuple[int, int]]:
    """The bytes of the sums of gradients, by the node that makes the value summed.

    A value's gradients are at least as narrow as the narrowest op that may read it.
    """
    facts = classified.facts
    readers: dict[str, set[str]] = {}
    for name in classified.verdicts:
        if facts.nodes[name].requires_grad:
            for operand in facts.nodes[name].operands:
                readers.setdefault(operand.value, set()).add(name)
    found: Counter[str] = Counter()
    narrow: Counter[str] = Counter()
    for value, names in readers.items():
        fact = facts.nodes[value]
        if not fact.requires_grad or value in facts.constants or len(names) == 1:
            continue
        at = facts.producer(value)
        moved = _BESIDE_SUM * (len(names) - 1) * fact.numel
        wide = names <= set(fixed)
        found[at] += moved * (HIGH_DTYPE if wide else low).itemsize
        narrow[at] += moved * low.itemsize
    return {name: (found[name], narrow[name]) for name in found}


@dataclass(frozen=True)
class _Calls:
    """Counts ops, each called by itself; `known` holds the bytes counted so far."""

    classified: Classified
    low: torch.dtype
    fixed: Collection[str]
    known: dict[str, int]

    def bytes(self, node: fx.Node, low: torch.dtype | None) -> int:
        """The least bytes of a call and its backward, in low precision or in fp32."""
        specimen = op_specimen(node, self.classified, low)
        if specimen is None:
            return 0
        args, kwargs = specimen.args, specimen.kwargs
        if low is None:
            args, kwargs = self._narrow(node, args, kwargs)
        targets = [specimen.target]
        targets += {attention_at(node, own=attention), softmax_at(node)} - {node.target}
        found = [self._counted(t, node, args, kwargs) for t in targets]
        return min((n for n in found if n is not None), default=0)

    def _narrow(self, node: fx.Node, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The operands of an fp32 call, low where its kernel widens what it reads."""
        reads = self.classified.reads(node.name)
        facts = self.classified.facts

        def operand(leaf: Any) -> Any:
            if not isinstance(leaf, Operand) or leaf.dtype != HIGH_DTYPE:
                return leaf
            read, mode = next(reads)
            at = facts.producer(read.value)
            may_be_low = at not in self.fixed and read.value not in facts.constants
            if mode != "any" or not may_be_low:
                return leaf
            return replace(leaf, dtype=self.low)

        narrowed: tuple[Any, Any] = pytree.tree_map(operand, (args, kwargs))
        return narrowed

    def _counted(
        self, target: Any, node: fx.Node, args: Any, kwargs: Any
    ) -> int | None:
        """The bytes of one call; None where the op takes no such operands."""
        names = [
            leaf.name if isinstance(leaf, fx.Node) else ""
            for leaf in pytree.tree_leaves((node.args, dict(node.kwargs)))
        ]
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = repr((str(target), [names.index(n) for n in names], leaves))
        if key not in self.known:
            made: dict[str, Any] = {}
            for name, leaf in zip(names, leaves, strict=True):
                if isinstance(leaf, Operand) and name not in made:
                    made[name] = leaf.made(torch.device("cpu"))
            given = [
                made[n] if isinstance(v, Operand) else v
                for n, v in zip(names, leaves, strict=True)
            ]
            try:
                self.known[key] = _moved(target, *pytree.tree_unflatten(given, spec))
            except Exception:  # noqa: BLE001 - an op may refuse zeros for its indices
                self.known[key] = -1
        return self.known[key] if self.known[key] >= 0 else None


def _moved(target: Any, args: Any, kwargs: Any) -> int:
    writes = isinstance(target, compat.OpOverload) and (
        compat.schema(target).is_mutable
    )
    tensors = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
    inputs = [t for t in tensors if t.requires_grad]
    if writes:  # a leaf must not be written to
        args, kwargs = pytree.tree_map_only(Tensor, Tensor.clone, (args, kwargs))
    results: list[Tensor] = []

    def forward() -> None:
        leaves = pytree.tree_leaves(target(*args, **kwargs))
        results.extend(v for v in leaves if isinstance(v, Tensor) and v.requires_grad)

    with torch.set_grad_enabled(bool(inputs)):
        total = count_traffic(forward).bytes()
        if inputs and results:
            grads = [*map(torch.ones_like, results)]
            total += count_traffic(
                lambda: torch.autograd.grad(results, inputs, grads, allow_unused=True)
            ).bytes()
    return total
