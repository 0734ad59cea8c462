"""The facts of a call that checks read from its arguments and its op's schema."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import fx

from autoamp import compat
from autoamp.passes.functions import checkpointed
from autoamp.passes.see.regions import CONTROL_FLOW

_OPS = 4096
"""The ops whose facts are kept at most; a process calls fewer, as a rule."""


class HasArguments(Protocol):
    """A node, or a call as another graph would write it."""

    @property
    def args(self) -> Any: ...

    @property
    def kwargs(self) -> Any: ...


def operands(call: HasArguments) -> list[fx.Node]:
    """The nodes among the arguments, as often as they occur."""
    found: list[fx.Node] = []
    fx.map_arg((call.args, call.kwargs), found.append)
    return found


def literals(call: HasArguments, *, places: bool = True) -> list[str]:
    """The arguments that are no nodes, as text, in their order.

    Args:
        places: whether "%" stands in the place of each node.
    """
    found: list[str] = []
    pending: list[Any] = [call.kwargs, call.args]
    while pending:
        value = pending.pop()
        if isinstance(value, (list, tuple)):
            pending += reversed(value)
        elif isinstance(value, dict):
            pending += reversed([*value, *value.values()])
        elif isinstance(value, slice):
            pending += (value.step, value.stop, value.start)
        elif not isinstance(value, fx.Node):
            found.append(repr(value))
        elif places:
            found.append("%")
    return found


def calls_bodies(node: fx.Node) -> bool:
    """Whether a call runs sub-graphs: a checkpoint, a branch, a loop."""
    return node.target is checkpointed or node.target in CONTROL_FLOW


@lru_cache(maxsize=_OPS)
def is_view(target: Any) -> bool:
    """Whether a result of `target` is a view of an operand, by the schema."""
    return isinstance(target, compat.OpOverload) and any(
        r.alias_info is not None and not r.alias_info.is_write
        for r in compat.schema(target).returns
    )


def gives_its_operand(node: fx.Node) -> bool:
    """Whether a call writes to its first operand and returns that operand."""
    is_op = isinstance(node.target, compat.OpOverload)
    return is_op and bool(node.all_input_nodes) and _gives_its_first(node.target)


@lru_cache(maxsize=_OPS)
def _gives_its_first(target: Any) -> bool:
    schema = compat.schema(target)
    first = schema.arguments[0].alias_info if schema.arguments else None
    if first is None or not first.is_write or len(schema.returns) != 1:
        return False
    returned = schema.returns[0].alias_info
    return returned is not None and returned.is_write


@lru_cache(maxsize=_OPS)
def has_effect(target: Any) -> bool:
    """Whether a call writes or draws random numbers, and so matters even if unread."""
    return isinstance(target, compat.OpOverload) and (
        compat.schema(target).is_mutable
        or torch.Tag.nondeterministic_seeded in target.tags
    )
