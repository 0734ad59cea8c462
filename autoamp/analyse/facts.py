"""What is known about each node before anything is decided.

Facts are read off the ATen graph and its fake tensors; they hold no opinion.  A *value*
is an fp32 tensor a node produces; only values can be lowered.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.nodes import (
    module_paths,
    named_arguments,
    source_line,
    tensors_of,
    written_values,
)
from autoamp.dtypes import HIGH_DTYPE
from autoamp.graph_functions import WITH_FP32_STATE
from autoamp.op_names import op_name
from autoamp.trace.regions import Regions

FP32 = "<fp32>"
"""What stands for the maker of values that are fp32 whatever makes them."""


@dataclass(frozen=True)
class Operand:
    """One fp32 tensor operand: the node that produces it and the argument it fills."""

    value: str
    argument: str
    is_scalar: bool
    epoch: int
    """Writes to the value's storage before this read; a cast is stale after one."""


@dataclass(frozen=True)
class NodeFacts:
    """Everything known about one node.

    Attributes:
        name: the node's name in the ATen graph.
        op: `aten::linear.default`; "" for a node that is not a single torch op.
        is_value: whether it produces one fp32 tensor.
        makes_floats: whether it produces fp32 at all (a tuple counts).
        makes_others: whether it produces tensors that are not floats (indices).
        operands: its fp32 tensor operands in argument order.
        mixes_floats: whether it reads or makes floats of another dtype.
        reads_others: whether it reads tensors that are not fp32 (indices, masks).
        numel: elements of its fp32 outputs, a hint where the size is symbolic.
        read_numel: elements of its fp32 operands, likewise.
        region: number of the grad-mode and autocast region it stands in.
        autocast: None outside any `torch.autocast` of the model, else its `enabled`.
        requires_grad: whether a gradient flows through it.
        storage: the alias set of its value; -1 where it has none.
        module: module path ("encoder.layer.0.attention"), outermost first in `modules`.
        source: the user's source line, or "".
        device: device type.
        keeps_state: whether its state, and so its results, are fp32 in any precision.
    """

    name: str
    op: str
    is_value: bool
    makes_floats: bool
    makes_others: bool
    operands: tuple[Operand, ...]
    mixes_floats: bool
    reads_others: bool
    numel: int
    read_numel: int
    region: int
    autocast: bool | None
    requires_grad: bool
    storage: int
    modules: tuple[str, ...]
    source: str
    device: str
    keeps_state: bool = False

    @property
    def module(self) -> str:
        return self.modules[-1] if self.modules else ""

    @property
    def involves_floats(self) -> bool:
        return self.makes_floats or bool(self.operands)


@dataclass(frozen=True)
class Facts:
    """Facts of a whole graph, in graph order."""

    nodes: Mapping[str, NodeFacts]
    returned: frozenset[str]
    """Values the graph returns."""
    constants: frozenset[str]
    """Values that come from outside: placeholders and attributes."""
    weights: frozenset[str]
    """Those of `constants` that are parameters (or attributes) of the model."""
    parameters: frozenset[str]
    """Those of `weights` that are parameters, not buffers or constants."""
    mutated: frozenset[int]
    """Storages written to inside the graph."""
    written_opaquely: frozenset[int]
    """Those of `mutated` that a sub-graph nobody looks into may write, or an op whose
    result is not what it wrote."""
    outside: frozenset[int]
    """Storages that also exist outside the graph: of inputs and of attributes."""
    element_of: Mapping[str, str] = field(default_factory=dict)
    """`getitem` node to the node whose tuple it takes an element of."""

    def producer(self, value: str) -> str:
        """The node that decides the dtype of `value`: itself, or the tuple's maker.

        `FP32` where no node does, since the value is fp32 in any case.
        """
        maker = self.element_of.get(value, value)
        return FP32 if self.nodes[maker].keeps_state else maker


def collect_facts(gm: fx.GraphModule) -> Facts:
    """The facts of every node of ATen graph `gm`, which is not changed.

    The graph is taken to start in the caller's grad mode.
    """
    collector = _Collector(gm, torch.is_grad_enabled())
    for node in gm.graph.nodes:
        collector.visit(node)
    return collector.finish()


def _op_name(target: object) -> str:
    return op_name(target) if isinstance(target, compat.OpOverload) else ""


def _numel(tensors: list[torch.Tensor]) -> int:
    return sum(math.prod(compat.hint(s) for s in t.shape) for t in tensors)


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _storage(tensor: torch.Tensor) -> int:
    return compat.storage_id(tensor)


class _Collector:
    """Walks the graph once, in order."""

    def __init__(self, gm: fx.GraphModule, grad_mode: bool) -> None:
        self.gm = gm
        self.opaque_writes: set[int] = set()
        self.nodes: dict[str, NodeFacts] = {}
        self.returned: set[str] = set()
        self.constants: set[str] = set()
        self.weights: set[str] = set()
        self.parameters: set[str] = set()
        self.outside: set[int] = set()
        self.writes: dict[int, int] = defaultdict(int)
        self.element_of: dict[str, str] = {}
        self.grad_needed: set[str] = set()
        self.grad_mode = grad_mode
        self.autocasts = Regions(gm)
        self.region = 0

    def visit(self, node: fx.Node) -> None:
        if node.op in ("placeholder", "get_attr"):
            self._constant(node)
        elif node.op == "output":
            self.returned = {
                n.name for n in node.all_input_nodes if n.name in self.nodes
            }
        elif node.target in compat.MODE_CHANGES:
            self._change_region(node)
        if node.op != "output":
            self._record(node)
            self._note_writes(node)

    def finish(self) -> Facts:
        return Facts(
            nodes=self.nodes,
            returned=frozenset(self.returned),
            constants=frozenset(self.constants),
            weights=frozenset(self.weights),
            parameters=frozenset(self.parameters),
            mutated=frozenset(self.writes),
            written_opaquely=frozenset(self.opaque_writes),
            outside=frozenset(self.outside),
            element_of=self.element_of,
        )

    def _constant(self, node: fx.Node) -> None:
        tensors = tensors_of(node.meta.get("val"))
        self.outside.update(_storage(t) for t in tensors)
        if tensors:
            self.constants.add(node.name)
        needs_grad = bool(node.meta.get("autoamp_requires_grad"))
        if needs_grad:
            self.grad_needed.add(node.name)
        if node.meta.get("autoamp_is_parameter"):
            self.parameters.add(node.name)
        if node.op == "get_attr" or node.name in self.parameters:
            self.weights.add(node.name)

    def _change_region(self, node: fx.Node) -> None:
        self.region += 1
        if node.target is compat.SET_GRAD:
            self.grad_mode = bool(node.args[0])
        self.autocasts.follow(node)

    def _record(self, node: fx.Node) -> None:
        outputs = tensors_of(node.meta.get("val"))
        floats = [t for t in outputs if t.dtype == HIGH_DTYPE]
        operands, inputs = self._operands(node)
        read = [t for t in inputs if t.dtype == HIGH_DTYPE]
        if node.target is operator.getitem:
            self.element_of[node.name] = str(node.args[0])
        single = isinstance(node.meta.get("val"), torch.Tensor)
        device = (outputs or inputs)[0].device.type if outputs or inputs else "cpu"
        if self.grad_mode and any(
            n.name in self.grad_needed for n in node.all_input_nodes
        ):
            self.grad_needed.add(node.name)
        self.nodes[node.name] = NodeFacts(
            name=node.name,
            op=_op_name(node.target),
            is_value=single and bool(floats),
            makes_floats=bool(floats),
            makes_others=any(not _is_inexact(t) for t in outputs),
            operands=operands,
            mixes_floats=any(
                _is_inexact(t) and t.dtype != HIGH_DTYPE for t in (*outputs, *inputs)
            ),
            reads_others=len(read) < len(inputs),
            numel=_numel(floats),
            read_numel=_numel(read),
            region=self.region,
            autocast=self.autocasts.is_on,
            requires_grad=node.name in self.grad_needed,
            storage=_storage(outputs[0]) if single and outputs else -1,
            modules=module_paths(node),
            source=source_line(node),
            device=device,
            keeps_state=node.target in WITH_FP32_STATE and device == "cpu",
        )

    def _operands(
        self, node: fx.Node
    ) -> tuple[tuple[Operand, ...], list[torch.Tensor]]:
        operands: list[Operand] = []
        inputs: list[torch.Tensor] = []
        if node.op in ("placeholder", "get_attr"):
            return (), inputs
        for name, value in named_arguments(node):
            leaves: list[fx.Node] = []
            fx.node.map_arg(value, leaves.append)
            for leaf in leaves:
                tensor = leaf.meta.get("val")
                if not isinstance(tensor, torch.Tensor):
                    continue
                inputs.append(tensor)
                if tensor.dtype == HIGH_DTYPE:
                    epoch = self.writes.get(_storage(tensor), 0)
                    operands.append(Operand(leaf.name, name, tensor.dim() == 0, epoch))
        return tuple(operands), inputs

    def _note_writes(self, node: fx.Node) -> None:
        opaque = isinstance(node.target, compat.HigherOrderOperator)
        for value in written_values(node):
            for tensor in tensors_of(value.meta.get("val")):
                storage = _storage(tensor)
                self.writes[storage] += 1
                if opaque or self.nodes[node.name].storage != storage:
                    self.opaque_writes.add(storage)
