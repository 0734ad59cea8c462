"""Checks that uses of weights were put together, and that nothing else changed."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from autoamp import compat
from autoamp.analyse.nodes import tensors_of, written_values
from autoamp.check.standin import where
from autoamp.errors import VerificationError
from autoamp.graph_functions import (
    low_weight,
    low_weight_unscaled,
    low_weights,
    low_weights_unscaled,
    unscale_grad,
    unscaled_weights,
)

_APART = {
    low_weights: (low_weight, 0, 2),
    low_weights_unscaled: (low_weight_unscaled, 2, 2),
    unscaled_weights: (unscale_grad, 2, 1),
}
"""For a call of several weights the call of one, the number of leading operands, and
the number of operands for each weight."""


def check_together(before: fx.GraphModule, after: fx.GraphModule) -> None:
    """Raises where `after` is more than `before` with uses of weights in groups.

    Each use must be the result of a group that the same weight and copy stand for, with
    the same further operands.  Between a group and its use nothing may write to an
    operand of the group, and no mode may change.

    Raises:
        VerificationError: names the node.
    """
    given: dict[str, tuple[Any, ...]] = {}
    rest = iter(after.graph.nodes)
    for old in before.graph.nodes:
        new = next(rest, None)
        while new is not None and new.target in _APART:
            given[new.name] = new.args
            new = next(rest, None)
        if new is None or new.name != old.name or not _is_same(old, new, given):
            raise VerificationError(f"{where(old)} changed", nodes=[old.name])
        _forget(new, given)
    if next(rest, None) is not None:
        raise VerificationError("a node is new", nodes=[])
    for name, body in before.named_children():
        if isinstance(body, fx.GraphModule) and getattr(after, name) is not body:
            raise VerificationError(f"the graph {name} changed", nodes=[name])


def _is_same(old: fx.Node, new: fx.Node, given: dict[str, tuple[Any, ...]]) -> bool:
    if new.target is operator.getitem and old.target is not operator.getitem:
        call, at = new.args
        assert isinstance(call, fx.Node)
        if call.name not in given or not isinstance(at, int):
            return False
        single, leading, each = _APART[call.target]  # type: ignore[index]
        operands = given[call.name]
        several = operands[leading:]
        count = len(several) // each
        if old.target is not single or not 0 <= at < count:
            return False
        own = (several[at + which * count] for which in range(each))
        stands_for = *own, *operands[:leading]
        return _shown((stands_for, {})) == _shown((old.args, old.kwargs))
    return (new.op, new.target) == (old.op, old.target) and _shown(
        (old.args, old.kwargs)
    ) == _shown((new.args, new.kwargs))


def _shown(arguments: Any) -> str:
    return repr(fx.map_arg(arguments, lambda node: node.name))


def _forget(node: fx.Node, given: dict[str, tuple[Any, ...]]) -> None:
    """Drops the groups that no use after `node` may be a result of."""
    if node.target in compat.MODE_CHANGES:
        given.clear()
    written = {
        compat.storage_id(tensor)
        for value in written_values(node)
        for tensor in tensors_of(value.meta.get("val"))
    }
    if not written:
        return
    for name, operands in [*given.items()]:
        storages = {
            compat.storage_id(tensor)
            for operand in operands
            for tensor in tensors_of(operand.meta.get("val"))
        }
        if storages & written:
            del given[name]
