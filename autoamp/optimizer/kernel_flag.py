"""Steps that the optimizer's own kernel skips: it reads the flag, and nobody waits.

Fused optimizers do that for `torch.amp.GradScaler`, by two attributes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer


def free_to_read(flag: torch.Tensor) -> bool:
    """Whether reading `flag` waits for nothing: it is in the host's memory."""
    return flag.device.type == "cpu"


def takes_flag(optimizer: Optimizer, flag: torch.Tensor) -> bool:
    """Whether a step can be skipped by the optimizer's kernel, without a wait.

    Its first step never is: fused SGD would keep a momentum buffer it has not
    initialised.
    """
    if free_to_read(flag):
        return False
    groups = [g for g in optimizer.param_groups if g["params"]]
    return (
        bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        # A group may have an implementation of its own.
        and all(g.get("fused") for g in groups)
        and all(_has_state(optimizer, g) for g in groups)
    )


def _has_state(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether every weight that is about to be stepped has all of its state."""
    if isinstance(optimizer, torch.optim.SGD) and not group["momentum"]:
        return True  # it never has any
    for p in group["params"]:
        known = optimizer.state.get(p)
        if p.grad is not None and (
            not known or any(value is None for value in known.values())
        ):
            return False
    return True


@contextlib.contextmanager
def given_flag(of: Optimizer, flag: torch.Tensor) -> Iterator[None]:
    """A region in which the optimizer's kernel reads `flag`; its hooks fire as ever."""
    optimizer: Any = of
    # 0-dim, as GradScaler's: Adam takes it off its step counters, which are that.
    optimizer.grad_scale, optimizer.found_inf = None, flag.reshape(())
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf
