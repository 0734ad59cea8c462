"""Facts about each node, collected before anything is decided.

Facts are read off the ATen graph and its fake tensors, and hold no opinion.  A *value*
is an fp32 tensor that a node produces; only values can be lowered.
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
    KERNEL,
    ForChain,
    module_paths,
    named_arguments,
    source_line,
    tensors_of,
    written_values,
)
from autoamp.analyse.recurrent import keeps_state
from autoamp.analyse.typed_as import typed_as
from autoamp.dtypes import HIGH_DTYPE
from autoamp.op_names import op_name
from autoamp.trace.meshes import HELD
from autoamp.trace.regions import Regions

FP32 = "<fp32>"
"""Stands for the maker of a value that is fp32 whatever node makes it."""


@dataclass(frozen=True)
class Operand:
    """One fp32 tensor operand: the node that produces it and the argument it fills."""

    value: str
    argument: str
    is_scalar: bool
    epoch: int
    """Writes to the value's storage before this read; each makes older casts stale."""


@dataclass(frozen=True)
class NodeFacts:
    """All the facts of one node.

    Attributes:
        name: the node's name in the ATen graph.
        op: `aten::linear.default`; "" for a node that is not a single torch op.
        is_value: whether the node produces one fp32 tensor.
        makes_floats: whether the node produces fp32 at all (a tuple counts).
        makes_others: whether the node produces tensors that are not floats (indices).
        operands: the node's fp32 tensor operands in argument order.
        mixes_floats: whether the node reads or makes floats of another dtype.
        numel: elements of the fp32 outputs, a hint where the size is symbolic; of a
            DTensor the elements that this rank holds.
        read_numel: the same of the fp32 operands.
        region: number of the grad-mode and autocast region that the node stands in.
        autocast: None outside any `torch.autocast` of the model, else its `enabled`.
        requires_grad: whether a gradient flows through the node.
        storage: the alias set of the node's value; -1 for a node without one tensor.
        module: module path ("encoder.layer.0.attention"), outermost first in `modules`.
        source: the user's source line, or "".
        device: device type.
        keeps_state: whether the node's results are fp32 in whichever precision it runs.
        chain: the calls that the node stands for, if it is not a call of the model's.
        typed_as: the value in whose dtype the model makes this new tensor, or "".
    """

    name: str
    op: str
    is_value: bool
    makes_floats: bool
    makes_others: bool
    operands: tuple[Operand, ...]
    mixes_floats: bool
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
    chain: ForChain | None = None
    typed_as: str = ""

    @property
    def widens(self) -> bool:
        """Whether the result counts as fp32 for type promotion, whatever is read."""
        return self.chain is not None and self.chain.widens

    @property
    def base(self) -> str:
        """The op without its overload: `aten::to` for `aten::to.dtype`."""
        return self.op.partition(".")[0]

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
    """The `constants` that are parameters (or attributes) of the model."""
    parameters: frozenset[str]
    """The `weights` that are parameters, not buffers or constants."""
    mutated: frozenset[int]
    """Storages written to inside the graph."""
    written_opaquely: frozenset[int]
    """The `mutated` storages that an opaque sub-graph may write to, or that an op
    writes to and does not return."""
    outside: frozenset[int]
    """Storages of inputs and attributes, which also exist outside the graph."""
    own_kernels: bool = False  # whether the graph runs with `kernels/cpu_norms/`
    element_of: Mapping[str, str] = field(default_factory=dict)
    """`getitem` node to the node that makes the tuple."""

    def producer(self, value: str) -> str:
        """The node that decides the dtype of `value`: `value`, or its tuple's maker.

        The result is `FP32` where no node decides, since `value` is fp32 in any case.
        """
        maker = self.maker(value)
        return FP32 if self.nodes[maker].keeps_state else maker

    def maker(self, value: str) -> str:
        """The node that makes `value`: `value` itself, or the maker of its tuple."""
        return self.element_of.get(value, value)


def collect_facts(
    gm: fx.GraphModule, low: torch.dtype, device: str | None = None
) -> Facts:
    """The facts of every node of ATen graph `gm`, which is not changed.

    The walk assumes that the graph starts in the caller's grad mode.

    Args:
        low: the dtype that ops may run in.
        device: type of the device that the graph is to run on; by default each node
            runs on the device it was traced on.
    """
    collector = _Collector(gm, torch.is_grad_enabled(), device, low)
    for node in gm.graph.nodes:
        collector.visit(node)
    return collector.finish()


def _op_name(target: object) -> str:
    return op_name(target) if isinstance(target, compat.OpOverload) else ""


def _numel(tensors: list[torch.Tensor]) -> int:
    return sum(math.prod(compat.hint(s) for s in t.shape) for t in tensors)


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class _Collector:
    """Walks the graph once, in order."""

    def __init__(
        self,
        gm: fx.GraphModule,
        grad_mode: bool,
        device: str | None,
        low: torch.dtype,
    ) -> None:
        self.gm = gm
        self.typed_as = typed_as(gm)
        self.device = device
        self.low = low
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
        self.outside.update(compat.storage_id(t) for t in tensors)
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
        strange = [t for t in outputs if t.dtype != HIGH_DTYPE]
        operands, inputs, read = self._operands(node)
        held = node.meta.get(HELD, 1.0)
        if node.target is operator.getitem:
            self.element_of[node.name] = str(node.args[0])
        single = isinstance(node.meta.get("val"), torch.Tensor)
        traced = (outputs or inputs)[0].device.type if outputs or inputs else "cpu"
        device = self.device or traced
        if self.grad_mode and any(
            n.name in self.grad_needed for n in node.all_input_nodes
        ):
            self.grad_needed.add(node.name)
        self.nodes[node.name] = NodeFacts(
            name=node.name,
            op=_op_name(node.target),
            is_value=single and bool(floats),
            makes_floats=bool(floats),
            makes_others=any(not _is_inexact(t) for t in strange),
            operands=operands,
            mixes_floats=any(
                t.dtype != HIGH_DTYPE and _is_inexact(t) for t in (*strange, *inputs)
            ),
            numel=round(_numel(floats) * held),
            read_numel=read,
            region=self.region,
            autocast=self.autocasts.is_on,
            requires_grad=node.name in self.grad_needed,
            storage=compat.storage_id(outputs[0]) if single and outputs else -1,
            modules=module_paths(node),
            source=source_line(node),
            device=device,
            keeps_state=device == "cpu" and keeps_state(node, self.low),
            chain=node.meta.get(KERNEL),
            typed_as=self.typed_as.get(node.name, ""),
        )

    def _operands(
        self, node: fx.Node
    ) -> tuple[tuple[Operand, ...], list[torch.Tensor], int]:
        """The fp32 operands, all tensors read, and how many fp32 numbers are read."""
        operands: list[Operand] = []
        inputs: list[torch.Tensor] = []
        read = 0
        if node.op in ("placeholder", "get_attr"):
            return (), inputs, 0
        for name, value in named_arguments(node):
            leaves: list[fx.Node] = []
            if isinstance(value, fx.Node):
                leaves.append(value)
            else:
                fx.node.map_arg(value, leaves.append)
            for leaf in leaves:
                tensor = leaf.meta.get("val")
                if not isinstance(tensor, torch.Tensor):
                    continue
                inputs.append(tensor)
                if tensor.dtype == HIGH_DTYPE:
                    epoch = self.writes.get(compat.storage_id(tensor), 0)
                    operands.append(Operand(leaf.name, name, tensor.dim() == 0, epoch))
                    read += round(_numel([tensor]) * leaf.meta.get(HELD, 1.0))
        return tuple(operands), inputs, read

    def _note_writes(self, node: fx.Node) -> None:
        opaque = isinstance(node.target, compat.HigherOrderOperator)
        for value in written_values(node):
            for tensor in tensors_of(value.meta.get("val")):
                storage = compat.storage_id(tensor)
                self.writes[storage] += 1
                if opaque or self.nodes[node.name].storage != storage:
                    self.opaque_writes.add(storage)
