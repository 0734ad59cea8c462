"""Decides about a step: by the flag, and by the abilities of the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch.optim import LBFGS

from autoamp import compat
from autoamp.training.scale import DynamicLossScale
from autoamp.training.step.boundary import OptimizerBoundary
from autoamp.training.step.kernel_flag import takes_flag
from autoamp.training.step.read import Reading

_ASK_EVERY = 100
"""After so many steps a flag that only a kernel reads is read here too, with a wait."""


class Way(Enum):
    """The ways in which a step may go on."""

    STEP = auto()
    SKIP = auto()
    BY_KERNEL = auto()
    """The optimizer's kernel reads the flag, and steps or skips by it."""
    RETRY = auto()
    """The closure is evaluated again, at a lower loss scale."""


@dataclass(frozen=True)
class Decision:
    """The decision about a step, or about one evaluation of its closure.

    Attributes:
        overflow: whether gradients overflow; None where the host does not know.
        reason: a clause for the log.
        flag: the flag for the optimizer's kernel to read, or None.
    """

    way: Way
    overflow: bool | None
    reason: str
    flag: torch.Tensor | None = None


STEP = Decision(Way.STEP, False, "no gradient overflows")
SKIP = Decision(Way.SKIP, True, "gradients overflow")
RETRY = Decision(
    Way.RETRY, True, "gradients overflow, and a lower loss scale may cure that"
)
LEFT_TO_SCALER = Decision(Way.STEP, None, "a GradScaler decides about the step")


def decide(boundary: OptimizerBoundary, reading: Reading) -> Decision:
    """Decides about a step that has yet to begin."""
    flag = reading.flag
    if not takes_flag(boundary.optimizer, flag):
        return decide_begun(reading)
    overflow = bool(flag) if _host_looks(boundary, reading) else None
    return Decision(Way.BY_KERNEL, overflow, "the optimizer's kernel decides", flag)


def decide_begun(reading: Reading) -> Decision:
    """Decides about a step that has begun, so that no kernel can be given the flag.

    The host waits for the flag, and so knows of the overflow: the skipped step is
    reported, and is an error at the lowest loss scale, whatever the optimizer is.
    """
    return SKIP if bool(reading.flag) else STEP


def decide_evaluation(boundary: OptimizerBoundary, reading: Reading) -> Decision:
    """Decides about one evaluation of the closure of a step that has begun."""
    decision = decide_begun(reading)
    if decision is SKIP and _can_retry(boundary):
        return RETRY
    return decision


def _can_retry(boundary: OptimizerBoundary) -> bool:
    """Whether the closure can be evaluated again, and the loss scale can be lowered."""
    scales = boundary.loss_scales
    lowers = bool(scales) and all(isinstance(s, DynamicLossScale) for s in scales)
    return lowers and isinstance(boundary.optimizer, LBFGS)


def _host_looks(boundary: OptimizerBoundary, reading: Reading) -> bool:
    """Whether a flag that the kernel reads is read here too."""
    device: torch.device = boundary.params[0].device
    if compat.is_capturing(device):
        return False
    evidence = reading.evidence
    concerned = [*evidence.scalings, *reading.guards]
    watching = any(s.skip_watch.watching for s in concerned)
    # An overflow that was passed on lowers a loss scale only where the host knows.
    due = (boundary.steps + 1) % _ASK_EVERY == 0
    return watching or due or bool(evidence.elsewhere)
