"""Runs a graph on stand-in tensors: no data, true dtypes, sizes and aliasing.

What `verify` and the recount know of a rewritten graph comes from here, not from the
metadata the rewrite wrote.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.errors import VerificationError
from autoamp.graph_functions import checkpointed

Memo = dict[Any, Any]
"""What ops give for operands of given dtypes and sizes; models repeat their layers."""


class StandIns:
    """The graph run on stand-in tensors: static shapes, no data, true dtypes."""

    def __init__(
        self, gm: fx.GraphModule, memo: Memo, given: tuple[Any, ...] | None = None
    ) -> None:
        """Runs `gm` on stand-ins for its inputs, or on those that are given."""
        self.gm = gm
        self.memo = memo
        self.given = None if given is None else iter(given)
        self.values: dict[str, Any] = {}
        self.nodes = {n.name: n for n in gm.graph.nodes}
        with torch.no_grad():
            for node in gm.graph.nodes:
                self.values[node.name] = self._value(node)

    def _value(self, node: fx.Node) -> Any:
        if node.op == "output":
            return fx.map_arg(node.args[0], lambda n: self.values[n.name])
        if node.op == "placeholder" and self.given is not None:
            return next(self.given)
        if node.op == "placeholder":
            return _stand_in(node.meta.get("val"))
        if node.op == "get_attr":
            found = operator.attrgetter(str(node.target))(self.gm)
            if isinstance(found, torch.Tensor):
                return _stand_in(node.meta.get("val", found))
            return found
        if node.target in compat.MODE_CHANGES:
            return None
        if isinstance(node.target, compat.HigherOrderOperator):
            return _stand_in(node.meta.get("val"))
        args: Any = fx.map_arg(node.args, lambda n: self.values[n.name])
        kwargs: Any = fx.map_arg(node.kwargs, lambda n: self.values[n.name])
        if node.target is checkpointed:
            body = self.values[str(node.args[0])]
            return StandIns(body, self.memo, args[1:]).values["output"]
        try:
            return self._call(node.target, args, kwargs)
        except Exception as error:
            if _depends_on_data(error):
                return _stand_in(node.meta.get("val"))
            raise VerificationError(
                f"{where(node)} fails on its operands: {type(error).__name__}: {error}"
            ) from error

    def _call(self, target: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(target, compat.OpOverload):
            return target(*args, **kwargs)
        args = tuple(_META if isinstance(a, torch.device) else a for a in args)
        if _takes_device(target):
            kwargs = {**kwargs, "device": _META}
        if _shares_memory(target):
            return target(*args, **kwargs)  # what shares storage must go on to share it
        key = (target, _signature(args), _signature(kwargs))
        if key not in self.memo:
            self.memo[key] = target(*args, **kwargs)
        return _stand_in(self.memo[key])


# Asked at every node; torch makes a schema's arguments anew each time.
@functools.cache
def _takes_device(target: compat.OpOverload) -> bool:
    return any(a.name == "device" and a.kwarg_only for a in target._schema.arguments)


@functools.cache
def _shares_memory(target: compat.OpOverload) -> bool:
    return any(a.alias_info is not None for a in target._schema.arguments)


def _signature(value: Any) -> Any:
    """Everything about an operand that decides what an op gives for it."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.shape, value.stride())
    if isinstance(value, (list, tuple)):
        return tuple(_signature(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _signature(v)) for k, v in value.items())
    return (type(value), value)


_META = torch.device("meta")


def _depends_on_data(error: Exception) -> bool:
    """Whether a stand-in cannot answer: the result depends on values, or no kernel.

    The recorded result then stands in.  That operands agree is checked apart from this.
    """
    return isinstance(error, NotImplementedError) or "meta" in str(error).lower()


def _stand_in(value: Any) -> Any:
    """A tensor (or number, or nest of them) like `value` with hints for its sizes."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return torch.empty(
                [compat.hint(s) for s in value.shape],
                dtype=value.dtype,
                device=_META,
            )
        return torch.empty_strided(
            [compat.hint(s) for s in value.shape],
            [compat.hint(s) for s in value.stride()],
            dtype=value.dtype,
            device=_META,
        )
    if isinstance(value, (list, tuple)):
        return type(value)(_stand_in(v) for v in value)
    if isinstance(value, torch.SymInt):
        return compat.hint(value)
    return value


def dtypes_of(value: Any) -> list[torch.dtype]:
    if isinstance(value, torch.Tensor):
        return [value.dtype]
    if isinstance(value, (list, tuple)):
        return [d for v in value for d in dtypes_of(v)]
    return []


def where(node: fx.Node) -> str:
    trace = (node.stack_trace or "").strip().splitlines()
    line = f", at {trace[-1].strip()}" if trace else ""
    return f"{node.name} ({node.target}{line})"
