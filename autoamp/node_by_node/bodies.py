"""Branches and loops run as Python would run them, so that their ops can be watched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.node_by_node.observer import Observer

Make = Callable[[fx.GraphModule], Callable[..., Any]]
"""Takes the graph of a body; returns a function that runs the graph node by node."""

Observers = Sequence[Observer]


def _cond(
    make: Make, _: Observers, which: Any, yes: Any, no: Any, operands: Sequence[Any]
) -> Any:
    return tuple(make(yes if bool(which) else no)(*operands))


def _while_loop(
    make: Make,
    _: Observers,
    goes_on: Any,
    body: Any,
    carried: Sequence[Any],
    shared: Sequence[Any] = (),
) -> Any:
    while bool(_one(goes_on(*carried, *shared))):
        carried = make(body)(*carried, *shared)
    return tuple(carried)


def _scan(  # noqa: PLR0917 (the arguments of the op follow the first two)
    make: Make,
    observers: Observers,
    body: Any,
    carried: Sequence[Any],
    over: Sequence[Any],
    shared: Sequence[Any] = (),
) -> Any:
    count, given = len(carried), len(over[0])
    found = []
    for at in range(given):
        result = make(body)(*carried, *_slices(observers, over, at), *shared)
        carried = result[:count]
        found.append(result[count:])
    return (*carried, *_stacked(observers, found))


def _map(
    make: Make,
    observers: Observers,
    body: Any,
    over: Sequence[Any],
    shared: Sequence[Any] = (),
) -> Any:
    found = [
        make(body)(*_slices(observers, over, at), *shared) for at in range(len(over[0]))
    ]
    return tuple(_stacked(observers, found))


def _slices(observers: Observers, over: Sequence[Any], at: int) -> list[Any]:
    found = []
    for value in over:
        part = value[at]
        for each in observers:
            each.cut(part, value)
        found.append(part)
    return found


def _stacked(observers: Observers, results: Sequence[Sequence[Any]]) -> list[Any]:
    found = []
    for column in zip(*results, strict=True):
        whole = torch.stack(column)
        for each in observers:
            each.joined(whole, column)
        found.append(whole)
    return found


def _one(value: Any) -> Any:
    return value[0] if isinstance(value, (list, tuple)) else value


UNROLLED: Mapping[Any, Callable[..., Any]] = {
    compat.COND: _cond,
    compat.WHILE_LOOP: _while_loop,
    compat.SCAN: _scan,
    compat.MAP: _map,
}
"""Each op, and the function that runs it.

The function takes a `Make`, the observers, and then the arguments of the op.
"""
