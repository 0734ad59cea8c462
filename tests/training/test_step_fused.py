"""Fused optimizers, whose kernels read the overflow flag: no step waits for the device.

On a CPU the flag lies in the host's memory and is read at once; here that is forbidden,
so that the other way is taken, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autoamp import LossScaleError
from tests.training.steps import (
    HUGE,
    OPTIMIZERS,
    Reads,
    as_on_a_gpu,
    assert_same,
    batch,
    converted,
    fresh_copy,
    loss_of,
    mlp,
    moved,
    name,
    scaling_of,
    state_of,
    weights_of,
)

pytestmark = pytest.mark.one_model

FUSED = [
    label
    for label, make_one in OPTIMIZERS.items()
    if label.endswith("fused")
    # Adagrad's of torch 2.11 is handed no flag, and so its step waits.
    and getattr(make_one(mlp()), "_step_supports_amp_scaling", False)
]
STEPS = 4


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)


def make(label: str, model: nn.Module) -> Any:
    return name(OPTIMIZERS[label](model), model)


@pytest.mark.parametrize("bad", [0, 1, 3])
@pytest.mark.parametrize("label", FUSED)
@pytest.mark.usefixtures("as_on_gpu")
def test_a_skip_without_a_wait(base: nn.Module, label: str, bad: int) -> None:
    results, scales = [], []
    for bads in ((), (bad,)):
        model = fresh_copy(base)
        optimizer = make(label, model)
        for number in range(STEPS):
            for factor in (HUGE, 1.0) if number in bads else (1.0,):
                loss_of(model, number, factor).backward()
                torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
                before = weights_of(model), state_of(optimizer)
                with Reads() as reads:
                    optimizer.step()
                optimizer.zero_grad()
                # The first step waits: state has to be made, or not.
                first = not number and "Adagrad" not in label
                assert (reads.count > 0) == first
                assert bool(optimizer.step_was_skipped) == (factor != 1.0)
                assert isinstance(optimizer.step_was_skipped, bool) == first
                assert not hasattr(optimizer, "found_inf")
                if factor != 1.0:
                    assert_same((weights_of(model), state_of(optimizer)), before)
        results.append((weights_of(model), state_of(optimizer)))
        scales.append(scaling_of(model).loss_scale)
    assert_same(results[0], results[1])
    assert scales[1].scale == 2.0**14
    assert scales[1].skipped_steps == 1
    assert scales[1].growth_tracker == STEPS - bad


@pytest.mark.usefixtures("as_on_gpu")
def test_hooks_fire_as_under_grad_scaler(base: nn.Module) -> None:
    model = fresh_copy(base)
    optimizer = make("Adam-fused", model)
    fired: list[Any] = []
    for when in ("pre", "post"):
        register = getattr(optimizer, f"register_step_{when}_hook")
        register(lambda o, *_, w=when: fired.append((w, bool(o.step_was_skipped))))
    for factor in (1.0, HUGE, 1.0):
        loss_of(model, 0, factor).backward()
        optimizer.step()
        assert bool(optimizer.step_was_skipped) == (factor != 1.0)
        optimizer.zero_grad()
    # A step is marked after the kernel: its hooks see how the step before it went.
    assert fired == [(w, was) for was in (False, False, True) for w in ("pre", "post")]
    assert isinstance(optimizer.step_was_skipped, torch.Tensor)


@pytest.mark.usefixtures("as_on_gpu")
@pytest.mark.parametrize("lowest", [False, True])
def test_loaded_state_met_at_its_first_step(base: nn.Module, lowest: bool) -> None:
    """The step has begun, so that no kernel can be given the flag: the host reads it.

    So the skipped step is reported, and is an error at the lowest loss scale, as the
    first step of any other optimizer is.
    """
    model = fresh_copy(base, min_scale=2.0**15 if lowest else 1.0)
    other = make("Adam-fused", model)
    loss_of(model, 0).backward()
    other.step()
    model.zero_grad()
    scaling = scaling_of(model)
    loss_of(model, 1, HUGE).backward()
    optimizer: Any = OPTIMIZERS["Adam-fused"](model)
    optimizer.load_state_dict(state_of(other))
    before = weights_of(model), state_of(optimizer)
    if lowest:
        with pytest.raises(LossScaleError):
            optimizer.step()
    else:
        optimizer.step()
        assert scaling.loss_scale.scale == 2.0**14
        assert scaling.loss_scale.skipped_steps == 1
    assert optimizer.step_was_skipped is True
    assert_same((weights_of(model), state_of(optimizer)), before)
    assert len(scaling.ledger.skips) == 1


def sgd_of(model: Any, momentum: float) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum, fused=True)
    return name(optimizer, model)


@pytest.mark.usefixtures("as_on_gpu")
def test_sgd_whose_momentum_comes_later(base: nn.Module) -> None:
    """It has stepped and has no buffer yet: a skipped kernel would leave garbage."""
    results = []
    for planted in (False, True):
        model = fresh_copy(base)
        optimizer = sgd_of(model, 0.0)
        for number in range(4):
            if number == 2:
                optimizer.param_groups[0]["momentum"] = 0.9
                if planted:
                    loss_of(model, 9, HUGE).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    assert optimizer.step_was_skipped
            loss_of(model, number).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append((weights_of(model), state_of(optimizer)))
    assert_same(results[0], results[1])


@pytest.mark.usefixtures("as_on_gpu")
def test_sgd_without_momentum_never_waits(base: nn.Module) -> None:
    model = fresh_copy(base)
    optimizer = sgd_of(model, 0.0)
    for number, factor in enumerate((HUGE, 1.0, HUGE)):
        before = weights_of(model)
        loss_of(model, number, factor).backward()
        with Reads() as reads:
            optimizer.step()
        optimizer.zero_grad()
        assert reads.count == 0
        assert moved(before, model) == (factor == 1.0)


@pytest.mark.usefixtures("as_on_gpu")
def test_weights_added_later_have_their_first_step_with_a_wait(base: nn.Module) -> None:
    model: Any = fresh_copy(base)
    optimizer: Any = torch.optim.SGD(
        model[0].parameters(), 0.1, momentum=0.9, fused=True
    )
    name(optimizer, model)
    for number in range(2):
        loss_of(model, number).backward()
        optimizer.step()
        model.zero_grad()
    optimizer.add_param_group({"params": [*model[2].parameters()]})
    before = weights_of(model), state_of(optimizer)
    loss_of(model, 3, HUGE).backward()
    optimizer.step()
    assert optimizer.step_was_skipped is True
    assert_same((weights_of(model), state_of(optimizer)), before)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("label", FUSED)
def test_no_step_waits_for_the_gpu(label: str, precision: str) -> None:
    model = converted(precision=precision).cuda()
    factory: Callable[[nn.Module], Any] = OPTIMIZERS[label]
    optimizer: Any = name(factory(model), model)
    skipped, before = [], weights_of(model)
    for number, factor in enumerate((1.0, 1.0, HUGE, 1.0, HUGE)):
        x, y = (t.cuda() for t in batch(number))
        (nn.functional.mse_loss(model(x), y) * factor).backward()
        before = weights_of(model)
        torch.cuda.set_sync_debug_mode("error" if number else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        optimizer.zero_grad()
        skipped.append(bool(optimizer.step_was_skipped))
        assert moved(before, model) == (factor == 1.0)
    assert skipped == [False, False, True, False, True]
    assert scaling_of(model).loss_scale.skipped_steps == 2
