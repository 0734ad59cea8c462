"""The repeated layers of a model, and the model with fewer of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from autoamp import compat

FEWEST = 6
"""The fewest layers of a stack that is captured at smaller depths."""

_PLACES = ("index", "idx", "layer_id", "layer_number", "block_id")
"""Parts of names of attributes that say where in the stack a layer stands."""


def stack_of(model: nn.Module) -> nn.ModuleList | nn.Sequential | None:
    """The longest list of modules that are alike; None if there is none."""
    found = [
        each
        for each in compat.modules_of(model)
        if isinstance(each, nn.ModuleList | nn.Sequential) and len(each) > 1
    ]
    alike = [each for each in found if _are_alike(each)]
    return max(alike, key=len, default=None)


@contextlib.contextmanager
def with_layers(
    stack: nn.ModuleList | nn.Sequential | None, count: int
) -> Iterator[None]:
    """A region in which a stack has its first `count` layers alone."""
    if stack is None:
        yield
        return
    held = list(stack)
    del stack[count:]
    try:
        yield
    finally:
        for each in held[count:]:
            stack.append(each)


def _are_alike(stack: nn.ModuleList | nn.Sequential) -> bool:
    facts = [_facts(layer) for layer in stack]
    return bool(facts[0]) and all(each == facts[0] for each in facts)


def _facts(layer: nn.Module) -> list[Any]:
    """What tells layers apart: classes, shapes of weights, plain attributes."""
    weights = [
        (name, tuple(each.shape), each.dtype, each.requires_grad)
        for name, each in layer.named_parameters()
    ]
    modules = [
        (name, type(module), _settings(module))
        for name, module in layer.named_modules()
    ]
    return [weights, modules] if weights else []


def _settings(module: nn.Module) -> dict[str, object]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str | None)
        and not any(part in name for part in _PLACES)
    }
