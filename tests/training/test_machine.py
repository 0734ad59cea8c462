"""Backwards, clips, steps, freezes and loads, in any order, go as under a GradScaler.

Three copies of one model are trained side by side.  autoamp decides about the steps of
the first, and `torch.amp.GradScaler` about those of the second, which computes in the
same precision.  A loss scale that is a power of two changes no bit there, so that
weights, masters and the state of the optimizers must be equal to the bit.  The third is
plain fp32, and the first must stay as near to it as the digits of its precision allow.

Our loss scale is moved by backwards, and a GradScaler's by steps.  So the losses of the
second are scaled as `Law` has it, each backward by itself.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import seed, settings
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
from tests.training.machine_ways import (
    FROZEN,
    INTERVAL,
    MAKERS,
    OPTIONS,
    WAYS,
    base,
    dynamic,
    freeze,
    optimizers_of,
    plain,
)
from tests.training.scale_law import Law
from tests.training.steps import (
    HUGE,
    OPTIMIZERS,
    assert_same,
    batch,
    fresh_copy,
    masters_of,
    name,
    scaling_of,
    state_of,
    weights_of,
)

pytestmark = [pytest.mark.one_model, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(autouse=True, scope="module")
def _no_model_outlives_the_machine() -> Iterator[None]:
    """Optimizers of later tests are not to be met by these models."""
    yield
    base.cache_clear()
    gc.collect()
    torch._dynamo.reset()


FACTORS = st.sampled_from([*[1.0] * 8, math.inf, -math.inf, math.nan, HUGE, HUGE])
"""What a loss is multiplied by: its gradients are then finite or not."""


def clamp_by_hand(params: list[Any]) -> None:
    for p in params:
        p.grad = p.grad.clamp(-0.01, 0.01)


CLIPS: dict[str, Callable[[Any], Any]] = {
    "none": lambda _: None,
    "norm": functools.partial(nn.utils.clip_grad_norm_, max_norm=1.0),
    "value": functools.partial(nn.utils.clip_grad_value_, clip_value=0.01),
    "by hand": clamp_by_hand,
}

ROUNDINGS = 2 * (8 + 8)
"""The most roundings to the low dtype between a weight and its gradient: two layers
cast an input, two weights and two biases and compute three ops, the backward computes
seven and casts what enters; a second backward goes this way twice."""

STEP: dict[str, Any] = {"set_to_none": st.booleans(), "turned": st.booleans()}

LINEAR = ("SGD", "OldStyle")
"""Optimizers whose updates are linear in the gradients: so are the updates' errors."""

OUTSIDE = ("penalty", "hook", "accumulate hook", "write", "new", "new data")
"""Where a gradient gets numbers from that no graph has seen."""


class AsGradScaler(RuleBasedStateMachine):
    """What a training loop may do between two steps, in any order."""

    way: str
    label: str

    @initialize(
        named=st.booleans(),
        scheduled=st.sampled_from(["no", "both", "after"]),
        first=st.sampled_from([2.0**15, 2.0**15, 2.0**15, 2.0, 1.0]),
    )
    def begin(self, named: bool, scheduled: str, first: float) -> None:
        chosen = self.chosen = WAYS[self.way]
        kind = chosen.precision, chosen.low if chosen.half else None, chosen.norm
        ours = base(*kind, chosen.options, self.label if chosen.automatic else "")
        theirs = base(*kind, "nothing")
        captured = autoamp.is_converted(ours)
        self.ours: Any = copy.deepcopy(ours)
        if captured:
            scale = chosen.scale(first) if chosen.scale else autoamp.NoLossScale()
            self.ours = fresh_copy(ours, scale)
        self.theirs: Any = copy.deepcopy(theirs)
        self.exact: Any = plain(*kind[1:]).float()
        self.models = [self.ours, self.theirs, self.exact]
        every = [optimizers_of(self.label, model) for model in self.models]
        self.optimizers, self.references, self.exacts = every
        rates = torch.optim.lr_scheduler.StepLR
        if scheduled == "both":
            self.schedules = [rates(o, 99) for o in [*self.optimizers]]
        precision = chosen.precision
        if not captured:
            options = OPTIONS[chosen.options]
            autoamp.convert(self.ours, self.optimizers, precision=precision, **options)
        elif (named and not chosen.automatic) or chosen.half:
            for optimizer in self.optimizers:
                name(optimizer, self.ours)
        if chosen.half:  # with masters, and nothing else
            options = OPTIONS["nothing"]
            autoamp.convert(
                self.theirs, self.references, precision=precision, **options
            )
        if scheduled != "no":
            self.schedules = [rates(o, 99) for o in [*self.optimizers]]
            self.schedules += [rates(o, 99) for o in self.references]
        begun = chosen.scale(first).scale if chosen.scale else 1.0
        self.law = Law(begun, INTERVAL if chosen.scale is dynamic else 0)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        self.scaler.scale(torch.ones(()))  # which makes its tensors
        self.batches = self.steps = 0
        self.went = 0.0
        self.has_gradients = self.stepped = self.written = self.infinite = False
        self.saved: Any = None
        self.buffers = buffers_of(self.theirs)

    def losses(self, factor: float) -> list[Tensor]:
        """Of one number, infinities stay what they are; sums of several make NaNs."""
        x, y = batch(self.batches)
        self.batches += 1
        factor = self.meant(factor)
        part = torch.zeros_like(y)
        part.view(-1)[: 1 if factor == HUGE else None] = 1
        results = [model(x) for model in self.called()]
        if not self.chosen.norm:  # whose buffers this would write to
            with autoamp.disabled(), torch.no_grad():
                now = self.ours(x.to(self.ours[0].weight.dtype)).float()
            if now.isfinite().all():  # no copy of a weight is stale
                eps = torch.finfo(self.chosen.low).eps
                assert relative_error([results[0].detach()], [now]) < 8 * eps
        loss = nn.functional.mse_loss
        return [loss(result * part, y * part) * factor for result in results]

    def called(self) -> list[Callable[[Tensor], Tensor]]:
        """The models as functions of fp32 numbers; the automatic mode has the first."""

        def exact(x: Tensor) -> Tensor:
            with autoamp.disabled():
                result: Tensor = self.exact(x)
            return result

        def call(model: Any, x: Tensor) -> Tensor:
            result: Tensor = model(x.to(model[0].weight.dtype))
            return result.float()

        return [*(functools.partial(call, m) for m in self.models[:2]), exact]

    def meant(self, factor: float) -> float:
        """`factor`; infinity where a huge one would not overflow inside of a graph."""
        # It is finite times a low loss scale; in fp16 it is infinite as it enters.
        never = self.law.scale < 2.0**8 or self.chosen.half
        return math.inf if factor == HUGE and never else factor

    def backward(
        self, *given: list[Tensor], factors: Sequence[float] = (1.0,), **options: Any
    ) -> None:
        """One backward of the sums of all losses; `factors` are those of the losses."""
        ours, theirs, exact = zip(*given, strict=True)
        self.scaled_backward(theirs, factors, **options)
        sum(exact).backward(**options)
        sum(ours).backward(**options)

    def scaled_backward(
        self, losses: Sequence[Tensor], factors: Sequence[float], **options: Any
    ) -> None:
        """As a GradScaler that is updated after each backward."""
        weights = trained(self.theirs)
        before = [p.grad for p in weights]
        found, cures, added = [], [], None
        for loss, factor in zip(losses, factors, strict=True):
            for p in weights:
                p.grad = None
            (loss * self.law.scale).backward(**options)
            grads = [p.grad / self.law.scale for p in weights]
            found.append(not all(g.isfinite().all() for g in grads))
            cures.append(found[-1] and math.isfinite(self.meant(factor)))
            pairs = zip(added or grads, grads, strict=True)
            added = [a + g if added else g for a, g in pairs]
        adds = any(grad is not None for grad in before)
        for p, grad, old in zip(weights, added or [], before, strict=True):
            p.grad = grad if old is None else old + grad
        self.law.backward(any(found), curable=any(cures), adds=adds)
        self.has_gradients = True

    @rule(factor=FACTORS)
    def micro_batch(self, factor: float) -> None:
        self.backward(self.losses(factor), factors=[factor])

    @rule(first=FACTORS, second=FACTORS)
    def one_backward_of_two(self, first: float, second: float) -> None:
        if self.chosen.half:
            # What two uses of a half weight give in one backward is summed in fp32 by
            # our graphs, and in the weight's dtype by torch.
            self.two_backwards(first, second, None)
            return
        given = self.losses(first), self.losses(second)
        self.backward(*given, factors=[first, second])

    @rule(
        first=FACTORS, second=FACTORS, thrown_away=st.sampled_from([None, True, False])
    )
    def two_backwards(
        self, first: float, second: float, thrown_away: bool | None
    ) -> None:
        """Over one forward; the gradients of the first may be thrown away."""
        losses = self.losses(1.0)
        now = [loss * self.meant(first) for loss in losses]
        self.backward(now, factors=[first], retain_graph=True)
        if thrown_away is not None:
            self.zero(set_to_none=thrown_away)
        now = [loss * self.meant(second) for loss in losses]
        self.backward(now, factors=[second])

    @rule(factor=FACTORS)
    def asked_of_autograd(self, factor: float) -> None:
        """As `backward` does it, but the script fills the gradients."""
        self.zero(True)
        ours, theirs, exact = self.losses(factor)
        self.scaled_backward([theirs], [factor])
        for model, loss in ((self.ours, ours), (self.exact, exact)):
            weights = trained(model)
            found = torch.autograd.grad(loss, weights)
            for p, grad in zip(weights, found, strict=True):
                p.grad = grad.to(p.grad_dtype or torch.float32)

    @rule()
    def probe_of_an_input(self) -> None:
        """It fills no weight, has the gradients of scale 1, and changes nothing."""
        x, _ = batch(self.batches)
        x.requires_grad_()
        ours, _, exact = (call(x) for call in self.called())
        [found] = torch.autograd.grad(ours.sum(), x)
        [wanted] = torch.autograd.grad(exact.sum(), x)
        assert wanted.isfinite().all()
        assert found.isfinite().all()

    @rule()
    def probe_of_the_gradients(self) -> None:
        """Their norm, say: a backward as any other, but for the weights' `.grad`."""
        kept = [[p.grad for p in model.parameters()] for model in self.models]
        had, (ours, theirs, exact) = self.has_gradients, self.losses(1.0)
        scale, weights = self.law.scale, trained(self.theirs)
        scaled = torch.autograd.grad(theirs * scale, weights)
        overflows = not all(g.isfinite().all() for g in scaled)
        self.law.backward(overflows, adds=weights[0].grad is not None)
        wanted = torch.autograd.grad(exact, trained(self.exact))
        found = torch.autograd.grad(ours, trained(self.ours))
        assert all(grad.isfinite().all() for grad in wanted)
        assert all(grad.isfinite().all() for grad in found) or overflows
        self.has_gradients = had
        for model, grads in zip(self.models, kept, strict=True):
            assert [*map(id, grads)] == [id(p.grad) for p in model.parameters()]

    @rule(
        kind=st.sampled_from(OUTSIDE),
        value=st.sampled_from([math.nan, math.inf, -math.inf]),
        at=st.integers(0, 3),
    )
    def gradient_from_outside(self, kind: str, value: float, at: int) -> None:
        """Of one weight: the step is skipped, and no loss scale is lowered for it."""
        ours, theirs, exact = self.losses(1.0)
        self.scaled_backward([theirs], [1.0])
        exact.backward()
        bad, *others = [
            trained(model)[at % len(trained(model))] for model in self.models
        ]
        hooks = []
        if kind == "hook":
            hooks = [bad.register_hook(lambda grad: grad * value)]
        elif kind == "accumulate hook":
            hooks = [bad.register_post_accumulate_grad_hook(spoilt_by(value))]
        penalty = (bad * value).sum() if kind == "penalty" else 0
        (ours + penalty).backward()
        for hook in hooks:
            hook.remove()
        if kind == "write":
            bad.grad.mul_(value)
        if kind == "new":
            bad.grad = torch.full_like(bad.grad, value)
        if kind == "new data":
            bad.grad.data = torch.full_like(bad.grad, value)
        for p in others:
            p.grad.fill_(value)
        self.infinite = True

    @rule(layer=st.sampled_from(FROZEN))
    def freeze(self, layer: int | None) -> None:
        self.zero(True)
        for model in self.models:
            freeze(model, layer)

    @precondition(lambda self: self.has_gradients)
    @rule(clip=st.sampled_from(sorted(CLIPS)), **STEP)
    def step(self, clip: str, set_to_none: bool, turned: bool) -> None:
        self.look()
        # No clipping hides a NaN, as which an overflow leaves a graph.  It hides other
        # infinities; and a norm that is not finite spoils all gradients it is of.
        if any(self.bad) and (self.infinite or not all(self.bad)):
            clip = "none"
        for model in self.models:
            CLIPS[clip]([p for p in model.parameters() if p.grad is not None])
        self.take([None] * len(self.optimizers), turned)
        self.zero(set_to_none)

    @precondition(lambda self: self.has_gradients)
    @rule(**STEP)
    def step_if_the_norm_is_finite(self, set_to_none: bool, turned: bool) -> None:
        """The script skips its step by itself; a GradScaler is updated all the same."""
        self.look()
        norms = [
            nn.utils.clip_grad_norm_(
                [p for p in model.parameters() if p.grad is not None], 1.0
            )
            for model in self.models
        ]
        ours, theirs = (bool(norm.isfinite()) for norm in norms[:2])
        assert ours == theirs
        if ours:
            self.take([None] * len(self.optimizers), turned)
        else:
            self.scaler.update(1.0)
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
        ours, theirs, exact = self.losses(factor)
        self.scaled_backward([theirs], [factor])
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
                self.law.step(skipped=bad)
                if not bad:
                    exact.step()
                elif self.chosen.norm:  # which no GradScaler undoes
                    for buffer, old in zip(
                        self.theirs.buffers(), self.buffers, strict=True
                    ):
                        buffer.copy_(old)
                self.buffers = buffers_of(self.theirs)
        self.scaler.update(1.0)
        self.stepped = True
        self.steps += 1
        if self.label in LINEAR and not any(self.bad):
            rate = self.exacts[0].param_groups[0]["lr"]
            way = float((vector(self.exact) - before).norm())
            self.went += max(way, rate * self.large)
        return result

    @rule(set_to_none=st.booleans())
    def zero(self, set_to_none: bool) -> None:
        self.has_gradients = self.infinite = False
        for model in self.models:
            model.zero_grad(set_to_none)
        for optimizer in (*self.optimizers, *self.references):
            optimizer.zero_grad(set_to_none)

    def parts(self, turned: bool = False) -> list[Any]:
        every = [*self.optimizers, *self.references, *self.exacts]
        found = [*self.models, *every]
        return [*(found[::-1] if turned else found)]

    # A skipped step gives back buffers as they were before the forward, whatever has
    # been written to them since.
    @precondition(lambda self: not (self.chosen.norm and self.has_gradients))
    @rule()
    def write(self) -> None:
        """As a script does that averages weights."""
        for model in self.models:
            state = model.state_dict()
            halves = {
                k: v / 2 if v.is_floating_point() else v for k, v in state.items()
            }
            model.load_state_dict(halves)
        self.buffers = buffers_of(self.theirs)
        self.written = True  # by half weights, whose masters lose their digits

    @precondition(lambda self: self.stepped)
    @rule()
    def save(self) -> None:
        states = [part.state_dict() for part in self.parts()]
        law = self.law.scale, self.law.clean, self.law.skipped
        self.saved = copy.deepcopy(states), law, self.steps, self.went

    @precondition(lambda self: self.saved is not None)
    @rule(turned=st.booleans(), overflows=st.booleans())
    def load(self, turned: bool, overflows: bool) -> None:
        """Some scripts go back to their last checkpoint where gradients overflow."""
        if overflows:
            self.micro_batch(HUGE)
        self.zero(True)
        states, law, self.steps, self.went = copy.deepcopy(self.saved)
        of = dict(zip(map(id, self.parts()), states, strict=True))
        for part in self.parts(turned):
            part.load_state_dict(of[id(part)])
        self.law.load(*law)
        self.buffers = buffers_of(self.theirs)

    @invariant()
    def scale_goes_by_the_law(self) -> None:
        if self.chosen.scale is None:
            return
        scale = scaling_of(self.ours).loss_scale
        assert scale.scale == self.law.scale
        assert scale.growth_tracker == self.law.clean
        assert scale.skipped_steps == self.law.skipped

    @invariant()
    def buffers_are_equal(self) -> None:
        assert_same(dict(self.ours.named_buffers()), dict(self.theirs.named_buffers()))

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
        written = self.written and self.chosen.half
        if self.label not in LINEAR or written or self.chosen.norm:
            return
        error = float((vector(self.ours, self.optimizers) - vector(self.exact)).norm())
        eps = torch.finfo(self.chosen.low).eps
        assert error <= ROUNDINGS * self.steps * eps / 2 * self.went + 1e-5


def held(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def spoilt_by(value: float) -> Callable[[Tensor], None]:
    """A hook that multiplies the gradient of a weight."""

    def hook(weight: Tensor) -> None:
        assert weight.grad is not None
        weight.grad.mul_(value)

    return hook


def trained(model: Any) -> list[Any]:
    return [p for p in model.parameters() if p.requires_grad]


def buffers_of(model: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


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
    way: str, label: str, monkeypatch: pytest.MonkeyPatch, off_again: None
) -> None:
    chosen = WAYS[way]
    if chosen.several:
        monkeypatch.setattr("autoamp.compat.are_several", lambda: True)
    if chosen.automatic:
        options = OPTIONS[chosen.options]
        autoamp.enable(precision=chosen.precision, hot=False, **options)
    AsGradScaler.way, AsGradScaler.label = way, label
    if settings().derandomize:  # all cases would draw the same orders
        seed(zlib.crc32(f"{way} {label}".encode()))(AsGradScaler)
    examples = 8 if label in LINEAR else 4
    run_state_machine_as_test(
        AsGradScaler,
        settings=settings(max_examples=examples, stateful_step_count=14, deadline=None),
    )
