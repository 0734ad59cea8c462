"""Takes or skips one step of an optimizer: read, agree, decide, move."""

from __future__ import annotations

from typing import Any

import torch

from autoamp import compat
from autoamp.training.optimizers import evaluated
from autoamp.training.skips import say_foreign
from autoamp.training.step.agree import agree
from autoamp.training.step.boundary import OptimizerBoundary, Step
from autoamp.training.step.decide import LEFT_TO_SCALER, Decision, Way, decide
from autoamp.training.step.kernel_flag import given_flag
from autoamp.training.step.move import move
from autoamp.training.step.read import read, read_evidence
from autoamp.training.step.wrappers import show


def take(
    boundary: OptimizerBoundary,
    inner: Step,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Calls `inner(*args, **kwargs)`, the step as it was, or skips the step.

    A skipped step changes no weight and no state, fires no hook, and gives the
    closure's loss or None.

    Raises:
        LossScaleError: gradients overflow at the lowest loss scale allowed.
    """
    compiled = torch.compiler.is_dynamo_compiling()
    decided = _decided_in_python if compiled else _decided
    decision, loss, args, kwargs = decided(boundary, args, kwargs)
    if decision.way is Way.SKIP:
        return loss
    if decision.flag is not None:
        with given_flag(boundary.optimizer, decision.flag):
            return inner(*args, **kwargs)
    return inner(*args, **kwargs)


@compat.never_captured
def _decided(
    boundary: OptimizerBoundary, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Decision, Any, tuple[Any, ...], dict[str, Any]]:
    """The decision, the closure's loss, and the arguments for the step."""
    if leaves_to_scaler(boundary):
        optimizer: Any = boundary.optimizer
        found = getattr(optimizer, "found_inf", None)
        show(boundary, found is not None and found.reshape(()) != 0)
        boundary.log(LEFT_TO_SCALER.reason)
        for scaling in boundary.scalings:
            scaling.ledger.buffers.forget()
        return LEFT_TO_SCALER, None, args, kwargs
    loss, args, kwargs = evaluated(args, kwargs)
    reading = agree(boundary, read(boundary))
    decision = decide(boundary, reading)
    move(boundary, reading, decision)
    return decision, loss, args, kwargs


# Where the user compiles the step, the compiler is to leave this call alone.
_decided_in_python = torch.compiler.disable(_decided)


def leaves_to_scaler(boundary: OptimizerBoundary) -> bool:
    """Whether a GradScaler makes this step, and scales, or the boundary is off."""
    if boundary.off:
        return True
    if not compat.stepped_by_grad_scaler(boundary.optimizer):
        return False
    for scaling in read_evidence(boundary, boundary.params).scalings:
        if not scaling.ledger.foreign or scaling not in boundary.scalings:
            say_foreign(scaling)
        scaling.ledger.set_foreign(True)
        boundary.link(scaling)
    found = getattr(boundary.optimizer, "found_inf", None)  # where it is fused
    boundary.tell(False if found is None else found.reshape(()))
    return True
