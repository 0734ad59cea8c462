"""Which ATen ops the calls of a captured graph come to, without a trace of the calls.

Dynamo has computed the result of every call already, as a fake tensor; the one thing
left to find out is the op that a call comes to.  Models repeat themselves, so the calls
of the first of twelve layers show the ops of the calls of the others.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.ops import mutates
from autoamp.trace.op_cache.call_key import (
    Arguments,
    Description,
    description,
    laid_out,
)
from autoamp.trace.op_cache.op_call import (
    Call,
    OpCall,
    comes_to_one_op,
    node_of,
    op_call_of,
    recorded,
    same_op_for_all_shapes,
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
        self._descriptions = {id(value): Description(value) for value in inputs}

    @compat.without_torch_function
    def call(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> Call | None:
        """The call of a node; None where it cannot be compared with other calls."""
        if node.op != "call_method" and not _is_torchs(node):
            return None
        any_shape = same_op_for_all_shapes(node.target)
        given = Arguments(env, self._descriptions, any_shape)
        try:
            frozen = given.frozen((node.args, node.kwargs))
            key = node.target, frozen, torch.is_grad_enabled()
            hash(key)
        except TypeError:
            return None
        operands = [*given.tensors.values()]
        proxies: list[Any] = [compat.recorded_proxy(value) for value in operands]
        if any(proxy is None for proxy in proxies):
            return None
        return Call(key, operands, [compat.proxy_node(proxy) for proxy in proxies])

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
            if compat.recorded_proxy(result) is not None:
                return None
        elif call.operands[op_call.returned] is not result:
            return None
        elif op_call.target is None:
            return result
        elif not mutates(op_call.target):
            result = compat.aliased(result)
        compat.record_value(recorded(op_call, call, node), result)
        self._descriptions[id(result)] = Description(result)
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
        if len(results) != len({id(part) for part in results}):
            return None
        whole = recorded(op_call, call, node)
        for index, part in enumerate(results):
            element = compat.record_op(operator.getitem, (whole, index), {}, node)
            compat.record_value(element, part)
        self._descriptions.update((id(part), Description(part)) for part in results)
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
            if not isinstance(own, torch.Tensor) or id(own) in self._descriptions:
                continue
            if self._stands_for(own, other):
                replaced.append((own, other))
            elif compat.storage_id(own) not in memory:
                return result
        if not self._replace(replaced, memory, made):
            return result
        by_own = {id(own): other for own, other in replaced}
        found = [by_own.get(id(own), own) for own in ours]
        self._descriptions.update(
            (id(v), Description(v)) for v in found if isinstance(v, torch.Tensor)
        )
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

    def _stands_for(self, own: torch.Tensor, other: Any) -> bool:
        """Whether Dynamo's tensor `other` can be `own` in the trace."""
        return (
            self._is_dynamos(other)
            and compat.recorded_proxy(other) is None
            and compat.recorded_proxy(own) is not None
            and description(own) == description(other)
        )

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
    """Has a node with several results hold the same tensors as its elements do."""
    for result in results:
        node = node_of(result)
        while node is not None and node.target is operator.getitem:
            whole, index = cast(tuple[fx.Node, int], node.args)
            values = [*whole.meta["val"]]
            values[index] = node.meta["val"]
            whole.meta["val"] = type(whole.meta["val"])(values)
            node = whole
