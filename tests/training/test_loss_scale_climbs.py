"""A dynamic scale in fp16 finds its place in the first five steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoamp
from autoamp import DynamicLossScale
from autoamp.training.scale import INIT_SCALE, LATER, LOOKS
from tests.quick import some_slow
from tests.says import says
from tests.small_models import Of
from tests.training.steps import FP16, begin_at, scaling_of

CPU = torch.device("cpu")


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x).mean(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def conv() -> nn.Module:
    first, second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
    end = [nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4)]
    return nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU(), second, *end)


class Swelling(nn.Module):
    """Gradients inside are 1000 times those of any weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        nn.init.constant_(self.last.weight, 1000.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x * 1e-6) * 1e-6)


class Checkpointed(Swelling):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (16, 16)),
    "encoder": (Encoder, (4, 6, 16)),
    "conv": (conv, (4, 3, 8, 8)),
    "swelling": (Swelling, (16, 16)),
    "checkpointed": (Checkpointed, (16, 16)),
}
SAMPLE = {"mlp", "conv", "swelling"}
LOSSES = (1e-7, 1.0, 1e4)


class Run:
    """A model in training on one batch, without its weights moving."""

    def __init__(self, name: str, factor: float = 1.0, **options: Any) -> None:
        torch.manual_seed(0)
        make, shape = MODELS[name]
        self.model = make()
        self.factor = factor
        self.x, self.y = torch.randn(shape), torch.randint(0, 4, shape[:1])
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), 0.0)
        autoamp.convert(self.model, self.optimizer, **{**FP16, **options})

    def step(self) -> bool:
        """One step; whether it was skipped."""
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(self.x), self.y)
        (loss * self.factor).backward()
        self.optimizer.step()
        return bool(self.optimizer.step_was_skipped)

    def give(self, scale: DynamicLossScale) -> None:
        """Lets it train with another scale from now on."""
        begin_at(scaling_of(self.model), scale)

    @property
    def scale(self) -> float:
        found = autoamp.report(self.model).loss_scale
        return found.scale


def largest_scale(run: Run) -> float:
    """The largest power of two at which nothing overflows."""
    fits, overflows = -14, 60
    while overflows - fits > 1:
        power = (fits + overflows) // 2
        run.give(DynamicLossScale(2.0**power, climbs=False))
        if run.step():
            overflows = power
        else:
            fits = power
    return 2.0**fits


@pytest.mark.parametrize("name", some_slow(MODELS, lambda name: name not in SAMPLE))
def test_after_five_steps_it_leaves_room_for_losses_that_jump(name: str) -> None:
    run = Run(name)
    for factor in LOSSES:
        run.factor = factor
        largest = largest_scale(run)
        run.give(DynamicLossScale())
        skipped = sum(run.step() for _ in range(5))
        # Like a GradScaler it skips one step for each power of two.
        assert skipped <= max(0.0, math.log2(INIT_SCALE / largest))
        expected = min(INIT_SCALE, largest)
        if largest / 2.0**14 > INIT_SCALE:
            expected = largest / 2.0**13
        if skipped < 5:
            assert expected / 2 <= run.scale <= 2 * expected
            for _ in range(3):
                assert not run.step()


@pytest.mark.parametrize(
    "scale", [2.0**15, DynamicLossScale(2.0**10), DynamicLossScale(climbs=False)]
)
def test_a_scale_that_was_given_stays(scale: Any) -> None:
    run = Run("mlp", 1e-7, loss_scale=scale)
    before = run.scale
    for _ in range(7):
        assert not run.step()
    assert run.scale == before


def test_gradients_are_the_same_watched_or_not() -> None:
    grads = []
    for scale in (DynamicLossScale(), DynamicLossScale(climbs=False)):
        run = Run("conv", 1.0, loss_scale=scale)
        run.step()
        grads.append([p.grad for p in run.model.parameters()])
    for watched, other in zip(*grads, strict=True):
        assert watched is not None
        assert torch.equal(watched, other)


def test_the_first_steps_are_watched_and_few_of_the_rest(monkeypatch) -> None:
    monkeypatch.setattr("autoamp.training.scale.LATER", 12)
    run = Run("mlp", 1.0)
    seen = []
    for _ in range(LOOKS + 2 * 12 + 2):
        seen.append(scaling_of(run.model).loss_scale.wants_size)
        run.step()
    pause = [False] * 12
    assert seen == [True] * LOOKS + pause + [True] + pause + [True]


def test_a_critics_scale_that_has_climbed_suits_its_generator(monkeypatch) -> None:
    """A generator's gradients are 2**12 times the critic's."""
    monkeypatch.setattr("autoamp.training.ledger.ENTRY", 2.0**11)
    torch.manual_seed(0)
    generator, critic = nn.Linear(8, 8), nn.Linear(8, 1)
    optimizers: list[Any] = []
    for model in (generator, critic):
        optimizers.append(torch.optim.SGD(model.parameters(), 0.0))
        autoamp.convert(model, optimizers[-1], **FP16)
    skipped = 0
    for _ in range(6):
        for optimizer, factor in zip(optimizers[::-1], (2.0**-12, 1.0), strict=True):
            for each in optimizers:
                each.zero_grad()
            fake = generator(torch.ones(2, 8))
            critic(fake if factor == 1.0 else fake.detach()).sum().mul(
                factor
            ).backward()
            optimizer.step()
            skipped += bool(optimizer.step_was_skipped)
    assert skipped == 0


# -- the scale by itself ---------------------------------------------------------------


def told(scale: DynamicLossScale, magnitudes: list[float | None]) -> list[float]:
    """The scales after steps with these largest gradients; infinite is an overflow."""
    scales = []
    for magnitude in magnitudes:
        flag = torch.tensor([float(magnitude == math.inf)])
        wanted = scale.wants_size
        scale.update(flag)
        if wanted:
            largest = None if magnitude is None else torch.tensor(magnitude)
            scale.note_size(largest, magnitude == math.inf)
        scale.count_skipped(flag)
        scales.append(math.log2(scale.scale))
    return scales


@pytest.mark.parametrize(
    ("magnitudes", "expected"),
    [
        ([1.0] * 7, [15] * 7),
        ([2.0**-12] * 7, [15] * 7),  # 65504 / 2**13 is 2**3 less a bit
        ([2.0**-15] * 6, [15, 17, 17, 17, 17, 17]),
        ([2.0**-19, 2.0**-15, *[2.0**-19] * 4], [15, 17, 17, 17, 17, 17]),
        ([2.0**-15, *[2.0**-19] * 5], [15, 17, 17, 17, 17, 17]),  # the largest counts
        ([2.0**-40] * 6, [15, 27, 39, 42, 42, 42]),  # in pieces
        ([0.0] * 6, [15] * 6),  # nothing is no measure
        ([None] * 6, [15] * 6),
        ([math.inf, *[2.0**-19] * 5], [14, 14, 21, 21, 21, 21]),
        ([math.inf] * 4 + [2.0**-19] * 2, [14, 13, 12, 11, 11, 21]),
        # What it has climbed by is taken back, and it climbs no more.
        ([2.0**-19] * 4 + [math.inf, *[2.0**-19] * 2], [15, 21, 21, 21, 14, 14, 14]),
        ([1.0] * 5 + [2.0**-19] * 3, [15] * 8),  # then it looks no more for a time
        ([2.0**-19] * 5 + [math.inf, 2.0**-19], [15, 21, 21, 21, 21, 14, 14]),
    ],
)
def test_how_it_climbs(magnitudes: list[float | None], expected: list[float]) -> None:
    assert told(DynamicLossScale(), magnitudes) == expected


def later_looks(magnitudes: list[float | None]) -> list[float]:
    """The scales after a climb at gradients of 2**-12 and each look that follows."""
    given: list[float | None] = [2.0**-12] * LOOKS
    for each in magnitudes:
        given += [None] * LATER
        given.append(each)
    return told(DynamicLossScale(), given)[LOOKS + LATER :: LATER + 1]


@pytest.mark.parametrize(
    ("later", "expected"),
    [
        ([2.0**-12] * 3, [15] * 3),
        # What was seen is forgotten by halves.
        ([2.0**-30] * 6, [15, 16, 17, 18, 19, 20]),
        ([2.0**-16] * 6, [15, 16, 17, 18, 18, 18]),
        ([0.0] * 2, [15, 15]),
        ([None] * 2, [15, 15]),
        ([*[2.0**-30] * 3, 2.0**-12, 2.0**-30], [15, 16, 17, 17, 17]),
        ([*[2.0**-30] * 3, math.inf, 2.0**-30], [15, 16, 17, 14, 14]),
    ],
)
def test_it_follows_gradients_that_shrink(
    later: list[float | None], expected: list[float]
) -> None:
    assert later_looks(later) == expected


@pytest.mark.parametrize("quiet", [2.0**-20, 0.0])
@pytest.mark.parametrize("pause", [1000, 2000, 4000, 8000])
def test_a_later_climb_costs_one_skipped_step_at_most(quiet: float, pause: int) -> None:
    skipped = []
    for scale in (DynamicLossScale(), DynamicLossScale(climbs=False)):
        told(scale, [1.0] * LOOKS + [quiet] * pause)
        before = scale.skipped_steps
        for _ in range(40):
            told(scale, [math.inf if scale.scale > 2.0**15 else 1.0])
        skipped.append(scale.skipped_steps - before)
    assert skipped[0] <= skipped[1] + 1


@pytest.mark.parametrize("quiet", [0.0, 1e-38])
def test_a_scale_never_climbs_to_infinity(quiet: float) -> None:
    scale = DynamicLossScale(2.0**120, climbs=True)
    told(scale, [quiet] * 5 * LATER)
    assert scale.scale <= 2.0**126


def test_a_fresh_state_begins_a_climb_anew() -> None:
    scale = DynamicLossScale()
    fresh = scale.state_dict()
    expected = told(scale, [2.0**-9] * 7)
    scale.load_state_dict(fresh)
    assert told(scale, [2.0**-9] * 7) == expected


def test_an_overflow_between_two_looks_ends_them() -> None:
    quiet: list[float | None] = [2.0**-30] * LATER
    climbing: list[float | None] = [2.0**-12] * LOOKS + [2.0**-30] * 2 * (LATER + 1)
    scales = told(DynamicLossScale(), [*climbing, math.inf, *quiet, *quiet, None, None])
    assert scales[LOOKS + 2 * (LATER + 1) - 1 :: LATER + 1] == [16, 14, 14]


def assert_goes_on_from(at: int, magnitudes: list[float | None]) -> list[float]:
    """A scale saved at step `at` and loaded goes where one goes that was not saved."""
    whole, first, second = (DynamicLossScale() for _ in range(3))
    expected = told(whole, magnitudes)
    told(first, magnitudes[:at])
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert told(second, magnitudes[at:]) == expected[at:]
    return expected


@pytest.mark.parametrize("at", range(8))
def test_a_climb_that_was_interrupted_goes_on(at: int) -> None:
    assert_goes_on_from(at, [math.inf, 2.0**-19, 2.0**-15, *[2.0**-18] * 6])


def test_a_state_saved_before_there_were_climbs_is_exact() -> None:
    old = DynamicLossScale(climbs=False)
    told(old, [1.0] * 3)
    scale = DynamicLossScale()
    scale.load_state_dict(old.state_dict())
    assert not scale.wants_size
    assert told(scale, [2.0**-9] * 3) == [15] * 3
    assert told(scale, [2.0**-9] * 2 * LATER) == [15] * 2 * LATER


@pytest.mark.parametrize(
    ("name", "value"),
    [("looks_left", -1), ("looks_left", 1.0), ("largest_gradient", -1.0)],
)
def test_a_bad_climb_is_an_error(name: str, value: Any) -> None:
    scale = DynamicLossScale()
    told(scale, [1.0] * 2)
    state = scale.state_dict()
    assert name in state
    with pytest.raises(autoamp.LossScaleError) as raised:
        DynamicLossScale().load_state_dict({**state, name: value})
    says(raised, name)


def test_a_look_at_a_copy_whose_uses_sum_their_gradients_in_fp32() -> None:
    """No gradient flows through the copy itself, and its hook is called with none."""

    def attention(m: nn.Module, x: Tensor) -> Tensor:
        x = m.norm(x)
        q, k, v = (part(x) for part in m.parts)
        return nn.functional.scaled_dot_product_attention(q, k, v)

    parts = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
    model = autoamp.convert(Of(attention, norm=nn.LayerNorm(16), parts=parts), **FP16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(6):
        optimizer.zero_grad()
        (model(torch.randn(2, 4, 16)).square().mean() * 1e-6).backward()
        optimizer.step()
    assert scaling_of(model).loss_scale.scale > INIT_SCALE
