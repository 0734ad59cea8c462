"""Facts about each node, collected before anything is decided.

Facts are read off the ATen graph and its fake tensors, and hold no opinion.  A *value*
is an fp32 tensor that a node produces; only values can be lowered.
"""

from __future__ import annotations

import math
import operator
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE
from autoamp.passes.functions import BOTH_WAYS, STATE, WITH_FP32_STATE
from autoamp.passes.ops import base_name, is_inplace, is_pointwise, op_name
from autoamp.passes.rules import family
from autoamp.passes.see.dtensors_as_whole import HELD
from autoamp.passes.see.low_outside import LOW_OUTSIDE
from autoamp.passes.see.nodes import (
    KERNEL,
    ForChain,
    argument,
    module_paths,
    named_arguments,
    source_line,
    tensors_of,
    written_values,
)
from autoamp.passes.see.regions import LOWERED_BODY, Regions

FP32 = "<fp32>"
"""Stands for the producer of every value that is fp32 in either precision."""


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
    def passes_gradient(self) -> bool:
        """Whether the node passes a gradient on to its operands."""
        makes_numbers = self.makes_floats or not self.makes_others
        return self.requires_grad and makes_numbers and self.base != "aten::detach"

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
class Kept:
    """What autograd keeps of one call.

    Attributes:
        operands: the fp32 values among the operands that are kept.
        result: whether the result is kept, of a call with one.
        inside: fp32 numbers that are kept and are neither: a mask that dropout drew.
    """

    operands: frozenset[str] = frozenset()
    result: bool = False
    inside: int = 0


@dataclass(frozen=True)
class Facts:
    """Facts of a whole graph, in graph order.

    Attributes:
        nodes: the facts of each node.
        returned: values that the graph returns.
        hooked: values that a hook is registered on inside the graph.
        constants: values that come from outside: placeholders and attributes.
        weights: the `constants` that are parameters (or attributes) of the model.
        parameters: the `weights` that are parameters, not buffers or constants.
        mutated: storages that are written to inside the graph.
        written_opaquely: the `mutated` storages that an opaque sub-graph may write to,
            or that an op writes to and does not return.
        outside: storages of inputs and attributes, which exist outside the graph too.
        low_outside: values at the edges of bodies that are low under autocast.
        is_body: whether the graph is that of a branch, a loop or a checkpoint.
        own_kernels: whether norms are those of `passes/functions/norms.py`.
        element_of: each `getitem` node to the node that makes the tuple.
        kept: what autograd keeps of each call; calls of which it keeps nothing are
            left out.
    """

    nodes: Mapping[str, NodeFacts]
    returned: frozenset[str]
    hooked: frozenset[str]
    constants: frozenset[str]
    weights: frozenset[str]
    parameters: frozenset[str]
    mutated: frozenset[int]
    written_opaquely: frozenset[int]
    outside: frozenset[int]
    low_outside: frozenset[str] = frozenset()
    is_body: bool = False
    own_kernels: bool = False
    element_of: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, Kept] = field(default_factory=dict)

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
    walk = _Walk(gm, device, low)
    for node in gm.graph.nodes:
        walk.visit(node)
    return Facts(
        nodes=walk.nodes,
        returned=frozenset(walk.returned),
        hooked=frozenset(walk.hooked),
        constants=frozenset(walk.constants),
        weights=frozenset(walk.weights),
        parameters=frozenset(walk.parameters),
        mutated=frozenset(walk.writes),
        written_opaquely=frozenset(walk.opaque_writes),
        outside=frozenset(walk.outside),
        low_outside=frozenset(n.name for n in gm.graph.nodes if LOW_OUTSIDE in n.meta),
        is_body=LOWERED_BODY in gm.meta,
        element_of=walk.element_of,
    )


def _numel(*tensors: torch.Tensor) -> int:
    # The hint and not `int(s)`, which would guard on the symbolic size: each new shape
    # would then be captured anew.
    return sum(math.prod(compat.hint(s) for s in t.shape) for t in tensors)


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class _Walk:
    """One walk through a graph, in order, and the facts collected so far."""

    def __init__(
        self, gm: fx.GraphModule, device: str | None, low: torch.dtype
    ) -> None:
        self.typed_as = typed_as(gm)
        self.device = device
        self.low = low
        self.opaque_writes: set[int] = set()
        self.nodes: dict[str, NodeFacts] = {}
        self.returned: set[str] = set()
        self.hooked: set[str] = set()
        self.constants: set[str] = set()
        self.weights: set[str] = set()
        self.parameters: set[str] = set()
        self.outside: set[int] = set()
        self.writes: dict[int, int] = defaultdict(int)
        self.element_of: dict[str, str] = {}
        self.grad_needed: set[str] = set()
        self.grad_mode = torch.is_grad_enabled()
        self.autocasts = Regions(gm)
        self.region = 0

    def visit(self, node: fx.Node) -> None:
        if node.op in ("placeholder", "get_attr"):
            self._constant(node)
        elif node.op == "output":
            self.returned = {
                n.name for n in node.all_input_nodes if n.name in self.nodes
            }
        elif node.target is compat.REGISTER_HOOK:
            self.hooked.add(node.all_input_nodes[0].name)
        elif node.target in compat.MODE_CHANGES:
            # Casts are not shared between regions: one made under `no_grad` has no
            # gradient, so that a use of it outside would lose its own.
            self.region += 1
            if node.target is compat.SET_GRAD:
                self.grad_mode = bool(node.args[0])
            self.autocasts.follow(node)
        # In this order: a call reads its operands as they were before its own writes.
        if node.op != "output":
            self._record(node)
            self._note_writes(node)

    def _constant(self, node: fx.Node) -> None:
        tensors = tensors_of(node.meta.get("val"))
        self.outside.update(compat.storage_id(t) for t in tensors)
        if tensors:
            self.constants.add(node.name)
        if node.meta.get("autoamp_requires_grad"):
            self.grad_needed.add(node.name)
        if node.meta.get("autoamp_is_parameter"):
            self.parameters.add(node.name)
        # Dynamo makes parameters inputs of the graph; in any other `GraphModule` they
        # are attributes.
        if node.op == "get_attr" or node.name in self.parameters:
            self.weights.add(node.name)

    def _record(self, node: fx.Node) -> None:
        of_torch = isinstance(node.target, compat.OpOverload)
        outputs = tensors_of(node.meta.get("val"))
        floats = [t for t in outputs if t.dtype == HIGH_DTYPE]
        strange = [t for t in outputs if t.dtype != HIGH_DTYPE]
        operands, inputs, read = self._operands(node)
        held = node.meta.get(HELD, 1.0)
        if node.target is operator.getitem:
            # The call that makes a tuple chooses the dtypes of its elements.
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
            op=op_name(node.target) if of_torch else "",
            is_value=single and bool(floats),
            makes_floats=bool(floats),
            makes_others=any(not _is_inexact(t) for t in strange),
            operands=operands,
            mixes_floats=any(
                t.dtype != HIGH_DTYPE and _is_inexact(t) for t in (*strange, *inputs)
            ),
            numel=round(_numel(*floats) * held),
            read_numel=read,
            region=self.region,
            autocast=self.autocasts.is_on(traced, device),
            requires_grad=node.name in self.grad_needed,
            storage=compat.storage_id(outputs[0]) if single and outputs else -1,
            modules=module_paths(node),
            source=source_line(node),
            device=device,
            # CUDA's kernels take all operands in one dtype, under autocast too.
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
            # `all_input_nodes` would give a repeated operand once; each use has a mode
            # of its own.
            leaves: list[fx.Node] = []
            fx.node.map_arg(value, leaves.append)
            for leaf in leaves:
                tensor = leaf.meta.get("val")
                if not isinstance(tensor, torch.Tensor):
                    continue
                inputs.append(tensor)
                if tensor.dtype == HIGH_DTYPE:
                    epoch = self.writes.get(compat.storage_id(tensor), 0)
                    operands.append(Operand(leaf.name, name, tensor.dim() == 0, epoch))
                    read += round(_numel(tensor) * leaf.meta.get(HELD, 1.0))
        return tuple(operands), inputs, read

    def _note_writes(self, node: fx.Node) -> None:
        opaque = isinstance(node.target, compat.HigherOrderOperator)
        for value in written_values(node):
            for tensor in tensors_of(value.meta.get("val")):
                storage = compat.storage_id(tensor)
                self.writes[storage] += 1
                # The result of an in-place call has the storage that is written to, and
                # so ties both to one dtype. No result shows these writes.
                if opaque or self.nodes[node.name].storage != storage:
                    self.opaque_writes.add(storage)


_TYPED = re.compile(r"\bdtype\s*=\s*([A-Za-z_]\w*)\.dtype\b")


def typed_as(gm: fx.GraphModule) -> Mapping[str, str]:
    """Each new tensor made in the dtype of a value, by name, to the value's name."""
    found: dict[str, str] = {}
    # At capture `x.dtype` is fp32, and the graph holds that constant and no `x`: the
    # line of source is all that tells which value was meant.
    order = {node: at for at, node in enumerate(gm.graph.nodes)}
    for node in gm.graph.nodes:
        name = _named_in_dtype(node)
        if not name:
            continue
        values = {_other_operand(node, reader, name) for reader in _readers(node)}
        value = values.pop() if len(values) == 1 else None
        # The line has read the dtype of a value that was there already.
        if value is not None and order[value] < order[node]:
            found[node.name] = value.name
    return found


def _named_in_dtype(node: fx.Node) -> str:
    """The NAME of `dtype=NAME.dtype` in the line of a new fp32 tensor, or ""."""
    if not isinstance(node.target, compat.OpOverload) or node.all_input_nodes:
        return ""
    if base_name(node.target) not in family("factory"):
        return ""
    if not _is_high(node) or node.kwargs.get("dtype") is not HIGH_DTYPE:
        return ""
    names = set(_TYPED.findall(source_line(node)))
    return names.pop() if len(names) == 1 else ""


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """The calls that read a new tensor, after all that writes to it in place."""
    for user in node.users:
        target = user.target
        # `torch.empty(...).bernoulli_(p)`: the model goes on with the result of the
        # draw.
        in_place = isinstance(target, compat.OpOverload) and is_inplace(target)
        if in_place and user.args[0] is node and user.all_input_nodes == [node]:
            yield from _readers(user)
        else:
            yield user


def _other_operand(made: fx.Node, reader: fx.Node, name: str) -> fx.Node | None:
    """The other value that a pointwise call reads, in a line of the same function."""
    target = reader.target
    if not isinstance(target, compat.OpOverload) or not is_pointwise(target):
        return None
    code = source_line(reader)
    if _function(reader) != _function(made) or not re.search(rf"\b{name}\b", code):
        return None
    storage = compat.storage_id(made.meta["val"])
    others = [
        n
        for n in reader.all_input_nodes
        if _is_high(n) and compat.storage_id(n.meta["val"]) != storage
    ]
    return others[0] if len(others) == 1 else None


def _function(node: fx.Node) -> str:
    """The file and the function of the innermost frame: `File "m.py" in forward`."""
    frames = [
        line.strip()
        for line in (node.stack_trace or "").splitlines()
        if line.strip().startswith("File ")
    ]
    # Without the number, since two lines of one function are compared.
    return re.sub(r", line \d+,", "", frames[-1]) if frames else ""


def _is_high(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == HIGH_DTYPE


def keeps_state(node: fx.Node, low: torch.dtype) -> bool:
    """Whether a call on a CPU is a recurrent one that runs with its state in fp32.

    Two calls in one direction are exceptions: an RNN, whose state is the result of a
    low product, and an LSTM for which torch calls one kernel of oneDNN per layer, which
    is there for bf16 and without projections.
    """
    if node.target not in WITH_FP32_STATE:
        return False
    if argument(node, BOTH_WAYS):
        return True
    if node.target is torch.ops.aten.lstm.input:
        return _is_projected(node) or not _onednn_runs(low)
    kind = op_name(node.target)
    return not kind.startswith("aten::rnn") or bool(read_wide(node, low))


def read_wide(node: fx.Node, low: torch.dtype) -> set[str]:
    """The values that a recurrent call with a wide state casts at each read.

    With an fp32 input torch chooses oneDNN for an LSTM without projections, which ends
    in an error where oneDNN has no such kernel for `low`, under autocast as well.
    """
    found: set[Any] = set()
    ends = node.target is torch.ops.aten.lstm.input and not _onednn_runs(low)
    if argument(node, BOTH_WAYS) and (_is_projected(node) or not ends):
        found.add(node.args[0])
    projected = _is_projected(node)
    params = argument(node, "params", ())
    # Of each layer and direction: w_ih, w_hh, b_ih, b_hh and the projection's weight.
    group = (4 if argument(node, "has_biases") else 2) + projected
    for at, weight in enumerate(params):
        # w_hh and b_hh are read at each step, w_ih and b_ih once for all steps.
        # Autocast keeps the casts of leaves, and so casts a computed weight at each
        # step.
        of_projection = projected and (at + 1) % group == 0
        at_each_step = at % group % 2 == 1
        if of_projection or (at_each_step and weight.op == "call_function"):
            found.add(weight)
    return {value.name for value in found}


def _onednn_runs(low: torch.dtype) -> bool:
    """Whether oneDNN has kernels of LSTMs in `low`: it has them in one dtype."""
    return low == torch.bfloat16 and compat.onednn_has_bf16()


def _is_projected(node: fx.Node) -> bool:
    """Whether the hidden state of an LSTM is smaller than its cells."""
    state: Any = argument(node, STATE)
    if isinstance(state, fx.Node) or not argument(node, "params"):
        return False
    hidden, cell = (each.meta["val"].shape[-1] for each in state)
    return bool(hidden != cell)
