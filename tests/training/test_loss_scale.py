"""Loss scales by themselves: how they move, what they save, what they refuse."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autoamp
from autoamp import (
    DynamicLossScale,
    LossScale,
    LossScaleError,
    NoLossScale,
    StaticLossScale,
)
from tests.says import says

CPU = torch.device("cpu")
SMALLEST = torch.finfo(torch.float32).tiny

UNUSUAL: dict[str, Any] = {
    "init_scale": 1024.0,
    "growth_factor": 3.0,
    "backoff_factor": 0.25,
    "growth_interval": 7,
    "min_scale": 0.125,
    "hysteresis": 3,
}


def flag(found: bool) -> torch.Tensor:
    return torch.full((1,), float(found))


def moved(scale: LossScale, pattern: str) -> LossScale:
    """`scale` after one update per letter: x an overflow, . none."""
    for letter in pattern:
        scale.update(flag(letter == "x"))
        scale.count_skipped(flag(letter == "x"))
    return scale


def history(scale: LossScale, pattern: str) -> list[float]:
    return [moved(scale, letter).scale for letter in pattern]


# -- as GradScaler ---------------------------------------------------------------------


class ScalerStandIn:
    """`torch.amp.GradScaler` driven by a pattern of overflows."""

    def __init__(self, **options: Any) -> None:
        self.scaler = torch.amp.GradScaler("cpu", **options)
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([self.weight], 0.0)

    def move(self, found: bool) -> tuple[float, int]:
        self.scaler.scale(torch.zeros(1))  # makes its tensors
        self.weight.grad = torch.full((1,), math.inf if found else 0.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale(), self.scaler._get_growth_tracker()


@given(
    pattern=st.lists(st.booleans(), max_size=40),
    init_exponent=st.integers(-5, 100),
    growth_factor=st.sampled_from([1.5, 2.0, 3.0, 1e10]),
    backoff_factor=st.sampled_from([0.5, 0.3, 0.9]),
    growth_interval=st.integers(1, 5),
)
def test_moves_as_grad_scaler(
    pattern: list[bool],
    init_exponent: int,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> None:
    options: dict[str, Any] = {
        "init_scale": 2.0**init_exponent,
        "growth_factor": growth_factor,
        "backoff_factor": backoff_factor,
        "growth_interval": growth_interval,
    }
    theirs = ScalerStandIn(**options)
    ours = DynamicLossScale(**options, min_scale=SMALLEST)
    for found in pattern:
        ours.update(flag(found))
        assert (ours.scale, ours.growth_tracker) == theirs.move(found)


def test_never_grows_to_infinity() -> None:
    scale = DynamicLossScale(2.0**126, growth_interval=1)
    assert history(scale, "...") == [2.0**127] * 3
    _, inverse = scale.tensors(CPU)
    assert float(inverse) == 2.0**-127


# -- floor and hysteresis --------------------------------------------------------------


def test_stops_at_the_floor() -> None:
    scale = DynamicLossScale(8.0, min_scale=3.0, growth_interval=2)
    assert history(scale, "xx") == [4.0, 3.0]
    assert not scale.is_stuck
    assert history(scale, "x") == [3.0]
    assert scale.is_stuck
    assert history(scale, "..") == [3.0, 6.0]
    assert not scale.is_stuck


def test_overflows_at_one_scale_lower_it_once() -> None:
    """The forwards of micro-batches that came before the first overflow."""
    scale, used = DynamicLossScale(64.0), torch.tensor(64.0)
    for _ in range(3):
        scale.update(torch.ones(1), used)
    assert scale.scale == 32.0
    assert scale.overflowed_at == 64.0
    scale.update(torch.ones(1), torch.tensor(8.0))  # a gradient that entered was large
    assert scale.scale == 4.0


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("xxx", [64, 32, 32]),  # two to back off, and from anew
        ("xxxx", [64, 32, 32, 16]),
        ("x.x", [64, 64, 32]),  # a clean step does not give patience back
        ("x...x.x", [64, 64, 64, 128, 128, 128, 64]),  # a move does
        ("..x...", [64, 64, 64, 64, 64, 128]),  # an overflow starts the count anew
    ],
)
def test_hysteresis(pattern: str, expected: list[float]) -> None:
    scale = DynamicLossScale(64.0, growth_interval=3, hysteresis=2)
    assert history(scale, pattern) == expected


def test_static_and_none_do_not_move() -> None:
    static, none = StaticLossScale(128.0), NoLossScale()
    assert history(static, "x.x") == [128.0] * 3
    assert history(none, "x.x") == [1.0] * 3
    assert static.skipped_steps == 2
    assert not static.is_stuck
    assert static.growth_tracker == none.growth_tracker == 0


# -- tensors ---------------------------------------------------------------------------


def test_tensors_given_are_never_written_to() -> None:
    """A backward may come after the scale has moved: it finds what it was given."""
    scale = DynamicLossScale(64.0, growth_interval=1)
    given_before = scale.tensors(CPU)
    assert scale.tensors(CPU)[0] is given_before[0]  # nothing is made anew
    moved(scale, ".x.")
    assert [float(t) for t in given_before] == [64.0, 1 / 64]
    assert [float(t) for t in scale.tensors(CPU)] == [128.0, 1 / 128]
    scale.load_state_dict(DynamicLossScale(2.0).state_dict())
    assert [float(t) for t in scale.tensors(CPU)] == [2.0, 0.5]


def test_inverse_is_the_one_of_grad_scaler() -> None:
    """The reciprocal in fp64, then rounded."""
    for value in (3.0, 7e-3, 65535.0, 1e30):
        scale, inverse = StaticLossScale(value).tensors(CPU)
        assert torch.equal(inverse, scale.double().reciprocal().float())


# -- state -----------------------------------------------------------------------------


def kinds() -> list[LossScale]:
    return [
        moved(DynamicLossScale(**UNUSUAL), "..x.."),
        moved(StaticLossScale(96.0), "x"),
        NoLossScale(),
    ]


def others() -> list[LossScale]:
    return [DynamicLossScale(), StaticLossScale(2.0), NoLossScale()]


@pytest.mark.parametrize("kind", range(3))
def test_every_field_round_trips(kind: int) -> None:
    saved, fresh = kinds()[kind], others()[kind]
    state = saved.state_dict()
    fresh.load_state_dict(state)
    assert fresh.state_dict() == state
    assert repr(fresh) == repr(saved)
    for pattern in ("x", "x", ".", ".....", "xxx"):
        assert moved(fresh, pattern).state_dict() == moved(saved, pattern).state_dict()


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))]
)
def test_copies_move_by_themselves(duplicate: Any) -> None:
    scale = kinds()[0]
    twin = duplicate(scale)
    assert twin.state_dict() == scale.state_dict()
    before = scale.state_dict()
    moved(twin, "xxx")
    assert scale.state_dict() == before


DYNAMIC_STATE = {
    **DynamicLossScale().state_dict(),
    "scale": 512.0,
    "growth_tracker": 5,
    "skipped_steps": 2,
}

BAD_STATES: dict[str, tuple[Any, str]] = {
    "no dict": ([1, 2], "list"),
    "empty": ({}, "growth_tracker"),
    "of GradScaler": ({**torch.amp.GradScaler("cpu").state_dict()}, "_growth_tracker"),
    "extra": ({**DYNAMIC_STATE, "depth": 1}, "depth"),
    "other kind": ({**DYNAMIC_STATE, "kind": "StaticLossScale"}, "StaticLossScale"),
    "zero": ({**DYNAMIC_STATE, "scale": 0.0}, "scale=0.0"),
    "0 in fp32": ({**DYNAMIC_STATE, "scale": 1e-50}, "scale=1e-50"),
    "tracker": ({**DYNAMIC_STATE, "growth_tracker": 1.5}, "growth_tracker=1.5"),
    "beyond": ({**DYNAMIC_STATE, "growth_tracker": 2000}, "growth_tracker=2000"),
    "patience": ({**DYNAMIC_STATE, "hysteresis_left": 2}, "hysteresis_left=2"),
    "skipped": ({**DYNAMIC_STATE, "skipped_steps": None}, "skipped_steps=None"),
    "factor": ({**DYNAMIC_STATE, "growth_factor": 0.5}, "growth_factor=0.5"),
    "floor": ({**DYNAMIC_STATE, "min_scale": 2.0**20}, "min_scale="),
}


@pytest.mark.parametrize("name", BAD_STATES)
def test_a_bad_state_is_an_error_and_changes_nothing(name: str) -> None:
    state, value = BAD_STATES[name]
    scale = kinds()[0]
    before, tensors = scale.state_dict(), scale.tensors(CPU)
    with pytest.raises(LossScaleError) as raised:
        scale.load_state_dict(state)
    says(raised, value)
    assert scale.state_dict() == before
    assert scale.tensors(CPU)[0] is tensors[0]


@given(
    name=st.sampled_from(sorted(DYNAMIC_STATE)),
    value=st.one_of(
        st.none(), st.integers(), st.floats(), st.text(max_size=3), st.booleans()
    ),
)
def test_a_state_is_loaded_whole_or_not_at_all(name: str, value: Any) -> None:
    scale = kinds()[0]
    before, state = scale.state_dict(), {**DYNAMIC_STATE, name: value}
    try:
        scale.load_state_dict(state)
    except LossScaleError:
        assert scale.state_dict() == before
    else:
        assert scale.state_dict()[name] == pytest.approx(state[name], rel=1e-7)


# -- construction ----------------------------------------------------------------------

NOT_POSITIVE = [0, -1.0, math.nan, math.inf, -math.inf, "x", None, True, 1e39, 1e-50]
NOT_POSITIVE += [10**400, 2 + 0j]
NOT_COUNTS = [0, -3, 2.0, math.inf, "4", None, True, 2**40]
BAD_OPTIONS: list[dict[str, Any]] = [
    *({"growth_factor": value} for value in NOT_POSITIVE),
    *({"backoff_factor": value} for value in NOT_POSITIVE),
    *({"init_scale": value} for value in NOT_POSITIVE),
    *({"min_scale": value} for value in NOT_POSITIVE),
    *({"growth_interval": value} for value in NOT_COUNTS),
    *({"hysteresis": value} for value in NOT_COUNTS),
    {"growth_factor": 1.0},
    {"backoff_factor": 1},
    {"min_scale": 2.0, "init_scale": 1.0},
]


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=lambda o: repr(o)[1:30])
def test_a_scale_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(LossScaleError) as raised:
        DynamicLossScale(**options)
    says(raised, option=f"{next(iter(options))}=")


@pytest.mark.parametrize(
    "value", [*NOT_POSITIVE, "DYNAMIC", [8], {}], ids=lambda v: repr(v)[:9]
)
def test_convert_refuses_bad_scales(value: Any) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(autoamp.AutoampError) as raised:
        autoamp.convert(model, precision="fp16", loss_scale=value)
    says(raised, option="loss_scale=")
    assert not autoamp.is_converted(model)
    assert "forward" not in model.__dict__


def test_repr_says_how_to_make_it_again() -> None:
    scale = DynamicLossScale(**UNUSUAL)
    names = {"DynamicLossScale": DynamicLossScale, "StaticLossScale": StaticLossScale}
    again = eval(repr(scale), names)
    assert again.state_dict() == scale.state_dict()
    assert repr(StaticLossScale(8)) == "StaticLossScale(8.0)"
    assert repr(NoLossScale()) == "NoLossScale()"
