"""Finds hooks on modules, adds hooks to gradients, and counts hooks added by others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from autoamp.compat.tensors import modules_of

HOOKS = tuple(
    name for name in vars(nn.Module()) if name.endswith("_hooks") and "dict" not in name
)
"""Names of the attributes of a module that hold hooks of its calls and gradients."""

_EVERYWHERE: list[Any] = [
    getattr(nn.modules.module, f"_global{name}", {}) for name in HOOKS
]
"""The dictionaries in which torch keeps hooks on all modules."""


class _Ours:
    """How many hooks we have registered.

    Threads may lose a count, which only costs another search for hooks.
    """

    count = 0


def hook_gradient(tensor: torch.Tensor, hook: Callable[..., Any]) -> None:
    """Registers a hook of ours, called with the gradient of `tensor`."""
    _Ours.count += 1
    tensor.register_hook(hook)


def hook_node(node: Any, hook: Callable[..., Any]) -> None:
    """Registers a hook of ours, called before node `node` of autograd's graph."""
    _Ours.count += 1
    node.register_prehook(hook)


def hook_after_node(node: Any, hook: Callable[..., Any]) -> None:
    """Registers a hook of ours, called after node `node` of autograd's graph.

    The hook is given the gradients that the node gave, and those that it was given.
    """
    _Ours.count += 1
    node.register_hook(hook)


def hooks_of_others() -> int:
    """How many hooks others have registered so far."""
    return RemovableHandle.next_id - _Ours.count


def hooks_everywhere() -> bool:
    """Whether there is a hook on all modules."""
    return any(_EVERYWHERE)


def has_hooks(model: nn.Module) -> bool:
    """Whether `model` or any module inside it has a hook."""
    return any(any(map(vars(module).get, HOOKS)) for module in modules_of(model))


def step_hooks(optimizer: Any) -> tuple[OrderedDict[int, Any], OrderedDict[int, Any]]:
    """The hooks before and after an optimizer's steps, as the optimizer finds them."""
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks


def set_hooks_after_step(optimizer: Any, hooks: OrderedDict[int, Any]) -> None:
    """Has an optimizer look up `hooks` after its step."""
    optimizer._optimizer_step_post_hooks = hooks


def mark_stepped(optimizer: Any) -> None:
    """Sets the mark without which `LRScheduler` warns of a step it has not seen."""
    optimizer._opt_called = True
