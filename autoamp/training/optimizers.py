"""Questions to any optimizer, and to the arguments that its step is called with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from autoamp import compat


def innermost(optimizer: Optimizer) -> Optimizer:
    """The optimizer that finally steps, inside accelerate's or Lightning's wrappers."""
    seen = {id(optimizer)}
    while True:
        held = [vars(optimizer).get(n) for n in ("optimizer", "_optimizer", "optim")]
        inner = [each for each in held if isinstance(each, Optimizer)]
        if not inner or id(inner[0]) in seen:
            return optimizer
        optimizer = inner[0]
        seen.add(id(optimizer))


def params_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """The tensors `optimizer` optimizes now: groups may be added at any time."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def closure_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The closure among the arguments of a step, or None."""
    found: Callable[[], Any] | None = args[0] if args else kwargs.get("closure")
    return found


def evaluated(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    params: Sequence[torch.Tensor] = (),
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Evaluates a step's closure once; gives the loss, and new arguments for the step.

    The closure's backward has to be over before the step can be judged.  The new
    arguments hold a closure whose first call returns the known loss, unless the
    optimizer has zeroed the gradients of `params` before that call.
    """
    closure = closure_of(args, kwargs)
    if closure is None:
        return None, args, kwargs
    with torch.enable_grad():
        loss = closure()
    ready = [loss]
    versions = _versions(params)

    def again() -> Any:
        if ready and _versions(params) == versions:
            return ready.pop()
        ready.clear()
        return closure()

    if args:
        return loss, (again, *args[1:]), kwargs
    return loss, args, {**kwargs, "closure": again}


def _versions(params: Sequence[torch.Tensor]) -> list[int | None]:
    return [None if p.grad is None else compat.version(p.grad) for p in params]
