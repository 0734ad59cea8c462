"""A half-precision model that a bad batch meets: its step leaves all state as it was.

No graph of ours runs such a model, named to `convert` or found by the automatic mode.
"""

from __future__ import annotations

import copy
import logging
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp.training.attach import guard_half, retire
from autoamp.training.options import Options
from tests.quick import each_pair
from tests.says import says
from tests.small_models import WIDTH, Of
from tests.training.steps import is_watched

BF16, FP16 = torch.bfloat16, torch.float16
Make = Callable[[], nn.Module]


@pytest.fixture(autouse=True)
def switched_off() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    autoamp.disable()


def _codebook(m: Any, x: Tensor) -> Tensor:
    x = m.fc(x)
    nearest = m.book[torch.cdist(x.float(), m.book.float()).argmin(1)]
    with torch.no_grad():  # no version counter tells of a write through `.data`
        m.book.data.mul_(0.9).add_(0.1 * x.mean(0))
        m.used += 1
    return x + (nearest - x).detach()


def _beside(norm: nn.Module, *shape: int) -> nn.Module:
    unfold = nn.Unflatten(1, shape) if shape else nn.Identity()
    layers = nn.Linear(WIDTH, WIDTH), unfold, norm, nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


MODELS: dict[str, Make] = {
    "batch": lambda: _beside(nn.BatchNorm1d(WIDTH)),
    "cumulative": lambda: _beside(nn.BatchNorm1d(WIDTH, momentum=None)),
    "instance": lambda: _beside(
        nn.InstanceNorm1d(2, track_running_stats=True), 2, WIDTH // 2
    ),
    "codebook": lambda: Of(
        _codebook,
        fc=nn.Linear(WIDTH, WIDTH),
        book=torch.randn(5, WIDTH),
        used=torch.tensor(0),
    ),
}


def _partly(dtype: torch.dtype) -> nn.Module:
    """A model in half precision whose norms are fp32."""
    model = MODELS["batch"]().to(dtype)
    model[2].float()
    model.forward = lambda x: model[4](model[2](model[0](x).float()).to(dtype))
    return model


def _adam(model: nn.Module, **options: Any) -> Any:
    # The usual eps of 1e-8 is 0 in fp16, where a state in fp16 divides by it.
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, **options)


def _state(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """All numbers of a model and its optimizer, the masters included."""
    saved = optimizer.state_dict()
    of_weights = [v for each in saved["state"].values() for v in each.values()]
    every = [
        *model.state_dict().values(),
        *of_weights,
        *saved.get("autoamp_masters", {}).values(),
    ]
    return [value.clone() for value in every if isinstance(value, Tensor)]


def _same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def _step(model: nn.Module, optimizer: Any, *bad: bool) -> bool:
    """Takes a step over a batch for each of `bad`; whether all state is as before."""
    before = _state(model, optimizer)
    optimizer.zero_grad()
    dtype = next(model.parameters()).dtype
    for is_bad in bad:
        x = torch.randn(6, WIDTH, dtype=dtype)
        loss = model(x * torch.nan if is_bad else x).float().square().mean()
        loss.backward()
    optimizer.step()
    return _same(_state(model, optimizer), before)


def _begin(how: str, model: nn.Module, optimizer: Any, **options: Any) -> None:
    """Names the model and its optimizers, or has the automatic mode find them."""
    given: Any = {"do_no_harm": False, **options}
    if how == "convert":
        autoamp.convert(model, optimizer, **given)
    else:
        autoamp.enable(hot=how == "enable, hot", **given)


WAYS = ["convert", "enable", "enable, hot"]


@pytest.mark.parametrize(
    ("how", "dtype", "masters", "name"),
    each_pair(WAYS, [BF16, FP16], ["auto", "off"], MODELS),
    ids={BF16: "bf16", FP16: "fp16"}.get,
)
def test_a_bad_batch_changes_nothing(
    how: str, dtype: torch.dtype, masters: str, name: str
) -> None:
    """CI has each pair of a way, a dtype, masters and a model."""
    model = MODELS[name]().to(dtype)
    optimizer = _adam(model)
    _begin(how, model, optimizer, masters=masters)
    for bad in (False, True, True, False, True):
        assert _step(model, optimizer, bad) == bad
        assert bool(optimizer.step_was_skipped) == bad


def _with_a_closure(model: nn.Module, optimizer: Any, *bad: bool) -> bool:
    before = _state(model, optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        x = torch.randn(6, WIDTH, dtype=next(model.parameters()).dtype)
        loss = model(x * torch.nan if bad[0] else x).float().square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    return _same(_state(model, optimizer), before)


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "fused": lambda model: _adam(model, fused=True),
    "foreach": lambda model: _adam(model, foreach=True),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), 0.01, 0.9),
}


@pytest.mark.parametrize("step", [_step, _with_a_closure], ids=["plain", "closure"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("how", WAYS[:2])
def test_whatever_the_optimizer_is(how: str, kind: str, step: Any) -> None:
    model = MODELS["batch"]().to(BF16)
    optimizer = OPTIMIZERS[kind](model)
    _begin(how, model, optimizer, masters="fp32")
    for bad in (False, True, False):
        assert step(model, optimizer, bad) == bad


def test_the_first_batch_may_be_bad_in_the_automatic_mode() -> None:
    model = MODELS["batch"]().to(BF16)
    optimizer = _adam(model)
    before = [value.clone() for value in model.state_dict().values()]
    _begin("enable", model, optimizer)
    _step(model, optimizer, True)
    assert _same([*model.state_dict().values()], before)
    assert not optimizer.state
    assert not _step(model, optimizer, False)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("how", WAYS[:2])
def test_a_model_partly_in_half_precision(how: str, dtype: torch.dtype) -> None:
    model = _partly(dtype)
    optimizer = _adam(model)
    _begin(how, model, optimizer)
    for bad in (False, True, False):
        assert _step(model, optimizer, bad) == bad


@pytest.mark.parametrize("how", WAYS[:2])
def test_an_accumulated_step_is_undone_from_its_first_batch(how: str) -> None:
    model = MODELS["batch"]().to(BF16)
    optimizer = _adam(model)
    _begin(how, model, optimizer)
    assert not _step(model, optimizer, False, False)
    assert _step(model, optimizer, False, True, False)


def test_what_others_write_is_not_undone() -> None:
    """Statistics that are loaded after a call that no step follows."""
    model = MODELS["batch"]().to(BF16)
    optimizer = _adam(model)
    _begin("convert", model, optimizer)
    _step(model, optimizer, False)
    loaded = {name: v + 1 for name, v in model.state_dict().items()}
    model(torch.randn(6, WIDTH, dtype=BF16))
    model.load_state_dict(loaded)
    assert _step(model, optimizer, True)
    assert _same([*model.state_dict().values()], [*loaded.values()])


def test_two_optimizers_of_one_model_share_its_copies() -> None:
    model: Any = MODELS["batch"]().to(BF16)
    both = _adam(model[0]), _adam(model[4])
    autoamp.convert(model, both)
    for bad in (False, True, False):
        before = [value.clone() for value in model.state_dict().values()]
        x = torch.randn(6, WIDTH, dtype=BF16)
        model(x * torch.nan if bad else x).float().square().mean().backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
            assert bool(optimizer.step_was_skipped) == bad
        assert _same([*model.state_dict().values()], before) == bad


@pytest.mark.parametrize("by", ["parts", "compile", "forward"])
def test_however_the_model_is_called(by: str) -> None:
    model: Any = MODELS["batch"]().to(BF16)
    optimizer = _adam(model)
    _begin("convert", model, optimizer)
    compiled = torch.compile(model, backend="eager")
    called = {
        "parts": lambda x: [x := each(x) for each in model][-1],
        "compile": compiled,
        "forward": model.forward,
    }[by]
    for value in (1.0, torch.nan, 2.0):
        before = [v.clone() for v in model.state_dict().values()]
        x = torch.eye(6, WIDTH, dtype=BF16) * value
        called(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert _same([*model.state_dict().values()], before) == math.isnan(value)


def test_nothing_is_written_on_the_model() -> None:
    model = MODELS["batch"]().to(BF16)
    own = {name: {*vars(each)} for name, each in model.named_modules()}
    optimizer = _adam(model)
    _begin("convert", model, optimizer)
    _step(model, optimizer, False)
    assert own == {name: {*vars(each)} for name, each in model.named_modules()}
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        x = torch.randn(6, WIDTH, dtype=BF16)
        assert torch.equal(other(x), model(x))


def test_a_skipped_step_is_told_once_and_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "autoamp")
    model = MODELS["batch"]().to(BF16)
    optimizer = _adam(model)
    _begin("enable", model, optimizer)
    for bad in (False, True, True):
        _step(model, optimizer, bad)
    (line,) = caplog.messages
    says(line, "Sequential", "step 2", module="0", option="guard=")
    found = autoamp.report(model).loss_scale
    assert found is not None
    assert found.skipped_steps == 2


def test_a_model_whose_part_is_guarded_is_guarded_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The script calls no module, so that only the optimizer leads to the model."""
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)).to(BF16)
    optimizer = _adam(model)
    autoamp.convert(model[0], optimizer, masters="off")
    _begin("enable", model, optimizer, masters="off")
    for value in (1.0, math.nan):
        caplog.clear()
        for param in model.parameters():
            param.grad = torch.full_like(param, value)
        optimizer.step()
    assert optimizer.step_was_skipped
    (line,) = caplog.messages
    says(line, "Linear")


@pytest.mark.parametrize(
    ("by_variables", "option"), [(True, "AUTOAMP_GUARD=0"), (False, "guard=False")]
)
def test_a_warning_spells_an_option_as_options_were_given(
    by_variables: bool, option: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = MODELS["batch"]().to(BF16)
    optimizer = _adam(model)
    guarded = guard_half(model, Options(by_variables=by_variables))
    with caplog.at_level(logging.WARNING, "autoamp"):
        assert _step(model, optimizer, True)
    says(caplog.messages, option=option)
    retire(guarded)


@pytest.mark.parametrize("how", WAYS)
def test_the_guard_can_be_switched_off(how: str) -> None:
    model = MODELS["batch"]().to(BF16)
    optimizer = _adam(model)
    _begin(how, model, optimizer, guard=False)
    _step(model, optimizer, True)
    assert not all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("masters", ["auto", "off"])
def test_what_is_off_leaves_nothing_behind(masters: str) -> None:
    model = MODELS["batch"]().to(BF16)
    optimizer = _adam(model)
    _begin("enable", model, optimizer, masters=masters)
    assert not _step(model, optimizer, False)
    assert is_watched(optimizer)
    autoamp.disable()
    assert not is_watched(optimizer)
    assert "step" not in vars(optimizer)
    _begin("convert", model, optimizer, masters=masters)
    assert _step(model, optimizer, True)
    autoamp.revert(model)
    assert not is_watched(optimizer)
    assert model._compiled_call_impl is None
    _step(model, optimizer, True)
    assert not all(bool(p.isfinite().all()) for p in model.parameters())
