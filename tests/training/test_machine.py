"""Any order of backwards, clips, steps, saves and loads goes as under a GradScaler.

Two copies of one model are trained side by side.  autoamp decides about the steps of
one of them; `torch.amp.GradScaler`, set up alike, about those of the other.  In bf16 a
loss scale that is a power of two changes no bit, so that the weights and the state of
the optimizers must be equal to the bit.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor, nn

import autoamp
from tests.training.steps import (
    BF16,
    assert_same,
    batch,
    converted,
    fresh_copy,
    mlp,
    name,
    scaling_of,
    state_of,
    weights_of,
)

pytestmark = pytest.mark.one_model

SCALE: dict[str, Any] = {"init_scale": 2.0**15, "growth_interval": 2}
GUARD: dict[str, Any] = {"precision": "bf16", "do_no_harm": False}

FACTORS = st.sampled_from([*[1.0] * 9, math.inf, -math.inf, math.nan])
"""What a loss is multiplied by: its gradients are then finite or not."""

CLIPS: dict[str, Callable[[Any], Any]] = {
    "none": lambda _: None,
    "norm": functools.partial(nn.utils.clip_grad_norm_, max_norm=1.0),
    "value": functools.partial(nn.utils.clip_grad_value_, clip_value=0.01),
}


def sgd(model: nn.Module) -> list[Any]:
    return [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)]


def fused(model: nn.Module) -> list[Any]:
    return [torch.optim.AdamW(model.parameters(), 0.01, fused=True)]


def one_a_layer(model: Any) -> list[Any]:
    adam = torch.optim.Adam(model[0].parameters(), foreach=True)
    return [adam, torch.optim.SGD(model[2].parameters(), 0.1, momentum=0.9)]


@dataclass(frozen=True)
class Way:
    """What is trained.

    Attributes:
        half: the parameters are in bf16, and their optimizers step fp32 masters.
    """

    optimizers: Callable[[nn.Module], list[Any]] = sgd
    options: dict[str, Any] = field(default_factory=lambda: BF16)
    half: bool = False


WAYS = {
    "sgd": Way(),
    "two optimizers": Way(one_a_layer),
    "fused": Way(fused),
    "guard": Way(options=GUARD),
    "two optimizers and a guard": Way(one_a_layer, GUARD),
    "masters": Way(options=GUARD, half=True),
}


class AsGradScaler(RuleBasedStateMachine):
    """What a training loop may do between two steps, in any order."""

    way: Way
    bases: tuple[nn.Module, nn.Module]
    """Models of the same weights, of which each run trains copies."""

    @initialize(named=st.booleans())
    def begin(self, named: bool) -> None:
        self.scaled = self.way.options is BF16
        ours, theirs = self.bases
        scaled = {**SCALE, "min_scale": 2.0**-100}
        self.ours: Any = (
            fresh_copy(ours, **scaled) if self.scaled else copy.deepcopy(ours)
        )
        self.theirs: Any = copy.deepcopy(theirs)
        self.optimizers = self.way.optimizers(self.ours)
        self.references = self.way.optimizers(self.theirs)
        if self.way.half:
            autoamp.convert(self.ours, self.optimizers, **GUARD)
            autoamp.convert(self.theirs, self.references, **GUARD, guard=False)
        elif named and self.scaled:
            for optimizer in self.optimizers:
                name(optimizer, self.ours)
        self.scaler = torch.amp.GradScaler("cpu", **SCALE)
        self.batches = self.skipped = 0
        self.has_gradients = self.overflowed = self.stepped = False
        self.saved: Any = None

    def losses(self, factor: float) -> list[Tensor]:
        x, y = batch(self.batches)
        self.batches += 1
        self.has_gradients = True
        self.overflowed |= not math.isfinite(factor)
        dtype = self.ours[0].weight.dtype
        results = [model(x.to(dtype)).float() for model in (self.ours, self.theirs)]
        return [nn.functional.mse_loss(result, y) * factor for result in results]

    @rule(factor=FACTORS)
    def micro_batch(self, factor: float) -> None:
        ours, theirs = self.losses(factor)
        ours.backward()
        self.scaler.scale(theirs).backward()

    @rule(first=FACTORS, second=FACTORS, thrown_away=st.booleans())
    def two_backwards(self, first: float, second: float, thrown_away: bool) -> None:
        """Over one forward; the gradients of the first may be thrown away."""
        ours, theirs = self.losses(1.0)
        (ours * first).backward(retain_graph=True)
        self.scaler.scale(theirs * first).backward(retain_graph=True)
        if thrown_away:
            self.zero(True)
        (ours * second).backward()
        self.scaler.scale(theirs * second).backward()
        self.has_gradients = True
        kept = [second] if thrown_away else [first, second]
        self.overflowed |= not all(map(math.isfinite, kept))

    @precondition(lambda self: self.has_gradients)
    @rule(
        clip=st.sampled_from(sorted(CLIPS)),
        set_to_none=st.booleans(),
        turned=st.booleans(),
    )
    def step(self, clip: str, set_to_none: bool, turned: bool) -> None:
        for reference in self.references:
            self.scaler.unscale_(reference)
        for model in (self.ours, self.theirs):
            CLIPS[clip]([p for p in model.parameters() if p.grad is not None])
        self.take([None] * len(self.optimizers), turned)
        self.zero(set_to_none)

    @rule(factor=FACTORS, keyword=st.booleans())
    def step_by_closure(self, factor: float, keyword: bool) -> None:
        """A GradScaler takes no closure: it is told of the backward before."""
        self.zero(True)
        ours, theirs = self.losses(factor)
        self.scaler.scale(theirs).backward()
        calls: list[Tensor] = []

        def closure() -> Tensor:
            assert torch.is_grad_enabled()
            ours.backward()
            calls.append(ours)
            return ours

        others = [None] * (len(self.optimizers) - 1)
        result = self.take([closure, *others], keyword=keyword)
        assert calls == [ours]
        assert result is ours
        self.zero(True)

    def take(
        self, closures: list[Any], turned: bool = False, keyword: bool = False
    ) -> Any:
        """A step of all optimizers; gives back what the first returned."""
        given = list(zip(self.optimizers, self.references, closures, strict=True))
        results = []
        with torch.no_grad():
            for optimizer, reference, closure in given[::-1] if turned else given:
                if keyword:
                    results.append(optimizer.step(closure=closure))
                else:
                    results.append(optimizer.step(closure))
                assert bool(optimizer.step_was_skipped) == self.overflowed
                self.scaler.step(reference)
        self.scaler.update()
        self.skipped += self.overflowed * len(given)
        self.stepped = True
        return results[0]

    @rule(set_to_none=st.booleans())
    def zero(self, set_to_none: bool) -> None:
        self.has_gradients = self.overflowed = False
        for optimizer in (*self.optimizers, *self.references):
            optimizer.zero_grad(set_to_none)

    def parts(self, turned: bool = False) -> list[Any]:
        all_optimizers = [*self.optimizers, *self.references]
        found = [self.ours, self.theirs, *all_optimizers]
        return [self.scaler, *(found[::-1] if turned else found)]

    @precondition(lambda self: self.stepped)
    @rule()
    def save(self) -> None:
        states = [part.state_dict() for part in self.parts()]
        self.saved = copy.deepcopy(states), self.skipped

    @precondition(lambda self: self.saved is not None)
    @rule(turned=st.booleans())
    def load(self, turned: bool) -> None:
        self.zero(True)
        states, self.skipped = copy.deepcopy(self.saved)
        of = dict(zip(map(id, self.parts()), states, strict=True))
        for part in self.parts(turned):
            part.load_state_dict(of[id(part)])

    @invariant()
    def scales_are_equal(self) -> None:
        if not self.scaled:
            return
        scale = scaling_of(self.ours).loss_scale
        assert scale.scale == self.scaler.get_scale()
        assert scale.growth_tracker == self.scaler._get_growth_tracker()
        assert scale.skipped_steps == self.skipped

    @invariant()
    def weights_and_states_are_equal(self) -> None:
        assert_same(weights_of(self.ours), weights_of(self.theirs))
        for ours, theirs in zip(self.optimizers, self.references, strict=True):
            if ours.state:  # torch hands a fused kernel the flag, and makes its state
                assert_same(state_of(ours), state_of(theirs))


@pytest.mark.thorough(but=["sgd"])
@pytest.mark.parametrize("way", WAYS)
def test_any_order_of_steps_goes_as_under_a_grad_scaler(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, plain = WAYS[way], mlp()
    if chosen.optimizers is fused:  # a flag that only a device knows, as on a GPU
        for module in ("step", "scale"):
            free = f"autoamp.training.{module}.free_to_read"
            monkeypatch.setattr(free, lambda _: False)
    AsGradScaler.way = chosen
    if chosen.half:
        plain.bfloat16()
        AsGradScaler.bases = plain, plain
    else:
        off = converted(copy.deepcopy(plain), loss_scale="off", guard=False)
        AsGradScaler.bases = autoamp.convert(plain, **chosen.options), off
    run_state_machine_as_test(
        AsGradScaler,
        settings=settings(max_examples=6, stateful_step_count=14, deadline=None),
    )
