"""The graph that is being emitted: nodes by their old names, and the casts so far."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE, short_name
from autoamp.passes.decide.verdict import Classified
from autoamp.passes.functions import (
    low_uses,
    low_weight,
    low_weight_unscaled,
    low_weights,
    low_weights_unscaled,
    saturating_cast,
    scale_grad,
    scaled_result,
    unscale_grad,
    unscale_half,
    unscaled_weights,
)

CAST_KIND = "autoamp_cast"
"""Set in the `meta` of every inserted cast: "weight", "down" or "up"."""

WEIGHT_PATH = "autoamp_weight"
"""Set in the `meta` of a copy that a graph is called with: the path of its weight
("" where unknown)."""

USES = frozenset({low_uses, low_weight, low_weight_unscaled})
"""Calls through which ops read a low copy, and which sum its gradients in fp32."""

TOGETHER: dict[Any, int] = {
    low_weights: 0,
    low_weights_unscaled: 2,
    unscaled_weights: 2,
}
"""Calls for several weights, each with the number of operands before the weights."""

_LOSS_SCALING = frozenset({scale_grad, scaled_result, unscale_grad, unscale_half})
_INSERTED = USES | _LOSS_SCALING | TOGETHER.keys()
_CAST = torch.ops.aten._to_copy.default


@dataclass(frozen=True)
class Cast:
    """One inserted cast.

    Attributes:
        name: the name of the cast's node.
        kind: "weight", "down" or "up".
        value: the name of the node that is cast.
        dtype: the dtype cast to.
        bytes: bytes that the cast writes (a hint where the size is symbolic).
    """

    name: str
    kind: str
    value: str
    dtype: torch.dtype
    bytes: int


class Emitted:
    """The new graph, to which nodes are added one by one.

    Attributes:
        graph: the new graph so far.
        old: the nodes of the original graph by name.
        new: for each name in `old`, the node that stands for it in the new graph.
        casts: the inserted casts, in graph order.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        classified: Classified,
        fake_mode: compat.FakeTensorMode,
    ) -> None:
        """Starts with an empty graph."""
        self.graph = fx.Graph()
        self.old = {n.name: n for n in gm.graph.nodes}
        self.new: dict[str, fx.Node] = {}
        self.casts: list[Cast] = []
        self._facts = classified.facts
        self._extreme = classified.extreme
        self._fake_mode = fake_mode
        self._fakes: dict[Any, torch.Tensor] = {}
        self._inserted: set[str] = set()
        self._names_tried: Counter[str] = Counter()

    def insert(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str,
        like: fx.Node,
    ) -> fx.Node:
        """Adds a call that the original graph lacks, with the `meta` of `like`."""
        new = compat.quick_node(
            self.graph, "call_function", target, args, kwargs, self._free_name(name)
        )
        new.meta.update(like.meta)
        new.meta.pop(CAST_KIND, None)
        return new

    def cast(self, value: str, dtype: torch.dtype) -> fx.Node:
        """Adds a cast to `dtype` of the node that now stands for `value`."""
        at = self.new[value]
        kind = "up" if dtype == HIGH_DTYPE else "down"
        # A copy made before the graph runs would miss a write that the graph makes.
        written = self._facts.nodes[value].storage in self._facts.mutated
        if kind == "down" and value in self._facts.weights and not written:
            kind = "weight"  # one copy, made before the graph runs, serves every use
        name = self._free_name(f"{value}_{short_name(dtype)}")
        # A mask of `finfo(float32).min` rounds to -inf, and a row of them makes softmax
        # NaN.
        saturates = kind == "down" and value in self._extreme
        new = compat.quick_node(
            self.graph,
            "call_function",
            saturating_cast if saturates else _CAST,
            (at, dtype) if saturates else (at,),
            {} if saturates else {"dtype": dtype},
            name,
        )
        for key in ("nn_module_stack", "stack_trace"):
            if key in at.meta:
                new.meta[key] = at.meta[key]
        # Without `val` later passes take the cast for no tensor of floats, and a
        # `linear` of fp32 data and a bf16 weight passes unseen.
        new.meta["val"] = self.fake(at.meta["val"], dtype)
        new.meta[CAST_KIND] = kind
        numel = self._facts.nodes[value].numel
        self.casts.append(Cast(new.name, kind, value, dtype, numel * dtype.itemsize))
        return new

    def use_of(self, value: str, copy: fx.Node) -> fx.Node:
        """One use of a low `copy` of `value`, with a gradient of its own."""
        return self.insert(
            low_weight, (self.new[value], copy), {}, f"{copy.name}_use", copy
        )

    def uses_of(self, wide: fx.Node, copy: fx.Node, uses: int) -> list[fx.Node]:
        """`uses` uses of a low `copy`, whose gradients are summed in fp32 for `wide`.

        Args:
            wide: the fp32 value that `copy` is a cast of, or a cast of `copy` to fp32.
        """
        args = (wide, copy, uses)
        shared = self.insert(low_uses, args, {}, f"{copy.name}_uses", copy)
        shared.meta["val"] = (copy.meta["val"],) * uses
        item = operator.getitem
        name = f"{copy.name}_use"
        return [self.insert(item, (shared, i), {}, name, copy) for i in range(uses)]

    def clone(self, value: fx.Node) -> fx.Node:
        """A copy of `value` with the memory layout of `value`."""
        clone = torch.ops.aten.clone.default
        new = self.insert(clone, (value,), {}, f"{value.name}_copy", value)
        with self._fake_mode:
            new.meta["val"] = value.meta["val"].clone()
        return new

    def fake(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A fake tensor like `like` in `dtype`, made once per layout and device."""
        sizes = (*like.shape, *like.stride())
        # Symbolic sizes do not go into the key: comparing them would add guards.
        static = all(type(size) is int for size in sizes)
        key = (sizes, dtype, like.device) if static else None
        if key in self._fakes:
            return self._fakes[key]
        with self._fake_mode:
            made = like.to(dtype)
        if key is not None:
            self._fakes[key] = made
        return made

    def _free_name(self, wanted: str) -> str:
        """A name for a new node that no original and no inserted node has.

        The name must be unique because facts and `verify` find a node by its name.
        """
        name, count = wanted, self._names_tried[wanted]
        while name in self.old or name in self._inserted:
            count += 1
            name = f"{wanted}_{count}"
        self._names_tried[wanted] = count
        self._inserted.add(name)
        return name


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """The dtype of a node's value; None where it is no tensor."""
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def is_inserted(node: fx.Node) -> bool:
    """Whether `node` is a cast, one use of a cast, or loss scaling."""
    if node.target is operator.getitem:
        return is_inserted(node.all_input_nodes[0])
    return CAST_KIND in node.meta or node.target in _INSERTED


def is_use(node: fx.Node) -> bool:
    """Whether `node` is a use of a low copy, a call of several or one of these."""
    if node.target is operator.getitem:
        return node.all_input_nodes[0].target in TOGETHER
    return node.target in USES or node.target in TOGETHER


def parts_for(group: fx.Node, value: fx.Node) -> list[fx.Node]:
    """The uses among the results of `low_weights` that are of one weight, or copy."""
    given = group.args[TOGETHER[group.target] :]
    count = len(group.meta["val"])
    places = {at % count for at, each in enumerate(given) if each is value}
    return [user for user in group.users if user.args[1] in places]


def stands_for(node: fx.Node) -> fx.Node:
    """The node of the model whose value `node` gives: the operand of inserted nodes.

    A weight copy that a graph is called with has no operand, and stands for itself.
    """
    while is_inserted(node) and node.all_input_nodes:
        first = node.all_input_nodes[0]
        if node.target is operator.getitem and first.target in TOGETHER:
            at = TOGETHER[first.target] + node.args[1]  # type: ignore[operator]
            weight = first.args[at]  # type: ignore[index]
            assert isinstance(weight, fx.Node)
            return weight
        node = first
    return node
