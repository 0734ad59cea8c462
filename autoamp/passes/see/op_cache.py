"""The ATen ops that calls come to: found at the first call, reused at calls like it."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import fx
from torch.nn import functional
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.passes.ops import (
    aliasing_arguments,
    is_inplace,
    is_view,
    lays_out_anew,
    mutates,
    overloads,
)
from autoamp.passes.see.parts import SEVERAL
from autoamp.passes.see.regions import CONTROL_FLOW

# NOTE: what a call is known again by.
#
# The layers of a model make the same calls, and a trace finds by running each of them
# which op it comes to.  A call that was met before is recorded and not run.  So its key
# has all that torch may choose an op by: the function, the mode of gradients, numbers
# with their types, and of each tensor the dtype, the device, whether it is trained, and
# which operands are one tensor; shape and strides too, unless the function is known to
# come to one op for all shapes.  The result is the tensor that Dynamo has made for the
# call.  A call that cannot be compared is run as ever: a cache that knows too little
# costs time, and one that takes two calls for one would record another program.

_ONE_OP = frozenset(
    {
        functional.batch_norm,
        functional.dropout,
        functional.group_norm,
        functional.layer_norm,
        functional.log_softmax,
        functional.relu,
        functional.silu,
        functional.softmax,
    }
)
"""Functions written in Python that call one op, the same for every shape."""


@functools.cache
def comes_to_one_op(target: Any) -> bool:
    """Whether each call of `target` comes to one op at most.

    For functions and methods that torch implements in C the argument parser chooses the
    op, by the types of the arguments alone.  Indexing is an exception: each index that
    does anything adds an op.
    """
    return target in _ONE_OP or bool(_ops_of(target))


@functools.cache
def same_op_for_all_shapes(target: Any) -> bool:
    """Whether calls of `target` come to the same op for operands of any shape.

    Views are left out, because the result of a view op may be the operand itself, a
    view of the operand or a copy.
    """
    found = _ops_of(target)
    return target in _ONE_OP or (bool(found) and not any(map(is_view, found)))


def _ops_of(target: Any) -> list[compat.OpOverload]:
    """The ops that a function or method of C may come to; empty for others."""
    if isinstance(target, compat.OpOverload):
        return [target]
    if isinstance(target, str):
        method = getattr(torch.Tensor, target, None)
        is_in_c = isinstance(method, types.MethodDescriptorType)
        return overloads(f"aten::{target}") if is_in_c else []
    if not isinstance(target, types.BuiltinFunctionType):
        return []
    name = target.__name__
    if target.__module__ == operator.add.__module__:
        name = _OPERATORS.get(name, name)
    return overloads(f"aten::{name}")


_OPERATORS = {
    **{f"i{name}": f"{name}_" for name in ("add", "sub", "mul", "pow")},
    "and_": "__and__",
    "floordiv": "floor_divide",
    "invert": "bitwise_not",
    "itruediv": "div_",
    "mod": "remainder",
    "or_": "__or__",
    "truediv": "div",
    "xor": "__xor__",
}
"""The ATen names of Python's operators where the two names differ."""


class OperandNumber(NamedTuple):
    """Stands for the operand of that number in the arguments of an `OpCall`."""

    number: int


class OpCall(NamedTuple):
    """One ATen op, and its arguments, in which operands are numbered.

    Attributes:
        target: None where the call does nothing (`x.contiguous()` of an `x` that is
            contiguous already).
        returned: the number of the operand that is also the result, because the op
            writes to the operand or the call returns the operand unchanged
            (`x.float()` of an fp32 tensor); else None.
        parts: the structure of the results of an op with several; else None.
    """

    target: compat.OpOverload | None
    args: Any
    kwargs: Any
    returned: int | None
    parts: pytree.TreeSpec | None = None


class Call(NamedTuple):
    """A call about to be made.

    Attributes:
        key: equal for calls that come to the same op.
        operands: the tensors that the call reads, each once, in order.
        nodes: the nodes of the operands in the trace, before the call is made.
    """

    key: Hashable
    operands: Sequence[torch.Tensor]
    nodes: Sequence[fx.Node]


def recorded(op_call: OpCall, call: Call, like: fx.Node) -> fx.Node:
    """Records a call as the op it comes to, in the running trace; gives its node."""
    args, kwargs = _mapped(
        (op_call.args, op_call.kwargs),
        lambda v: call.nodes[v.number] if isinstance(v, OperandNumber) else v,
    )
    return compat.record_op(op_call.target, args, kwargs, like)


def op_call_of(call: Call, heard: compat.Heard, result: Any) -> OpCall | None:
    """The op that a call came to, as `heard`; None if the call is not simple.

    In a simple call the op reads operands of the call and nothing else, and writes to
    one of them at most, which is then the result.

    Args:
        result: Dynamo's result of the call.
    """
    target, args, kwargs = heard
    if target in SEVERAL:
        return None
    same = [i for i, operand in enumerate(call.operands) if operand is result]
    parts = None
    if isinstance(result, list | tuple):
        are_tensors = bool(result) and all(torch.is_tensor(r) for r in result)
        if target is None or not are_tensors or mutates(target):
            return None
        # An op with one result that is a list returns it as a list.
        several = len(compat.schema(target).returns) > 1
        parts = pytree.tree_structure((tuple if several else list)(result))
    elif target is not None and is_inplace(target):
        if not same:
            return None
    elif (
        target is not None
        and mutates(target)
        and (
            same or aliasing_arguments(target)  # it may give an operand
        )
    ):
        return None
    numbers = {id(each): OperandNumber(i) for i, each in enumerate(call.operands)}
    try:
        args, kwargs = _mapped(
            (args, kwargs),
            lambda v: numbers[id(v)] if isinstance(v, torch.Tensor) else v,
        )
    except KeyError:  # a tensor that is no operand of the call
        return None
    return OpCall(target, args, kwargs, same[0] if same else None, parts)


def node_of(result: Any) -> fx.Node | None:
    """The node of the trace that a tensor stands for; None for anything else."""
    proxy = compat.recorded_proxy(result) if isinstance(result, torch.Tensor) else None
    return None if proxy is None else compat.proxy_node(proxy)


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """`value` with each leaf replaced by `function` of the leaf."""
    if isinstance(value, OperandNumber):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(v, function) for v in value)
    if isinstance(value, dict):
        return {k: _mapped(v, function) for k, v in value.items()}
    return function(value)


@compat.without_torch_function
def description(value: torch.Tensor) -> Hashable:
    """Every property of a tensor by which torch may choose the op of a call."""
    return kind(value), laid_out(value)


@compat.without_torch_function
def laid_out(value: torch.Tensor) -> Hashable:
    """How a tensor's elements lie in memory, and their dtype."""
    return value.shape, value.stride(), value.storage_offset(), value.dtype


@compat.without_torch_function
def kind(value: torch.Tensor) -> Hashable:
    """All that torch may choose the op of a call by, without shape and strides."""
    return (
        isinstance(value, torch.nn.Parameter),
        value.dim(),
        value.dtype,
        value.device,
        value.requires_grad,
    )


class OpCache:
    """The calls of one graph, met in order while a trace is running.

    The value of a node in the trace is the very tensor that Dynamo has made for the
    node, so that views share memory as they do in the model, traced or not.
    """

    def __init__(self, mode: compat.FakeTensorMode, inputs: Sequence[Any]) -> None:
        """Takes Dynamo's fake tensors for the graph's `inputs`, and Dynamo's `mode`."""
        self.mode = mode
        self.inputs = tuple(inputs)
        self._known: dict[Hashable, OpCall | None] = {}
        self._dynamos: dict[int, torch.Tensor] = {id(value): value for value in inputs}
        self._described: dict[tuple[int, bool], Hashable] = {}

    @compat.without_torch_function
    def call(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> Call | None:
        """The call of a node; None where it cannot be compared with other calls."""
        if node.op != "call_method" and not _is_torchs(node):
            return None
        any_shape = same_op_for_all_shapes(node.target)
        operands: list[torch.Tensor] = []
        try:
            frozen = self._frozen((node.args, node.kwargs), env, operands, any_shape)
            key = node.target, frozen, torch.is_grad_enabled()
            hash(key)
        except TypeError:
            return None
        proxies: list[Any] = [compat.recorded_proxy(value) for value in operands]
        if any(proxy is None for proxy in proxies):
            return None
        return Call(key, operands, [compat.proxy_node(proxy) for proxy in proxies])

    def _frozen(
        self,
        value: Any,
        env: Mapping[fx.Node, Any],
        operands: list[torch.Tensor],
        any_shape: bool,
    ) -> Hashable:
        """A value of a call's arguments as something that can be compared.

        Args:
            operands: the tensors met so far, each once; those in `value` are added.
            any_shape: whether shapes and strides make no difference to the call.

        Raises:
            TypeError: no two such values can be compared.
        """
        if isinstance(value, fx.Node):
            value = env[value]
        if isinstance(value, torch.Tensor):
            return self._frozen_tensor(value, operands, any_shape)
        if isinstance(value, slice):
            # Slices have no hash before Python 3.12.
            parts: Any = value.start, value.stop, value.step
        elif isinstance(value, dict):
            parts = (*value, *value.values())
        else:
            parts = value
        if isinstance(parts, list | tuple):
            each = [self._frozen(v, env, operands, any_shape) for v in parts]
            return type(value), tuple(each)
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            # A comparison of symbolic sizes would put a guard on them.
            raise TypeError
        # 0.0 and -0.0 compare equal, but they are different numbers.
        kept: Hashable = repr(value) if isinstance(value, float | complex) else value
        # 1, 1.0 and True are equal too, and may come to different ops.
        return type(value), kept

    def _frozen_tensor(
        self, value: torch.Tensor, operands: list[torch.Tensor], any_shape: bool
    ) -> Hashable:
        if id(value) not in self._dynamos:
            raise TypeError
        at = next((i for i, each in enumerate(operands) if each is value), None)
        if at is None:
            at = len(operands)
            operands.append(value)
        described = self._described.get((id(value), any_shape))
        if described is None:
            described = kind(value) if any_shape else description(value)
            self._described[id(value), any_shape] = described
        return OperandNumber(at), described

    @compat.without_torch_function
    def repeated(self, call: Call, node: fx.Node) -> Any:
        """The result of a call like an earlier one; None if the call must be traced."""
        op_call = self._known.get(call.key)
        if op_call is None:
            return None
        result: Any = node.meta.get("example_value")
        if op_call.parts is not None:
            return self._repeated_parts(op_call, op_call.parts, call, node)
        if not self._is_dynamos(result):
            return None
        if op_call.returned is None:
            # The tensor stands for an earlier node of the trace already.
            if compat.recorded_proxy(result) is not None:
                return None
        elif call.operands[op_call.returned] is not result:
            return None
        elif op_call.target is None:
            return result
        elif not mutates(op_call.target):
            result = compat.aliased(result)
        compat.record_value(recorded(op_call, call, node), result)
        self._dynamos[id(result)] = result
        return result

    def _repeated_parts(
        self, op_call: OpCall, parts: pytree.TreeSpec, call: Call, node: fx.Node
    ) -> Any:
        """The same as `repeated`, for an op that has several results."""
        results = node.meta.get("example_value")
        if not isinstance(results, list | tuple) or not all(
            self._is_dynamos(part) and compat.recorded_proxy(part) is None
            for part in results
        ):
            return None
        # One tensor can stand for one node only.
        if len(results) != len({id(part) for part in results}):
            return None
        whole = recorded(op_call, call, node)
        for index, part in enumerate(results):
            element = compat.record_op(operator.getitem, (whole, index), {}, node)
            compat.record_value(element, part)
        self._dynamos.update((id(part), part) for part in results)
        values = [
            compat.proxy_node(compat.recorded_proxy(p)).meta["val"] for p in results
        ]
        whole.meta["val"] = pytree.tree_unflatten(values, parts)
        return results

    @compat.without_torch_function
    def learn(self, call: Call, node: fx.Node, make: Callable[[], Any]) -> None:
        """Finds the op that a call comes to, where no call like it was met before.

        Args:
            make: makes the call, for which no op runs and which no trace records.
        """
        if call.key in self._known:
            return
        example = node.meta.get("example_value")
        heard = op_call = None
        if all(map(self._is_dynamos, _listed(example))):
            heard = compat.op_heard(make, example)
        if heard is not None and self._gives(node, heard, example):
            op_call = op_call_of(call, heard, example)
        # None as well: a call that is not simple is not tried again.
        self._known[call.key] = op_call

    def _gives(self, node: fx.Node, heard: compat.Heard, example: Any) -> bool:
        """Whether the result of an op is like Dynamo's result of the call.

        `learn` answers the first op of a call with the result of the whole call.  A
        call that comes to several ops may then find nothing left for the other ops.
        """
        if heard.target is None or comes_to_one_op(node.target):
            return True
        if mutates(heard.target):
            return False
        with compat.outside_trace(), self.mode:
            found = heard.target(*heard.args, **heard.kwargs)
        both = zip(_listed(found), _listed(example), strict=False)
        return len(_listed(found)) == len(_listed(example)) and all(
            isinstance(own, torch.Tensor) and laid_out(own) == laid_out(other)
            for own, other in both
        )

    def dynamos_result(
        self, call: Call, node: fx.Node, made: Sequence[fx.Node], result: Any
    ) -> Any:
        """Gives Dynamo's result of a call that was traced, if it fits, else `result`.

        Args:
            made: the nodes that the call was traced to.
            result: the result of the call in the trace.
        """
        ours, spec = pytree.tree_flatten(result)
        theirs, like = pytree.tree_flatten(node.meta.get("example_value"))
        if spec != like:
            return result
        memory = {compat.storage_id(operand) for operand in call.operands}
        replaced: list[tuple[torch.Tensor, torch.Tensor]] = []
        for own, other in zip(ours, theirs, strict=True):
            if not isinstance(own, torch.Tensor) or id(own) in self._dynamos:
                continue
            if (
                self._is_dynamos(other)
                and compat.recorded_proxy(other) is None
                and compat.recorded_proxy(own) is not None
                and description(own) == description(other)
            ):
                replaced.append((own, other))
            # All results become tensors of Dynamo's or none does: views among them
            # would no longer share memory.
            elif compat.storage_id(own) not in memory:
                return result
        if not self._replace(replaced, memory, made):
            return result
        by_own = {id(own): other for own, other in replaced}
        found = [by_own.get(id(own), own) for own in ours]
        self._dynamos.update((id(v), v) for v in found if isinstance(v, torch.Tensor))
        _share_parts(found)
        return pytree.tree_unflatten(found, spec)

    def _replace(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        memory: set[int],
        made: Sequence[fx.Node],
    ) -> bool:
        """Has Dynamo's tensors stand for ours in the trace; false where that fails.

        Other values of `made` that share memory with our tensors are replaced by ones
        that share memory with Dynamo's.

        Args:
            memory: the storages of the operands, which are Dynamo's already.
        """
        theirs = {compat.storage_id(own): other for own, other in pairs}
        results = {compat.proxy_node(compat.recorded_proxy(own)) for own, _ in pairs}
        moved: list[tuple[fx.Node, torch.Tensor]] = []
        for each in made:
            value = each.meta.get("val")
            if each in results or not isinstance(value, torch.Tensor):
                continue
            other = theirs.get(compat.storage_id(value))
            if other is None or compat.storage_id(value) in memory:
                continue
            if other.dtype != value.dtype:
                return False
            moved.append((each, compat.restrided(other, value)))
        for own, other in pairs:
            compat.record_as(own, other)
        for each, value in moved:
            each.meta["val"] = value
        return True

    def _is_dynamos(self, value: Any) -> bool:
        return compat.is_plain_fake(value) and value.fake_mode is self.mode


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def _is_torchs(node: fx.Node) -> bool:
    """Whether a node calls a function of torch or Python: others may keep a state."""
    target: Any = node.target
    if node.op != "call_function":
        return False
    if isinstance(target, types.FunctionType):
        # `__module__` would not tell, because `functools.wraps` copies it.
        home = str(target.__globals__.get("__name__"))
        return home.partition(".")[0] == "torch"
    return isinstance(target, types.BuiltinFunctionType | compat.OpOverload)


def _share_parts(results: Sequence[Any]) -> None:
    """Puts the tensors of the elements into the `val` of the node that makes them."""
    for result in results:
        node = node_of(result)
        while node is not None and node.target is operator.getitem:
            whole, index = cast(tuple[fx.Node, int], node.args)
            values = [*whole.meta["val"]]
            values[index] = node.meta["val"]
            whole.meta["val"] = type(whole.meta["val"])(values)
            node = whole


_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def op_cache_for(gm: fx.GraphModule, given: Sequence[Any]) -> OpCache | None:
    """The cache for a graph that Dynamo captured with inputs like `given`, or None.

    The result is None for a graph with symbolic sizes, branches or loops.  The same
    holds for a graph that gives a tensor another shape or other memory, because
    Dynamo's tensors are as they are at the end of the graph.
    """
    nodes = gm.graph.nodes
    inputs = [n.meta.get("example_value") for n in nodes if n.op == "placeholder"]
    if not inputs or not all(compat.is_plain_fake(v) for v in inputs):
        return None
    modes = {id(v.fake_mode) for v in inputs}
    # A trace would take two inputs with one tensor for one input.
    shared = len({id(v) for v in inputs}) < len(inputs)
    if len(modes) > 1 or shared or any(map(_is_beyond_us, nodes)):
        return None
    for value, other in zip(inputs, given, strict=True):
        # Sparse tensors have no strides to compare.
        if not isinstance(other, torch.Tensor) or other.layout != torch.strided:
            return None
        if description(other) != description(value):
            return None
    return OpCache(inputs[0].fake_mode, inputs)


def _is_beyond_us(node: fx.Node) -> bool:
    values = pytree.tree_leaves(node.meta.get("example_value"))
    sizes = [s for v in values for s in (v.shape if torch.is_tensor(v) else (v,))]
    if node.target in CONTROL_FLOW or any(isinstance(s, _SYMBOLIC) for s in sizes):
        return True
    name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
    # The call may change the shape, the strides or the memory of its operand.
    return name.endswith("_") and lays_out_anew(name)
