"""Any order of backwards, clips, steps, saves and loads goes as under a GradScaler.

Two copies of one converted model are trained side by side.  autoamp scales one of them;
`torch.amp.GradScaler`, set up alike, scales the other.  In bf16 a loss scale that is a
power of two changes no bit, so that the weights must be equal to the bit.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import nn

from tests.training.steps import (
    converted,
    fresh_copy,
    loss_of,
    mlp,
    name,
    scaling_of,
)

pytestmark = pytest.mark.one_model

SCALE: dict[str, Any] = {"init_scale": 2.0**15, "growth_interval": 3}


def optimizer_of(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


class AsGradScaler(RuleBasedStateMachine):
    """What a training loop may do between two steps, in any order."""

    bases: tuple[nn.Module, nn.Module]
    """Converted models of the same weights, of which each run trains copies."""

    def __init__(self) -> None:
        super().__init__()
        ours, theirs = self.bases
        self.ours: Any = fresh_copy(ours, **SCALE, min_scale=2.0**-100)
        self.theirs: Any = copy.deepcopy(theirs)
        self.optimizer = name(optimizer_of(self.ours), self.ours)
        self.reference = optimizer_of(self.theirs)
        self.scaler = torch.amp.GradScaler("cpu", **SCALE)
        self.batches = 0
        self.has_gradients = False
        self.skipped = 0
        self.saved: Any = None

    @property
    def scale(self) -> Any:
        return scaling_of(self.ours).loss_scale

    @rule(overflows=st.sampled_from([False, False, False, True]))
    def micro_batch(self, overflows: bool) -> None:
        factor = math.inf if overflows else 1.0
        loss_of(self.ours, self.batches, factor).backward()
        self.scaler.scale(loss_of(self.theirs, self.batches, factor)).backward()
        self.batches += 1
        self.has_gradients = True

    @precondition(lambda self: self.has_gradients)
    @rule(clips=st.booleans(), set_to_none=st.booleans())
    def step(self, clips: bool, set_to_none: bool) -> None:
        if clips:
            self.scaler.unscale_(self.reference)
            for model in (self.ours, self.theirs):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = self.theirs[0].weight.detach().clone()
        self.optimizer.step()
        self.scaler.step(self.reference)
        self.scaler.update()
        skipped = torch.equal(before, self.theirs[0].weight)
        assert self.optimizer.step_was_skipped == skipped
        self.skipped += skipped
        self.zero(set_to_none)

    @rule(set_to_none=st.booleans())
    def zero(self, set_to_none: bool) -> None:
        self.has_gradients = False
        self.optimizer.zero_grad(set_to_none)
        self.reference.zero_grad(set_to_none)

    @rule()
    def save(self) -> None:
        parts = (self.ours, self.optimizer, self.theirs, self.reference, self.scaler)
        self.saved = copy.deepcopy([part.state_dict() for part in parts]), self.skipped

    @precondition(lambda self: self.saved is not None)
    @rule()
    def load(self) -> None:
        self.zero(True)
        parts = (self.ours, self.optimizer, self.theirs, self.reference, self.scaler)
        states, self.skipped = copy.deepcopy(self.saved)
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)

    @invariant()
    def scales_are_equal(self) -> None:
        assert self.scale.scale == self.scaler.get_scale()
        assert self.scale.growth_tracker == self.scaler._get_growth_tracker()
        assert self.scale.skipped_steps == self.skipped

    @invariant()
    def weights_are_equal(self) -> None:
        ours, theirs = self.ours.parameters(), self.theirs.parameters()
        for mine, reference in zip(ours, theirs, strict=True):
            assert torch.equal(mine, reference)


def test_any_order_of_steps_goes_as_under_a_grad_scaler() -> None:
    plain = mlp()
    off = converted(copy.deepcopy(plain), loss_scale="off", guard=False)
    AsGradScaler.bases = converted(plain), off
    run_state_machine_as_test(
        AsGradScaler,
        settings=settings(max_examples=12, stateful_step_count=20, deadline=None),
    )
