"""Steps skipped by the optimizer's own kernel, which reads the flag without a wait.

Fused optimizers do so for `torch.amp.GradScaler`, by two attributes: `grad_scale` and
`found_inf`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from autoamp.training.scale.base import free_to_read


def takes_flag(optimizer: Optimizer, flag: torch.Tensor) -> bool:
    """Whether a step can be skipped by the optimizer's kernel, without a wait.

    The first step cannot: fused SGD would keep a momentum buffer that it has not
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
        return True  # SGD without momentum never has state
    for p in group["params"]:
        known = optimizer.state.get(p)
        if p.grad is not None and (
            not known or any(value is None for value in known.values())
        ):
            return False
    return True


@contextlib.contextmanager
def given_flag(of: Optimizer, flag: torch.Tensor) -> Iterator[None]:
    """A region in which the optimizer's kernel reads `flag`; hooks fire as ever.

    At its end the optimizer shows whether the step was skipped, in a tensor.
    """
    optimizer: Any = of
    # The flag is made 0-dim, as GradScaler's is: Adam subtracts it from its 0-dim step
    # counters.
    optimizer.grad_scale, optimizer.found_inf = None, flag.reshape(())
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf
        optimizer.step_was_skipped = flag.reshape(()) != 0
