"""Backwards, clips, steps, freezes and loads, in any order, go as under a GradScaler.

Three copies of one model are trained side by side.  autoamp decides about the steps of
the first, and `torch.amp.GradScaler`, set up alike, about those of the second, which
computes in the same precision.  A loss scale that is a power of two changes no bit
there, so that weights, masters and the state of the optimizers must be equal to the
bit.  The third is plain fp32, and the first must stay as near to it as the digits of
its precision allow.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import math
from collections.abc import Callable, Iterator
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
from tests.metrics import relative_error
from tests.training.steps import (
    HUGE,
    OPTIMIZERS,
    assert_same,
    batch,
    fresh_copy,
    masters_of,
    mlp,
    name,
    scaling_of,
    state_of,
    weights_of,
)

pytestmark = [pytest.mark.one_model, pytest.mark.usefixtures("one_thread")]

SCALE: dict[str, Any] = {"init_scale": 2.0**15, "growth_interval": 2}
LOW = {"do_no_harm": False, "strict": True}


@dataclass(frozen=True)
class Way:
    """A precision, and what decides in it about a step.

    Attributes:
        scale: the loss scale that ours begins with; None where it has none.
        half: the parameters are in half precision, and fp32 masters are stepped.
        several: the script reduces gradients between ranks by itself.
    """

    precision: str
    scale: Callable[[], autoamp.LossScale] | None = None
    half: bool = False
    several: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def low(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float16

    @property
    def is_dynamic(self) -> bool:
        return isinstance(self.scale and self.scale(), autoamp.DynamicLossScale)


def dynamic() -> autoamp.LossScale:
    return autoamp.DynamicLossScale(**SCALE, min_scale=2.0**-100, climbs=False)


def fixed() -> autoamp.LossScale:
    return autoamp.StaticLossScale(2.0**10)


DYNAMIC = {**LOW, "loss_scale": "dynamic"}
FIXED = {**LOW, "loss_scale": 2.0**10}
WAYS = {
    "bf16": Way("bf16", dynamic, options=DYNAMIC),
    "bf16 guard": Way("bf16", options=LOW),
    "fp16": Way("fp16", dynamic, options=DYNAMIC),
    "fp16 fixed": Way("fp16", fixed, options=FIXED),
    "bf16 ranks": Way("bf16", dynamic, several=True, options=DYNAMIC),
    "bf16 parameters": Way("bf16", half=True, options=LOW),
    "fp16 parameters": Way("fp16", dynamic, half=True, options=DYNAMIC),
}

Make = Callable[[nn.Module], Any]


def one_a_layer(model: Any) -> list[Any]:
    adam = torch.optim.Adam(model[0].parameters(), foreach=True)
    return [adam, torch.optim.SGD(model[2].parameters(), 0.1, momentum=0.9)]


MAKERS: dict[str, Callable[[Any], list[Any]]] = {"two optimizers": one_a_layer}


def optimizers_of(label: str, model: nn.Module) -> list[Any]:
    return MAKERS[label](model) if label in MAKERS else [OPTIMIZERS[label](model)]


FROZEN = (None, 0, 2)
"""Which layer of the model is frozen."""


def freeze(model: Any, layer: int | None) -> None:
    for at in (0, 2):
        model[at].requires_grad_(at != layer)


@functools.cache
def bases(way: str) -> tuple[Any, Any]:
    """Ours and theirs, captured; each run of the machine trains copies, for free."""
    torch.manual_seed(0)
    chosen, plain = WAYS[way], mlp()
    if chosen.half:
        plain.to(chosen.low)
    theirs = {**chosen.options, "loss_scale": "off", "guard": False}
    made = []
    for options in (chosen.options, theirs):
        model: Any = copy.deepcopy(plain)
        if chosen.half and options.get("loss_scale", "off") == "off":
            made.append(model)  # of which nothing is captured
            continue
        forgotten = torch.optim.SGD(model.parameters(), 0.1) if chosen.half else None
        autoamp.convert(model, forgotten, precision=chosen.precision, **options)
        for layer in FROZEN:
            freeze(model, layer)
            model(batch(0)[0].to(model[0].weight.dtype)).sum().backward()
        freeze(model, None)
        model.zero_grad()
        made.append(model)
    return made[0], made[1]


@pytest.fixture(autouse=True, scope="module")
def _no_model_outlives_the_machine() -> Iterator[None]:
    """Optimizers of later tests are not to be met by these models."""
    yield
    bases.cache_clear()
    gc.collect()
    torch._dynamo.reset()


FACTORS = st.sampled_from([*[1.0] * 9, math.inf, -math.inf, math.nan, HUGE])
"""What a loss is multiplied by: its gradients are then finite or not."""

CLIPS: dict[str, Callable[[Any], Any]] = {
    "none": lambda _: None,
    "norm": functools.partial(nn.utils.clip_grad_norm_, max_norm=1.0),
    "value": functools.partial(nn.utils.clip_grad_value_, clip_value=0.01),
}

ROUNDINGS = 2 * (8 + 8)
"""The most roundings to the low dtype between a weight and its gradient: two layers
cast an input, two weights and two biases and compute three ops, the backward computes
seven and casts what enters; a second backward goes this way twice."""

LINEAR = ("SGD", "OldStyle")
"""Optimizers whose updates are linear in the gradients: so are the updates' errors."""


class AsGradScaler(RuleBasedStateMachine):
    """What a training loop may do between two steps, in any order."""

    way: str
    label: str

    @initialize(named=st.booleans(), scheduled=st.sampled_from(["no", "both", "after"]))
    def begin(self, named: bool, scheduled: str) -> None:
        self.chosen = WAYS[self.way]
        ours, theirs = bases(self.way)
        captured = autoamp.is_converted(ours)
        self.ours: Any = copy.deepcopy(ours)
        if captured:
            scale = self.chosen.scale
            self.ours = fresh_copy(ours, scale() if scale else autoamp.NoLossScale())
        self.theirs: Any = copy.deepcopy(theirs)
        self.exact: Any = mlp()
        self.exact.load_state_dict(self.ours.state_dict())
        self.models = [self.ours, self.theirs, self.exact]
        every = [optimizers_of(self.label, model) for model in self.models]
        self.optimizers, self.references, self.exacts = every
        rates = torch.optim.lr_scheduler.StepLR
        if scheduled == "both":
            self.schedules = [rates(o, 99) for o in [*self.optimizers]]
        if not captured:
            options = {"precision": self.chosen.precision, **LOW}
            autoamp.convert(self.ours, self.optimizers, **options)
        elif named or self.chosen.half:
            for optimizer in self.optimizers:
                name(optimizer, self.ours)
        if self.chosen.half:  # with masters, and nothing else
            off = {"loss_scale": "off", "guard": False}
            options = {"precision": self.chosen.precision, **LOW, **off}
            autoamp.convert(self.theirs, self.references, **options)
        if scheduled != "no":
            self.schedules = [rates(o, 99) for o in [*self.optimizers]]
            self.schedules += [rates(o, 99) for o in self.references]
        first = self.chosen.scale().scale if self.chosen.scale else 1.0
        self.scaler = torch.amp.GradScaler("cpu", **{**SCALE, "init_scale": first})
        self.batches = self.skipped = self.steps = 0
        self.went = 0.0
        self.has_gradients = self.stepped = self.written = False
        self.saved: Any = None

    def losses(self, factor: float) -> list[Tensor]:
        x, y = batch(self.batches)
        self.batches += 1
        self.has_gradients = True
        factor = self.meant(factor)
        results = [model(x.to(model[0].weight.dtype)).float() for model in self.models]
        with autoamp.disabled(), torch.no_grad():
            now = self.ours(x.to(self.ours[0].weight.dtype)).float()
        if now.isfinite().all():  # no copy of a weight is stale
            eps = torch.finfo(self.chosen.low).eps
            assert relative_error([results[0].detach()], [now]) < 8 * eps
        return [nn.functional.mse_loss(result, y) * factor for result in results]

    def meant(self, factor: float) -> float:
        """`factor`; infinity where a huge one, times a low loss scale, is finite."""
        is_low = self.scaler.get_scale() < 2.0**8
        return math.inf if factor == HUGE and is_low else factor

    def scaled(self, losses: list[Tensor]) -> list[Tensor]:
        ours, theirs, exact = losses
        return [ours, self.scaler.scale(theirs), exact]

    @rule(factor=FACTORS)
    def micro_batch(self, factor: float) -> None:
        for loss in self.scaled(self.losses(factor)):
            loss.backward()

    @rule(first=FACTORS, second=FACTORS, thrown_away=st.booleans())
    def two_backwards(self, first: float, second: float, thrown_away: bool) -> None:
        """Over one forward; the gradients of the first may be thrown away."""
        losses = self.losses(1.0)
        first, second = self.meant(first), self.meant(second)
        for loss in self.scaled([loss * first for loss in losses]):
            loss.backward(retain_graph=True)
        if thrown_away:
            self.zero(True)
        for loss in self.scaled([loss * second for loss in losses]):
            loss.backward()
        self.has_gradients = True

    @rule(factor=FACTORS)
    def asked_of_autograd(self, factor: float) -> None:
        self.zero(True)
        for model, loss in zip(
            self.models, self.scaled(self.losses(factor)), strict=True
        ):
            weights = [p for p in model.parameters() if p.requires_grad]
            for p, grad in zip(
                weights, torch.autograd.grad(loss, weights), strict=True
            ):
                p.grad = grad.to(p.grad_dtype or p.dtype)

    def plant(self, at: int) -> None:
        """In one gradient by hand, or in all by the reduction of another rank's.

        No clipping hides a NaN.  It hides infinities where no graph has a flag of them.
        """
        for model in self.models:
            found = [p.grad for p in model.parameters() if p.grad is not None]
            for grad in found if self.chosen.several else [found[at % len(found)]]:
                grad.view(-1)[-1:].mul_(math.nan)

    @property
    def plants(self) -> bool:
        """Whether all gradients are looked at, and not only the flags of graphs."""
        return self.chosen.several or self.chosen.scale is None

    @rule(layer=st.sampled_from(FROZEN))
    def freeze(self, layer: int | None) -> None:
        self.zero(True)
        for model in self.models:
            freeze(model, layer)

    @precondition(lambda self: self.has_gradients)
    @rule(
        clip=st.sampled_from(sorted(CLIPS)),
        set_to_none=st.booleans(),
        turned=st.booleans(),
        planted=st.sampled_from([False, False, True]),
        at=st.integers(0, 3),
    )
    def step(
        self, clip: str, set_to_none: bool, turned: bool, planted: bool, at: int
    ) -> None:
        if planted and self.plants:
            self.plant(at)
        self.look()
        for model in self.models:
            CLIPS[clip]([p for p in model.parameters() if p.grad is not None])
        self.take([None] * len(self.optimizers), turned)
        self.zero(set_to_none)

    @precondition(lambda self: self.has_gradients)
    @rule(turned=st.booleans())
    def plain_step(self, turned: bool) -> None:
        self.look()
        self.take([None] * len(self.optimizers), turned)
        self.zero(True)

    @rule(factor=FACTORS, keyword=st.booleans())
    def step_by_closure(self, factor: float, keyword: bool) -> None:
        """A GradScaler takes no closure: it is told of the backward before."""
        self.zero(True)
        ours, theirs, exact = self.scaled(self.losses(factor))
        theirs.backward()
        exact.backward()
        calls: list[Tensor] = []

        def closure() -> Tensor:
            assert torch.is_grad_enabled()
            ours.backward()
            calls.append(ours)
            return ours

        self.look()
        steps = [any(map(has_gradient, held(r))) for r in self.references]
        first = steps.index(True)
        closures = [closure if i == first else None for i in range(len(steps))]
        result = self.take(closures, keyword=keyword)
        assert calls == [ours]
        assert result is ours
        self.zero(True)

    def look(self) -> None:
        """Has the GradScaler look at all gradients before they are clipped."""
        self.bad = []
        for reference in self.references:
            self.scaler.unscale_(reference)
            found = self.scaler._found_inf_per_device(reference)
            self.bad.append(any(bool(flag) for flag in found.values()))
        grads = [p.grad for p in self.exact.parameters() if p.grad is not None]
        self.large = float(torch.stack([g.norm() for g in grads]).norm())

    def take(
        self, closures: list[Any], turned: bool = False, keyword: bool = False
    ) -> Any:
        """A step of all optimizers that have gradients; what the first returned."""
        given = [*zip(self.optimizers, self.references, self.exacts, strict=True)]
        order = [*zip(given, closures, self.bad, strict=True)]
        before, result = vector(self.exact), None
        with torch.no_grad():
            for each, closure, bad in order[::-1] if turned else order:
                optimizer, reference, exact = each
                if not any(map(has_gradient, held(reference))):
                    continue
                if keyword:
                    found = optimizer.step(closure=closure)
                else:
                    found = optimizer.step(closure)
                result = found if closure is not None else result
                assert bool(optimizer.step_was_skipped) == bad
                self.scaler.step(reference)
                self.skipped += bad
                if not bad:
                    exact.step()
        self.scaler.update(None if self.chosen.is_dynamic else self.scaler.get_scale())
        self.stepped = True
        self.steps += 1
        if self.label in LINEAR and not any(self.bad):
            rate = self.exacts[0].param_groups[0]["lr"]
            way = float((vector(self.exact) - before).norm())
            self.went += max(way, rate * self.large)
        return result

    @rule(set_to_none=st.booleans())
    def zero(self, set_to_none: bool) -> None:
        self.has_gradients = False
        for model in self.models:
            model.zero_grad(set_to_none)
        for optimizer in (*self.optimizers, *self.references):
            optimizer.zero_grad(set_to_none)

    def parts(self, turned: bool = False) -> list[Any]:
        every = [*self.optimizers, *self.references, *self.exacts]
        found = [*self.models, *every]
        return [self.scaler, *(found[::-1] if turned else found)]

    @rule()
    def write(self) -> None:
        """As a script does that averages weights."""
        for model in self.models:
            state = model.state_dict()
            model.load_state_dict({k: 0.5 * v for k, v in state.items()})
        self.written = True  # by half weights, whose masters lose their digits

    @precondition(lambda self: self.stepped)
    @rule()
    def save(self) -> None:
        states = [part.state_dict() for part in self.parts()]
        self.saved = copy.deepcopy(states), self.skipped, self.steps, self.went

    @precondition(lambda self: self.saved is not None)
    @rule(turned=st.booleans())
    def load(self, turned: bool) -> None:
        self.zero(True)
        states, self.skipped, self.steps, self.went = copy.deepcopy(self.saved)
        of = dict(zip(map(id, self.parts()), states, strict=True))
        for part in self.parts(turned):
            part.load_state_dict(of[id(part)])

    @invariant()
    def scales_are_equal(self) -> None:
        if self.chosen.scale is None:
            return
        scale = scaling_of(self.ours).loss_scale
        assert scale.scale == self.scaler.get_scale()
        if self.chosen.is_dynamic:
            assert scale.growth_tracker == self.scaler._get_growth_tracker()
        assert scale.skipped_steps == self.skipped

    @invariant()
    def weights_and_states_are_equal(self) -> None:
        assert_same(weights_of(self.ours), weights_of(self.theirs))
        for ours, theirs in zip(self.optimizers, self.references, strict=True):
            ours.state_dict()
            assert_same(state_of(ours), state_of(theirs))
            for param, master in masters_of(ours).items():  # state_dict read them
                assert master.dtype == torch.float32
                assert torch.equal(param, master.to(param.dtype))

    @invariant()
    def weights_are_near_fp32(self) -> None:
        if self.label not in LINEAR or (self.written and self.chosen.half):
            return
        error = float((vector(self.ours, self.optimizers) - vector(self.exact)).norm())
        eps = torch.finfo(self.chosen.low).eps
        assert error <= ROUNDINGS * self.steps * eps / 2 * self.went + 1e-5


def held(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def has_gradient(param: Tensor) -> bool:
    return param.grad is not None


def vector(model: nn.Module, optimizers: Any = ()) -> Tensor:
    """The weights, or their masters where there are any, as one vector."""
    of = {p: m for optimizer in optimizers for p, m in masters_of(optimizer).items()}
    weights = [of.get(p, p).detach().flatten() for p in model.parameters()]
    return torch.cat(weights).double()


def cases() -> list[Any]:
    """Each optimizer in one way and each way with one are quick, the rest is slow."""
    # A fused kernel makes its state at a step that it skips, and a GradScaler leaves
    # garbage in that of SGD: test_step_fused.py has them.  Muon multiplies matrices in
    # bf16, where the same numbers at another address may round otherwise.
    labels = [
        label
        for label in (*OPTIMIZERS, *MAKERS)
        if not label.endswith("-fused") and label != "Muon"
    ]
    found = []
    for (place, label), (at, way) in itertools.product(
        enumerate(labels), enumerate(WAYS)
    ):
        quick = label == "SGD" or place % len(WAYS) == at
        marks = [] if quick else [pytest.mark.slow]
        found.append(pytest.param(way, label, marks=marks))
    return found


@pytest.mark.hypothesis
@pytest.mark.parametrize(("way", "label"), cases())
def test_any_order_of_steps_goes_as_under_a_grad_scaler(
    way: str, label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if WAYS[way].several:
        monkeypatch.setattr("autoamp.compat.are_several", lambda: True)
    AsGradScaler.way, AsGradScaler.label = way, label
    examples = 12 if label in LINEAR else 4
    run_state_machine_as_test(
        AsGradScaler,
        settings=settings(max_examples=examples, stateful_step_count=14, deadline=None),
    )
