"""Training resumed from a checkpoint goes on bit for bit."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import autoamp
from autoamp import AutoampError, DynamicLossScale, LossScaleError
from autoamp.errors import CheckpointError
from tests.quick import some_slow
from tests.training.steps import (
    BF16,
    HUGE,
    assert_same,
    loss_of,
    mlp,
    moved,
    scaling_of,
    state_of,
    weights_of,
)

BADS = {2, 6}
STEPS = 12


def scale() -> DynamicLossScale:
    return DynamicLossScale(growth_interval=3)


class Training:
    """A model, its optimizer and scheduler, and one step of them."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.model: nn.Module = mlp()
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), 0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.9)
        self.losses: list[float] = []

    def convert(self, named: bool = True) -> Training:
        options = {**BF16, "loss_scale": scale()}
        autoamp.convert(self.model, self.optimizer if named else None, **options)
        return self

    def step(self, number: int, bads: set[int] | frozenset[int] = BADS) -> None:
        loss = loss_of(self.model, number, HUGE if number in bads else 1.0)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.losses.append(loss.item())

    def save(self) -> bytes:
        file = io.BytesIO()
        parts = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
        }
        torch.save({k: v.state_dict() for k, v in parts.items()}, file)
        return file.getvalue()

    def load(self, saved: bytes) -> Training:
        state = torch.load(io.BytesIO(saved), weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        return self

    def everything(self) -> Any:
        report = autoamp.report(self.model).loss_scale
        assert report is not None
        return (
            weights_of(self.model),
            state_of(self.optimizer),
            self.scheduler.state_dict(),
            scaling_of(self.model).loss_scale.state_dict(),
        )


ORDERS = ["named, loaded", "loaded, named", "loaded, converted", "converted, loaded"]


def resumed(saved: bytes, order: str) -> Training:
    training = Training()
    for what in order.split(", "):
        if what == "loaded":
            training.load(saved)
        else:
            training.convert(named=what == "named")
    return training


@pytest.mark.parametrize("at", some_slow((1, 3, 7), lambda at: at != 3))
@pytest.mark.parametrize("order", ORDERS)
def test_resumed_training_goes_on_bit_for_bit(order: str, at: int) -> None:
    whole = Training().convert()
    for number in range(at):
        whole.step(number)
    saved = whole.save()
    again = resumed(saved, order)
    for number in range(at, STEPS):
        whole.step(number)
        again.step(number)
        assert again.losses[-1] == whole.losses[-1]
        assert_same(again.everything(), whole.everything())
    state = scaling_of(whole.model).loss_scale.state_dict()
    assert state["skipped_steps"] == 2  # overflows and growth were among them
    assert state["scale"] == 2.0**15


@pytest.mark.parametrize("order", ORDERS)
def test_saved_again_before_the_first_step(order: str) -> None:
    whole = Training().convert()
    for number in range(4):
        whole.step(number)
    saved = whole.save()
    twice = resumed(resumed(saved, order).save(), "named, loaded")
    assert_same(twice.everything(), whole.everything())


# -- in and out of runs without us -----------------------------------------------------


def test_checkpoint_goes_into_plain_training_and_back() -> None:
    gc.collect()  # models of other tests, which pass gradients on to anybody's
    training = Training().convert()
    for number in range(4):
        training.step(number)
    plain = Training().load(training.save())
    plain.step(5, bads=frozenset())
    assert "_autoamp" not in vars(plain.optimizer)
    back = Training().convert().load(plain.save())
    assert (
        scaling_of(back.model).loss_scale.state_dict()
        == scaling_of(training.model).loss_scale.state_dict()
    )
    assert_same(weights_of(back.model), weights_of(plain.model))


def test_plain_checkpoint_begins_a_new_scale() -> None:
    plain = Training()
    plain.step(0)
    for order in ORDERS:
        training = resumed(plain.save(), order)
        assert scaling_of(training.model).loss_scale.scale == 2.0**15
        training.step(1)
        assert moved(weights_of(plain.model), training.model)


def test_checkpoint_goes_through_a_run_in_bf16_without_scaling() -> None:
    training = Training().convert()
    for number in range(4):
        training.step(number)
    other = Training()
    autoamp.convert(other.model, other.optimizer, **{**BF16, "loss_scale": "off"})
    other.load(training.save())
    other.step(8, bads=frozenset())
    back = Training().convert().load(other.save())
    assert (
        scaling_of(back.model).loss_scale.state_dict()
        == scaling_of(training.model).loss_scale.state_dict()
    )


# -- several models --------------------------------------------------------------------


class Two:
    """Two models, one optimizer; called together, or the second later."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.models = [mlp(), mlp()]
        params = [p for m in self.models for p in m.parameters()]
        self.optimizer: Any = torch.optim.SGD(params, 0.1, momentum=0.9)
        for model in self.models:
            autoamp.convert(model, **{**BF16, "loss_scale": scale()})

    def step(self, number: int, which: int | None) -> None:
        """Together in one backward (None), or one of them alone."""
        used = self.models if which is None else [self.models[which]]
        # Together they only grow: the lower of two scales would be the saved one.
        factor = HUGE if number in BADS and which is not None else 1.0
        torch.stack([loss_of(m, number, factor) for m in used]).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def everything(self) -> Any:
        scales = [scaling_of(m).loss_scale.state_dict() for m in self.models]
        return [weights_of(m) for m in self.models], state_of(self.optimizer), scales


@pytest.mark.parametrize("which", [[None] * 8, [0, 0, 0, 1, 1, 0, 1, 0]])
def test_several_models_each_resume_with_their_own_scale(which: list[Any]) -> None:
    whole = Two()
    for number in range(4):
        whole.step(number, which[number])
    again = Two()
    for mine, theirs in zip(again.models, whole.models, strict=True):
        mine.load_state_dict(theirs.state_dict())
    again.optimizer.load_state_dict(copy.deepcopy(whole.optimizer.state_dict()))
    for number in range(4, 8):
        whole.step(number, which[number])
        again.step(number, which[number])
    if which[0] is None:
        assert_same(again.everything(), whole.everything())
    assert_same(again.everything()[:2], whole.everything()[:2])


def test_a_model_met_late_does_not_set_the_others_back() -> None:
    whole = Two()
    for number in range(4):
        whole.step(number, number % 2)
    again = Two()
    again.optimizer.load_state_dict(copy.deepcopy(whole.optimizer.state_dict()))
    saved = whole.everything()[2]
    again.step(0, 0)
    again.step(1, 0)
    first = scaling_of(again.models[0]).loss_scale.state_dict()
    assert first != saved[0]
    with torch.no_grad():
        again.models[1](torch.randn(2, 8))
    again.step(2, 1)
    again.step(3, 1)
    assert scaling_of(again.models[0]).loss_scale.state_dict() == first


# -- states that cannot be used --------------------------------------------------------

GOOD = {**scale().state_dict(), "scale": 64.0}
BAD: dict[str, Any] = {
    "missing": {k: v for k, v in GOOD.items() if k != "growth_tracker"},
    "extra": {**GOOD, "colour": "red"},
    "wrong kind": {"kind": "StaticLossScale", "scale": -8.0, "skipped_steps": 0},
    "value": {**GOOD, "scale": -1.0},
    "type": [1.0],
    "none": None,
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_scale_is_an_error_and_changes_nothing(what: str) -> None:
    training = Training().convert()
    for number in range(4):
        training.step(number)
    before = training.everything()
    state = copy.deepcopy(training.optimizer.state_dict())
    for entry in state["state"].values():
        entry["exp_avg"].zero_()
    state["param_groups"][0]["autoamp"]["loss_scales"] = [BAD[what]]
    with pytest.raises(LossScaleError):
        training.optimizer.load_state_dict(state)
    assert_same(training.everything(), before)
    training.step(5)  # and it goes on


@pytest.mark.parametrize(
    "entry", [{}, {"loss_scales": 3}, {"loss_scales": [], "masters": 1}, 7, None]
)
@pytest.mark.parametrize("known", [True, False])
def test_a_damaged_entry_is_a_clear_error(entry: Any, known: bool) -> None:
    training = Training()
    if known:
        training.convert()
    before = weights_of(training.model), state_of(training.optimizer)
    state = copy.deepcopy(training.optimizer.state_dict())
    state["param_groups"][0]["autoamp"] = entry
    if not known:
        training.optimizer.load_state_dict(state)  # plain until then: it cannot know
    act = training.optimizer.load_state_dict if known else lambda _: training.convert()
    with pytest.raises(CheckpointError):
        act(state)
    assert_same((weights_of(training.model), state_of(training.optimizer)), before)
    if not known:
        assert "_autoamp" not in vars(training.optimizer)
        assert "autoamp" in training.optimizer.param_groups[0]  # said again next time
        with pytest.raises(AutoampError):
            training.convert()


def test_state_of_another_optimizer_changes_nothing() -> None:
    training = Training().convert()
    training.step(0)
    before = training.everything()
    state = copy.deepcopy(training.optimizer.state_dict())
    state["param_groups"][0]["autoamp"]["loss_scales"][0]["scale"] = 4.0
    state["param_groups"][0]["params"].append(9)
    with pytest.raises(ValueError, match="param"):  # torch's own
        training.optimizer.load_state_dict(state)
    assert_same(training.everything(), before)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))]
)
def test_copied_optimizers_are_met_again(duplicate: Any) -> None:
    training = Training().convert()
    for number in range(2):
        training.step(number)
    twin = duplicate([training.model, training.optimizer])[1]
    assert "step" not in vars(twin)
    assert "autoamp" not in twin.param_groups[0]
    # It takes the place of the first: the same weights, found at its first step.
    for mine, theirs in zip(
        twin.param_groups, training.optimizer.param_groups, strict=True
    ):
        old = dict(zip(mine["params"], theirs["params"], strict=True))
        mine["params"] = theirs["params"]
        for copied, weight in old.items():
            twin.state[weight] = twin.state.pop(copied)
    before = weights_of(training.model), state_of(twin)
    loss_of(training.model, 2, HUGE).backward()
    twin.step()
    assert twin.step_was_skipped is True
    assert_same((weights_of(training.model), state_of(twin)), before)
