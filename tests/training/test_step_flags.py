"""What a step goes by: of which call, backward and weights an overflow is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp.training.ledger import BACKWARDS
from tests.training.steps import (
    BF16,
    FP16,
    HUGE,
    converted,
    fresh_copy,
    loss_of,
    moved,
    name,
    scaling_of,
    weights_of,
)

# Dynamo's own, of an input that others computed.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    pytest.mark.one_model,
]


def clip(optimizer: Any) -> None:
    params = [p for g in optimizer.param_groups for p in g["params"]]
    nn.utils.clip_grad_value_(params, 1.0)


def finite(*tensors: Tensor) -> bool:
    return all(bool(t.isfinite().all()) for t in tensors)


# -- what is a leaf in one call is computed in the next --------------------------------


def times_ten(x: Tensor) -> Tensor:
    """A stand-in for what others compute: no graph of ours."""
    return x * 10


@pytest.mark.parametrize("first", ["leaf", "computed"])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("clipped", [True, False])
def test_what_is_a_leaf_is_asked_at_every_call(
    first: str, frozen: bool, clipped: bool
) -> None:
    model = converted(nn.Linear(8, 4).requires_grad_(not frozen))
    prompt = nn.Parameter(torch.ones(2, 8))
    given: dict[str, Callable[[], Tensor]] = {
        "leaf": lambda: prompt.detach().requires_grad_(),
        "computed": lambda: times_ten(prompt),
    }
    model(given[first]()).sum().backward()
    prompt.grad = None
    optimizer: Any = torch.optim.SGD([prompt], 0.1)
    for factor in (1.0, HUGE, 1.0):
        before = prompt.detach().clone()
        optimizer.zero_grad()
        (model(given["computed"]()).sum() * factor).backward()
        if clipped:
            clip(optimizer)
        optimizer.step()
        assert optimizer.step_was_skipped == (factor != 1.0)
        assert torch.equal(before, prompt) == (factor != 1.0)
    # A leaf of its own, after all that: its run fills it, and clipping hides nothing.
    leaf = torch.ones(2, 8, requires_grad=True)
    mine: Any = torch.optim.SGD([leaf], 0.1)
    for factor in (1.0, HUGE, 1.0):
        mine.zero_grad()
        (model(leaf).sum() * factor).backward()
        clip(mine)
        mine.step()
        assert mine.step_was_skipped == (factor != 1.0)
    assert finite(prompt, leaf)
    assert len(autoamp.report(model).graphs) == 1, "captured once"


class TakesHalf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.float())


@pytest.mark.parametrize("first", ["leaf", "computed"])
@pytest.mark.parametrize("second", ["leaf", "computed"])
def test_half_inputs_have_their_gradient_whatever_was_captured(
    first: str, second: str
) -> None:
    """A leaf's is fp32 where it wants it so; what others computed has its own dtype."""
    model = autoamp.convert(TakesHalf(), loss_scale=2.0**10, **FP16)
    leaf = torch.ones(2, 8, dtype=torch.half, requires_grad=True)
    leaf.grad_dtype = torch.float32

    def run(kind: str) -> None:
        x = leaf if kind == "leaf" else leaf * 1
        (model(x).sum() * 2.0**-22).backward()

    run(first)
    leaf.grad = None
    run(second)
    expected = model.inner.weight.detach().sum(0).expand(2, 8) * 2.0**-22
    error = (leaf.grad.float() - expected).abs().max()
    # fp16's eleven digits, or where others computed it the step of its subnormals.
    assert error <= (2.0**-32 if second == "leaf" else 2.0**-25)


class WritesApart(nn.Module):
    """Writes to its input where no history follows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x * 2)
        x.detach().copy_(y)
        return y.tanh()


@pytest.mark.parametrize("first", ["leaf", "computed"])
@pytest.mark.parametrize("second", ["leaf", "computed"])
def test_a_detached_write_is_no_history_whatever_was_captured(
    first: str, second: str
) -> None:
    def script(model: Any) -> list[Tensor]:
        found = []
        for kind in (first, second):
            model.zero_grad()
            leaf = torch.ones(2, 8, requires_grad=True)
            model(leaf if kind == "leaf" else leaf * 1).sum().backward()
            assert leaf.grad is not None
            found += [leaf.grad, model.inner.weight.grad]
        return found

    torch.manual_seed(0)
    model = WritesApart()
    plain = script(model)
    scaled = script(autoamp.convert(model, **{**BF16, "loss_scale": 2.0**10}))
    for ours, exact in zip(scaled, plain, strict=True):
        assert torch.allclose(ours, exact, rtol=2.0**-6, atol=2.0**-6)


# -- an optimizer for each weight, in the backward -------------------------------------


class Deep(nn.Module):
    """The gradient grows towards the first layer, where it overflows first."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
        self.breaks = breaks
        for weight in self.parameters():
            nn.init.constant_(weight, 10.0)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return x


@pytest.mark.thorough(but=["True-False"])
@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_optimizers_in_the_backward_lower_the_scale(named: bool, breaks: bool) -> None:
    model = Deep(breaks)
    optimizers: dict[Tensor, Any] = {
        p: torch.optim.SGD([p], 1e-30) for p in model.parameters()
    }
    scale = autoamp.DynamicLossScale(2.0**40, growth_interval=1000)
    options = {**BF16, "loss_scale": scale, "strict": not breaks}
    if named:
        autoamp.convert(model, list(optimizers.values()), **options)
    else:
        autoamp.convert(model, **options)
    skipped: list[bool] = []

    def step(p: Tensor) -> None:
        optimizers[p].step()
        skipped.append(bool(optimizers[p].step_was_skipped))
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    scales, patterns = [], []
    for _ in range(12):
        # Times 80 in each layer: at a scale of 2**40 the fourth is infinite.
        (model(torch.full((1, 8), 1e-4)).sum() * 2.0**70).backward()
        scales.append(scale.scale)
        patterns.append(tuple(skipped))
        skipped.clear()
    assert patterns[0][0] is False
    assert patterns[0][-1] is True
    assert patterns[-1] == (False,) * 4
    halvings = [a / b for a, b in itertools.pairwise(scales)]
    assert set(halvings) <= {1.0, 2.0}, "one backward moves the scale once"
    clean = sum(not any(p) for p in patterns)
    assert scale.growth_tracker == clean
    assert finite(*model.parameters())


def test_a_scale_that_reached_its_floor_in_this_backward_is_no_error_yet() -> None:
    scale = autoamp.DynamicLossScale(2.0**15, min_scale=2.0**14)
    model: Any = converted(loss_scale=scale)
    optimizers: list[Any] = [
        torch.optim.SGD(model[0].parameters(), 0.1),
        torch.optim.SGD(model[2].parameters(), 0.1),
    ]
    loss_of(model, 0, HUGE).backward()
    for optimizer in optimizers:
        optimizer.step()
        assert optimizer.step_was_skipped
    model.zero_grad()
    loss_of(model, 0, HUGE).backward()
    with pytest.raises(autoamp.LossScaleError):
        optimizers[0].step()


# -- clipping by value -----------------------------------------------------------------


@pytest.mark.thorough(
    but=[
        "eager-True-prompt",
        "eager-False-generator",
        "aot_eager-True-half",
        "aot_eager-False-weights",
    ]
)
@pytest.mark.parametrize("stands_before", ["prompt", "generator", "half", "weights"])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_clipping_hides_nothing_before_a_converted_model(
    stands_before: str, frozen: bool, backend: str
) -> None:
    """Infinities only: what is NaN shows through any clipping."""

    class Hyper(nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return nn.functional.linear(x, weight)

    model: Any = Hyper() if stands_before == "weights" else nn.Linear(8, 4)
    model.requires_grad_(not frozen)
    if backend == "aot_eager":
        compiler: Any = torch._dynamo.backends.registry.lookup_backend(backend)
        converted(model, backend=compiler)
    else:
        converted(model)
    torch.manual_seed(0)
    before: Any = nn.Linear(4, 8)
    if stands_before == "prompt":
        before = nn.ParameterList([torch.ones(2, 8)])
    optimizer: Any = torch.optim.SGD(before.parameters(), 0.1)

    def result() -> Tensor:
        if stands_before == "prompt":
            return model(before[0] + 0)
        x: Tensor = before(torch.ones(2, 4))
        if stands_before == "half":
            x = x.half().float()
        if stands_before == "weights":
            return model(torch.ones(2, 8), x * 1)
        return model(x)

    for factor in (1.0, HUGE, 1.0):
        old = weights_of(before)
        optimizer.zero_grad()
        (result().sum() * factor).backward()
        clip(optimizer)
        optimizer.step()
        assert optimizer.step_was_skipped == (factor != 1.0)
        assert moved(old, before) == (factor == 1.0)


@pytest.mark.parametrize("zeroed", [0, 2])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_two_optimizers_of_which_one_is_zeroed_each_micro_batch(
    base: nn.Module, zeroed: int, set_to_none: bool, bad: int
) -> None:
    model: Any = fresh_copy(base)
    often: Any = name(torch.optim.SGD(model[zeroed].parameters(), 0.1), model)
    seldom: Any = name(torch.optim.SGD(model[2 - zeroed].parameters(), 0.1), model)
    before = weights_of(model[2 - zeroed])
    for micro in range(3):
        often.zero_grad(set_to_none)
        loss_of(model, micro, HUGE if micro == bad else 1.0).backward()
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        for p in model.parameters():
            p.grad.nan_to_num_(1.0)  # what a script of infinities alone would have
        often.step()
        assert often.step_was_skipped == (micro == bad)
    seldom.step()
    assert seldom.step_was_skipped
    assert not moved(before, model[2 - zeroed])
    model.zero_grad()
    loss_of(model, 5).backward()
    for optimizer in (often, seldom):
        optimizer.step()
        assert not optimizer.step_was_skipped


def test_some_gradients_of_an_optimizer_are_zeroed(base: nn.Module) -> None:
    """Those that are left hold the overflow, clipped."""
    model: Any = fresh_copy(base)
    optimizer: Any = name(torch.optim.SGD(model.parameters(), 0.1), model)
    loss_of(model, 0, HUGE).backward()
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    for p in model.parameters():
        p.grad.nan_to_num_(1.0)
    model[0].zero_grad()
    loss_of(model, 1).backward()
    before = weights_of(model)
    optimizer.step()
    assert optimizer.step_was_skipped
    assert not moved(before, model)


# -- several backwards over one run ----------------------------------------------------


def test_a_third_backward_of_which_the_second_was_thrown_away(base: nn.Module) -> None:
    model = fresh_copy(base)
    optimizer: Any = name(torch.optim.SGD(model.parameters(), 0.1), model)
    for skipped in (False, True):
        loss = loss_of(model, 0)
        (loss * (HUGE if skipped else 1.0)).backward(retain_graph=True)
        params = list(model.parameters())
        torch.autograd.grad(loss * HUGE, params, retain_graph=True)
        if not skipped:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert optimizer.step_was_skipped == skipped
        optimizer.zero_grad()


def test_an_overflow_in_the_backward_of_a_backward_is_kept(base: nn.Module) -> None:
    """It may come before that backward gets to the outputs of the run."""
    model = fresh_copy(base)
    optimizer: Any = name(torch.optim.SGD(model.parameters(), 0.1), model)
    for factor in (1.0, HUGE, 1.0):
        before = weights_of(model)
        x = torch.ones(3, 8, requires_grad=True)
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.sum() * 1e-3 + grad.square().sum() * factor).backward()
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.step_was_skipped == (factor != 1.0)
        assert moved(before, model) == (factor == 1.0)


# -- GradScalers that are about --------------------------------------------------------


def script_with(model: nn.Module, scaler: Any) -> list[tuple[float, bool]]:
    torch.manual_seed(0)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    for number in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, number, 1e-3)).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), finite(*model.parameters())))
    return seen


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("asked", ["nothing", "optimizer", "dynamic", "number"])
def test_a_scaler_that_is_merely_there_changes_nothing(used: bool, asked: str) -> None:
    bystander = torch.amp.GradScaler("cpu")
    if used:
        bystander.scale(torch.ones(1))
    model = nn.Linear(8, 4)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    if asked == "optimizer":
        autoamp.convert(model, optimizer, **FP16)
    elif asked == "nothing":
        autoamp.convert(model, **FP16)
    else:
        scale: Any = "dynamic" if asked == "dynamic" else 2.0**15
        autoamp.convert(model, loss_scale=scale, **FP16)
    # 1e-8 is nothing in fp16, unless it is scaled.
    (model(torch.ones(1, 8)).sum() * 1e-8).backward()
    assert model.weight.grad is not None
    assert torch.allclose(model.weight.grad, torch.tensor(1e-8), rtol=2.0**-10, atol=0)
    assert not scaling_of(model).ledger.foreign
    assert bystander.is_enabled()


def test_a_scaler_that_scales_is_left_to_it_from_the_first_backward_on() -> None:
    """Its first scale is the largest that works: ours on top would overflow."""
    options: dict[str, Any] = {"init_scale": 2.0**16, "growth_interval": 100}
    idle = torch.amp.GradScaler("cpu")
    scaler = torch.amp.GradScaler("cpu", **options)
    model = autoamp.convert(nn.Linear(8, 4), **FP16)
    assert script_with(model, scaler) == [(2.0**16, True)] * 3
    assert scaling_of(model).ledger.foreign
    assert idle.is_enabled()


def test_a_scaler_that_was_used_before_is_met_at_its_first_update() -> None:
    """One scaler for several models in a row: only the first step is scaled twice."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=100)
    scaler.scale(torch.ones(1))
    model = autoamp.convert(nn.Linear(8, 4), **FP16)
    seen = script_with(model, scaler)
    assert [scale for scale, _ in seen] == [2.0**15] * 3
    assert scaling_of(model).ledger.foreign


def test_what_was_asked_for_wins_over_a_scaler_that_has_scaled() -> None:
    scaler = torch.amp.GradScaler("cpu")
    model = autoamp.convert(nn.Linear(8, 4), loss_scale=2.0**10, **FP16)
    loss = scaler.scale(model(torch.ones(1, 8)).sum() * 1e-12)
    loss.backward()
    assert model.weight.grad is not None
    # 2**16 times 1e-12 is half the smallest number of fp16: without ours it is 0.
    expected = torch.tensor(2.0**16 * 1e-12)
    assert torch.allclose(model.weight.grad, expected, rtol=2.0**-9, atol=0)
    assert not scaling_of(model).ledger.foreign


def test_runs_in_flight_are_left_to_the_scaler_too() -> None:
    """Two forwards before the first backward."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    model = autoamp.convert(nn.Linear(8, 4), **FP16)
    results = [model(torch.ones(1, 8)).sum() for _ in range(2)]
    for result in results:
        model.zero_grad()
        scaler.scale(result).backward()
        assert finite(model.weight.grad)
        assert model.weight.grad.unique().tolist() == [2.0**14]
    assert all(not r.overflowed_on_host for r in BACKWARDS.runs[-2:])
