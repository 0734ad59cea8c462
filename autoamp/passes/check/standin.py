"""Runs a graph on stand-in tensors: no data, true dtypes, layouts and aliasing.

A graph goes in; a stand-in for the value of every node comes out.  `verify` and the
recount judge a rewritten graph by its stand-ins, not by the metadata the rewrite wrote.
Stand-ins are meta tensors, because views of meta tensors cost little.  The layout of a
new result is found with fake tensors on the model's devices, because device and dtype
choose the kernel of an op, and each attention kernel lays out its results differently.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.errors import VerificationError
from autoamp.passes.check.flowing import flowing_in
from autoamp.passes.functions import WITH_FP32_STATE, checkpointed, op_with_its_state
from autoamp.passes.see.nodes import source_line, tensors_of
from autoamp.passes.see.regions import Regions

Memo = dict[Any, Any]
"""Results of ops by operand dtypes and sizes, kept because models repeat layers."""


class StandIns:
    """A graph run on stand-in tensors: static shapes, no data, true dtypes."""

    def __init__(
        self,
        gm: fx.GraphModule,
        memo: Memo,
        given: tuple[Any, ...] | None = None,
        original: StandIns | None = None,
    ) -> None:
        """Runs `gm` on stand-ins for its inputs, or on the inputs `given`.

        Args:
            original: the stand-in run of the graph that `gm` was made from.  Where the
                result of a node depends on data, so that no stand-in can be computed,
                the recorded result is taken, but only if the original could not be
                computed at that node either.
        """
        self.gm = gm
        self.memo = memo
        self.given = None if given is None else iter(given)
        self.original = original
        self.regions = Regions(gm)
        self.values: dict[str, Any] = {}
        self.devices: dict[str, torch.device | None] = {}
        self.nodes = {n.name: n for n in gm.graph.nodes}
        self.flowing = flowing_in(gm.graph)
        with torch.no_grad():
            for node in gm.graph.nodes:
                self.values[node.name] = self._value(node)
                self.devices[node.name] = getattr(node.meta.get("val"), "device", None)

    def _value(self, node: fx.Node) -> Any:
        if node.op == "output":
            return fx.map_arg(node.args[0], lambda n: self.values[n.name])
        if node.op == "placeholder" and self.given is not None:
            return next(self.given)
        if node.op == "placeholder":
            return compat.like(node.meta.get("val"), device=_META)
        if node.op == "get_attr":
            found = operator.attrgetter(str(node.target))(self.gm)
            if isinstance(found, torch.Tensor):
                return compat.like(node.meta.get("val", found), device=_META)
            return found
        if node.target in compat.MODE_CHANGES:
            self.regions.follow(node)
            return None
        if isinstance(node.target, compat.HigherOrderOperator):
            return compat.like(node.meta.get("val"), device=_META)
        args: Any = fx.map_arg(node.args, lambda n: self.values[n.name])
        kwargs: Any = fx.map_arg(node.kwargs, lambda n: self.values[n.name])
        if node.target is checkpointed:
            body = self.values[str(node.args[0])]
            # Run with the operands that the rewritten graph hands in, which may be low.
            with torch.set_grad_enabled(node in self.flowing):
                return StandIns(body, self.memo, args[1:]).values["output"]
        try:
            return self._call(node, args, kwargs)
        except Exception as error:
            if self.original is None or self.original.has_no_answer(node.name):
                return _with_written(node, args, kwargs, node.meta.get("val"))
            raise VerificationError(
                f"{where(node)} fails on its operands: {type(error).__name__}: {error}",
                nodes=named(node),
            ) from error

    def _call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        target: Any = node.target
        is_op = isinstance(target, compat.OpOverload)
        if not is_op and target not in WITH_FP32_STATE.values():
            return target(*args, **kwargs)
        if is_op and _shares_memory(target):  # the result must share storage too
            args = tuple(_META if isinstance(a, torch.device) else a for a in args)
            if "device" in kwargs:
                kwargs = {**kwargs, "device": _META}
            try:
                return target(*args, **kwargs)
            except NotImplementedError:
                pass  # Torch has no meta kernel; fake tensors try the device's own.
        read = node.all_input_nodes
        key = (
            target,
            _signature(args),
            _signature(kwargs),
            tuple([(self.devices[n.name], n in self.flowing) for n in read]),
            self.regions.inside,
        )
        if key not in self.memo:
            # The tracer recorded the original's results from fake tensors: take them.
            known = node.meta.get("val") if self.original is None else None
            answer = self._answer(node) if known is None else known
            # A copy of a meta tensor is made quicker than one of a fake tensor.
            self.memo[key] = compat.like(answer, device=_META)
        return _with_written(node, args, kwargs, self.memo[key])

    def has_no_answer(self, name: str) -> bool:
        """Whether no stand-in can be computed for a node; False for an unknown name."""
        node = self.nodes.get(name)
        if node is None or node.op != "call_function":
            return False
        try:
            self._answer(node)
        except (RuntimeError, TypeError, ValueError):
            return True
        return False

    def _answer(self, node: fx.Node) -> Any:
        """The result of an op, computed with fake tensors on the operands' devices."""
        target: Any = node.target
        # All results of one verification are computed in one fake mode.  Static sizes:
        # a check must add no guard to the graph that it looks at.
        if _MODE not in self.memo:
            self.memo[_MODE] = compat.new_fake_mode(symbolic=False)
        with compat.as_traced(), self.memo[_MODE], self.regions.entered():

            def on_its_device(operand: fx.Node) -> Any:
                device = getattr(operand.meta.get("val"), "device", _META)
                made = compat.like(self.values[operand.name], device=device)
                if operand in self.flowing and isinstance(made, torch.Tensor):
                    # Torch's attention takes another kernel for a mask that is learned.
                    made.requires_grad_()
                return made

            args: Any = fx.map_arg(node.args, on_its_device)
            kwargs: Any = fx.map_arg(node.kwargs, on_its_device)
            if op_with_its_state(target) in compat.PACKED.values():
                return compat.packed_result(*args)
            return target(*args, **kwargs)


_MODE = "fake mode"
_META = torch.device("meta")


# Cached because every node asks, and torch makes a schema's arguments anew each time.
@functools.cache
def _shares_memory(target: compat.OpOverload) -> bool:
    return any(a.alias_info is not None for a in compat.schema(target).arguments)


def _signature(value: Any) -> Any:
    """The properties of an operand that decide the dtype and layout of a result."""
    if isinstance(value, torch.Tensor):
        # By strides too: they choose the kernel, and with it how the result lies.
        return (value.dtype, value.shape, value.stride())
    if isinstance(value, (list, tuple)):
        return tuple(_signature(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _signature(v)) for k, v in value.items())
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return (type(value), str(value))  # `x.sum().item()` has no known value, no hash
    return (type(value), value)


def _with_written(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], known: Any
) -> Any:
    """A stand-in for a node's known result, with each written operand as itself.

    An op that writes to an operand (`out=`, or in place) returns that operand.  A new
    tensor in place of the operand would not share the operand's storage, and would have
    the recorded dtype.
    """
    made = compat.like(known, device=_META)
    if not isinstance(node.target, compat.OpOverload):
        return made
    returned = _written_and_returned(node.target)
    if not any(returned):
        return made
    order = compat.argument_names(node.target)
    given: dict[Any, Any] = {**dict(zip(order, args, strict=False)), **kwargs}
    if len(returned) == 1:
        return given[returned[0]]
    others = made if isinstance(made, (list, tuple)) else [None] * len(returned)
    pairs = zip(returned, others, strict=True)
    return tuple(given[name] if name else other for name, other in pairs)


@functools.cache
def _written_and_returned(target: compat.OpOverload) -> tuple[str | None, ...]:
    """For each result of an op, the written argument that it returns, or None."""
    written = {
        mark: a.name
        for a in compat.schema(target).arguments
        if a.alias_info is not None and a.alias_info.is_write
        for mark in a.alias_info.before_set
    }
    marks = [
        () if r.alias_info is None else r.alias_info.before_set
        for r in compat.schema(target).returns
    ]
    return tuple(
        next((written[m] for m in each if m in written), None) for each in marks
    )


def dtypes_of(value: Any) -> list[torch.dtype]:
    if isinstance(value, torch.Tensor):
        return [value.dtype]
    if isinstance(value, (list, tuple)):
        return [d for v in value for d in dtypes_of(v)]
    return []


def storages_of(nodes: Iterable[fx.Node]) -> set[int]:
    """The storages of the values recorded of `nodes`."""
    values = (t for node in nodes for t in tensors_of(node.meta.get("val")))
    return {compat.storage_id(t) for t in values}


def named(node: fx.Node) -> tuple[str, ...]:
    """The nodes that an error at `node` is about: `node` and the nodes it reads.

    The nodes read are named because the earlier passes do not know a `node` that the
    rewrite added.
    """
    return (node.name, *(n.name for n in node.all_input_nodes))


def where(node: fx.Node) -> str:
    source = source_line(node)
    line = f", at {source}" if source else ""
    return f"{node.name} ({node.target}{line})"
