"""A table of training loops: a step is skipped just where its gradients overflow.

A row makes optimizers, what they train, and a backward whose loss is multiplied by a
factor.  The oracle trains on good and on bad batches, clips by value (which turns
infinities into ones), and asks after each step: all is as before it, or has moved.
`test_machine.py` holds plain loops to a GradScaler; here are the unusual ones.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.says import says
from tests.training.steps import (
    BF16,
    FP16,
    HUGE,
    as_on_a_gpu,
    assert_same,
    converted,
    forget_backwards,
    loss_of,
    mlp,
    moved,
    state_of,
    weights_of,
)

# Dynamo's own, of an input that others computed.
pytestmark = [
    pytest.mark.usefixtures("device"),
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:.*should not be instantiated:DeprecationWarning"
    ),
]

GUARD: dict[str, Any] = {"precision": "bf16", "do_no_harm": False, "strict": True}


@dataclass
class Loop:
    """What is trained, and how.

    Attributes:
        watched: the module whose weights the optimizers step.
        backward: fills gradients; those of a loss times the factor it is given.
        bad: the factor of a bad batch.
        clips: whether gradients are clipped by value before the step.
        step: is called in the place of all optimizers' own.
        then: is called after each good step, with its number.
    """

    optimizers: Sequence[Any]
    watched: nn.Module
    backward: Callable[[float], Any]
    bad: float = HUGE
    clips: bool = True
    step: Callable[[], Any] | None = None
    then: Callable[[int], Any] = lambda _: None


LOOPS: dict[str, Callable[[Any], Loop]] = {}
"""Each makes a loop; it is given pytest's monkeypatch."""


def loop(function: Callable[[Any], Loop]) -> Callable[[Any], Loop]:
    LOOPS[function.__name__.replace("_", " ")] = function
    return function


def sgd(params: Iterable[Any], **options: Any) -> Any:
    return torch.optim.SGD(params, 0.1, **options)


def check(made: Loop) -> None:
    for number, factor in enumerate((1.0, made.bad, 1.0, made.bad, 1.0)):
        made.watched.zero_grad()
        before = weights_of(made.watched), [state_of(o) for o in made.optimizers]
        made.backward(factor)
        filled = [p for p in made.watched.parameters() if p.grad is not None]
        if made.clips:
            nn.utils.clip_grad_value_(filled, 1.0)
        for step in [made.step] if made.step else [o.step for o in made.optimizers]:
            step()
        is_bad = factor != 1.0
        for optimizer in made.optimizers:
            # One of no converted model is met where an overflow has reached it.
            skipped = getattr(optimizer, "step_was_skipped", False)
            assert bool(skipped) == is_bad, number
        assert moved(before[0], made.watched) != is_bad, number
        if is_bad:
            now = weights_of(made.watched), [state_of(o) for o in made.optimizers]
            assert_same(now, before)
        else:
            made.then(number)


@pytest.mark.parametrize("name", LOOPS)
def test_a_step_is_skipped_just_where_its_gradients_overflow(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(LOOPS[name](monkeypatch))


# -- what stands before a converted model, whose gradients are others' -----------------


class Hyper(nn.Module):
    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.linear(x, weight)


def before_a_model(kind: str, *, frozen: bool, backend: str = "eager") -> Loop:
    model: Any = Hyper() if kind == "weights" else nn.Linear(8, 4)
    model.requires_grad_(not frozen)
    compiler: Any = torch._dynamo.backends.registry.lookup_backend
    converted(model, backend="eager" if backend == "eager" else compiler(backend))
    before: Any = nn.Linear(4, 8)
    if kind == "prompt":
        before = nn.ParameterList([torch.ones(2, 8)])

    def result() -> Tensor:
        if kind == "prompt":
            return model(before[0] + 0)
        x: Tensor = before(torch.ones(2, 4))
        if kind == "half":
            x = x.half().float()
        return model(torch.ones(2, 8), x * 1) if kind == "weights" else model(x)

    optimizer = sgd(before.parameters())
    return Loop([optimizer], before, lambda by: (result().sum() * by).backward())


LOOPS |= {
    "a prompt": lambda _: before_a_model("prompt", frozen=True),
    "a generator": lambda _: before_a_model("generator", frozen=False),
    "a half result": lambda _: before_a_model("half", frozen=True),
    "weights": lambda _: before_a_model("weights", frozen=False),
    "a compiled model": lambda _: before_a_model(
        "generator", frozen=True, backend="aot_eager"
    ),
}


@loop
def ranks_that_reduce_before_a_model(monkeypatch: Any) -> Loop:
    """DDP has reduced another rank's overflow into gradients that were finite here."""
    first, critic = nn.Linear(8, 8), converted(mlp().requires_grad_(False))
    monkeypatch.setattr("autoamp.compat.are_several", lambda: True)

    def backward(reduced: float) -> None:
        critic(first(torch.ones(2, 8))).sum().backward()
        for parameter in first.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(reduced)

    made = Loop([sgd(first.parameters())], first, backward, bad=math.inf)
    made.clips = False  # by the script, after the reduction: nothing could tell
    return made


@pytest.mark.parametrize("first", ["leaf", "computed"])
@pytest.mark.parametrize("frozen", [True, False])
def test_what_is_a_leaf_is_asked_at_every_call(first: str, frozen: bool) -> None:
    model = converted(nn.Linear(8, 4).requires_grad_(not frozen))
    prompt = nn.ParameterList([torch.ones(2, 8)])
    given: dict[str, Callable[[], Tensor]] = {
        "leaf": lambda: prompt[0].detach().requires_grad_(),
        "computed": lambda: prompt[0] * 10,
    }
    model(given[first]()).sum().backward()
    by = sgd(prompt.parameters())
    made = Loop(
        [by], prompt, lambda f: (model(given["computed"]()).sum() * f).backward()
    )
    check(made)
    assert len(autoamp.report(model).graphs) == 1, "captured once"
    made.backward = lambda f: (model(prompt[0]).sum() * f).backward()
    check(made)


# -- backwards -------------------------------------------------------------------------


@loop
def a_backward_of_a_backward(_: Any) -> Loop:
    """An overflow may come before that backward gets to the outputs of the run."""
    model = converted()

    def backward(factor: float) -> None:
        x = torch.ones(3, 8, requires_grad=True)
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.sum() * 1e-3 + grad.square().sum() * factor).backward()

    return Loop([sgd(model.parameters())], model, backward)


@loop
def a_third_backward_of_which_the_second_was_asked_for(_: Any) -> Loop:
    model = converted()

    def backward(factor: float) -> None:
        loss = loss_of(model, 0)
        (loss * factor).backward(retain_graph=True)
        torch.autograd.grad(loss * HUGE, [*model.parameters()], retain_graph=True)
        if factor == 1.0:
            model.zero_grad()
        loss.backward()

    return Loop([sgd(model.parameters())], model, backward)


@loop
def some_gradients_are_zeroed_and_clipped(_: Any) -> Loop:
    """Those that are left hold the overflow, clipped."""
    model: Any = converted()

    def backward(factor: float) -> None:
        loss_of(model, 0, factor).backward()
        for p in model.parameters():
            p.grad.clamp_(-1, 1)
        model[0].zero_grad()
        loss_of(model, 1).backward()

    return Loop([sgd(model.parameters())], model, backward)


@loop
def a_model_that_returns_nothing(_: Any) -> Loop:
    class WritesItsInput(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> None:
            x.add_(self.inner(x))

    model = converted(WritesItsInput())

    def backward(factor: float) -> None:
        x = torch.ones(2, 8) * torch.ones((), requires_grad=True)
        model(x)
        (x.sum() * factor).backward()

    return Loop([sgd(model.parameters())], model, backward)


# -- optimizers ------------------------------------------------------------------------


@loop
def a_step_the_user_compiles(_: Any) -> Loop:
    model = mlp()
    optimizer = sgd(model.parameters())
    autoamp.convert(model, optimizer, **BF16)

    @torch.compile(backend="eager")
    def step() -> None:
        optimizer.step()

    made = Loop([optimizer], model, lambda f: loss_of(model, 0, f).backward())
    made.step = step
    return made


@loop
def a_copy_of_the_model_was_reverted(_: Any) -> Loop:
    model = converted()
    autoamp.revert(copy.deepcopy(model))
    by = sgd(model.parameters())
    return Loop([by], model, lambda factor: loss_of(model, 0, factor).backward())


@loop
def a_group_that_is_not_fused(monkeypatch: Any) -> Loop:
    """Its implementation refuses the flag: the step waits, and is right."""
    as_on_a_gpu(monkeypatch)
    model: Any = mlp()
    optimizer = torch.optim.AdamW(model[0].parameters(), fused=True)
    optimizer.add_param_group({"params": [*model[2].parameters()], "fused": False})
    autoamp.convert(model, optimizer, **BF16)
    return Loop([optimizer], model, lambda f: loss_of(model, 0, f).backward())


def groups_that_come_later(*, fused: bool) -> Loop:
    """And weights of a group that are replaced."""
    model: Any = mlp()
    optimizer = sgd(model[0].parameters(), momentum=0.9, fused=fused)
    autoamp.convert(model, optimizer, **BF16)

    def then(number: int) -> None:
        if number == 0:
            optimizer.add_param_group({"params": [*model[2].parameters()], "lr": 0.2})
        elif number == 2:
            model[2] = nn.Linear(8, 4)
            for p in optimizer.param_groups[1]["params"]:
                optimizer.state.pop(p, None)
            optimizer.param_groups[1]["params"] = [*model[2].parameters()]

    made = Loop([optimizer], model, lambda f: loss_of(model, 0, f).backward())
    made.then = then
    return made


@loop
def a_group_that_comes_later(_: Any) -> Loop:
    return groups_that_come_later(fused=False)


@pytest.mark.parametrize("lookups", [3, 30])  # fewer numbers than the table, and more
def test_sparse_gradients(lookups: int) -> None:
    model = nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Linear(8, 4))
    by = [torch.optim.SparseAdam(model[0].parameters()), sgd(model[1].parameters())]
    autoamp.convert(model, by, **BF16)

    def backward(factor: float) -> None:
        (model(torch.arange(lookups) % 3).square().mean() * factor).backward()

    check(Loop(by, model, backward, clips=False))


# -- the guard: of these gradients no graph tells --------------------------------------


def guarded(model: nn.Module | None = None, **options: Any) -> nn.Module:
    return autoamp.convert(model or mlp(), **{**GUARD, **options})


@loop
def a_layer_of_others(_: Any) -> Loop:
    """No graph of ours has filled the bad gradient."""
    model, other = guarded(), mlp()
    every = nn.ModuleList([model, other])

    def backward(factor: float) -> None:
        (loss_of(model, 1) + loss_of(other, 1)).backward()
        other[2].weight.grad.view(-1)[0] *= factor

    return Loop([sgd(every.parameters())], every, backward, bad=math.inf, clips=False)


@loop
def an_input_that_is_optimized(_: Any) -> Loop:
    model = guarded().requires_grad_(False)
    image = nn.ParameterList([torch.randn(2, 8)])

    def backward(factor: float) -> None:
        (model(image[0]).sum() * factor).backward()

    by = sgd(image.parameters())
    return Loop([by], image, backward, bad=math.inf, clips=False)


@loop
def a_function_that_is_compiled(_: Any) -> Loop:
    model, options = mlp(), {**GUARD, "backend": "eager"}
    compiled = torch.compile(model, backend="autoamp", options=options)

    def backward(factor: float) -> None:
        loss_of(compiled, 1).backward()
        model[2].weight.grad.view(-1)[0] *= factor

    by = sgd(model.parameters())
    return Loop([by], model, backward, bad=math.inf, clips=False)


@loop
def rows_of_a_sparse_gradient_that_add_up(_: Any) -> Loop:
    """Each is finite; the two rows of one word add up to infinity."""
    table = nn.Embedding(9, 8, sparse=True)
    model = guarded(nn.Sequential(table, nn.Linear(8, 8)))

    def backward(factor: float) -> None:
        model(torch.tensor([1, 1, 2])).sum().backward()
        grad = table.weight.grad
        assert grad is not None
        with torch.no_grad():
            grad._values().fill_(3e38 if factor != 1.0 else 1.0)

    return Loop([sgd(model.parameters())], model, backward, clips=False)


# -- several steps over one gradient ---------------------------------------------------


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("accumulated", [False, True])
def test_infinite_gradients_that_were_never_zeroed_do_not_reach_the_weights(
    accumulated: bool, on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_gpu:
        as_on_a_gpu(monkeypatch)
    model = mlp()
    optimizer = sgd(model.parameters(), momentum=0.9, fused=on_gpu)
    autoamp.convert(model, optimizer, **BF16)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = weights_of(model)
    loss_of(model, 1, HUGE).backward()
    optimizer.step()
    for number in range(3):
        if accumulated:
            loss_of(model, number).backward()
        optimizer.step()
        assert optimizer.step_was_skipped
        assert_same(weights_of(model), before)
    for set_to_none in (False, True):
        optimizer.zero_grad(set_to_none)
        loss_of(model, 5).backward()
        optimizer.step()
        assert not optimizer.step_was_skipped


@pytest.mark.parametrize("zeroed", [0, 2])
@pytest.mark.parametrize("bad", [0, 2])
def test_two_optimizers_of_which_one_is_zeroed_each_micro_batch(
    zeroed: int, bad: int
) -> None:
    model: Any = mlp()
    often, seldom = (sgd(model[at].parameters()) for at in (zeroed, 2 - zeroed))
    autoamp.convert(model, [often, seldom], **BF16)
    before = weights_of(model[2 - zeroed])
    for micro in range(3):
        often.zero_grad()
        loss_of(model, micro, HUGE if micro == bad else 1.0).backward()
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


def test_an_overflow_thrown_away_before_its_weights_are_frozen_is_gone() -> None:
    model: Any = mlp()
    optimizer = sgd(model.parameters())
    autoamp.convert(model, optimizer, **BF16)
    loss_of(model, 0, HUGE).backward()
    optimizer.zero_grad()
    model[0].requires_grad_(False)
    before = weights_of(model)
    loss_of(model, 1).backward()
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert moved(before, model)


def test_two_guarded_optimizers_of_which_one_has_finite_gradients() -> None:
    model: Any = guarded()
    first, last = (sgd(model[at].parameters()) for at in (0, 2))
    before = weights_of(model)
    loss_of(model, 1).backward()
    model[2].weight.grad[0, 0] = math.inf
    first.step()
    last.step()
    assert (first.step_was_skipped, last.step_was_skipped) == (False, True)
    assert moved({"weight": before["0.weight"]}, model[0])
    assert not torch.equal(model[0].bias, before["0.bias"])
    assert_same(weights_of(model)["2.weight"], before["2.weight"])


def test_gradients_that_are_not_ours_are_stepped_with() -> None:
    model = mlp()
    optimizer = sgd(model.parameters(), weight_decay=0.1)
    autoamp.convert(model, optimizer, **BF16)
    loss_of(model, 0)
    before = weights_of(model)
    optimizer.step()  # there are no gradients
    assert_same(weights_of(model), before)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert moved(before, model)
    assert autoamp.report(model).loss_scale.growth_tracker == 0


def test_an_unrelated_optimizer_steps_after_somebody_elses_overflow() -> None:
    first, other = nn.Linear(8, 8), nn.Linear(8, 1)
    critic = converted(mlp().requires_grad_(False))
    (critic(first(torch.ones(2, 8))).sum() * HUGE).backward()
    other(torch.ones(2, 8)).sum().backward()
    before = weights_of(other)
    sgd(other.parameters()).step()
    assert moved(before, other)


@pytest.mark.parametrize("fused", [False, True])
def test_a_generator_that_is_not_converted_lowers_its_critics_scale(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The critic throws these gradients away, and its own steps never overflow."""
    forget_backwards()
    if fused:
        as_on_a_gpu(monkeypatch)
    first, critic = nn.Linear(8, 8), converted()
    # No step changes a weight, so that what overflows depends on the scale alone.
    g: Any = torch.optim.Adam(first.parameters(), 0.0, fused=fused)
    d: Any = torch.optim.SGD(critic.parameters(), 0.0)
    x, skipped = torch.ones(1, 8), []
    # Times 2**15 this is infinite.  At 2**13 the sums of 4 and 8 products are finite,
    # because weights are below 1 / sqrt(8).
    high = 2.0**113
    for factor in (1.0, 1.0, high, high, high):
        g.zero_grad()
        (critic(first(x)).sum() * factor).backward()
        g.step()
        d.zero_grad()
        critic(x).sum().backward()
        d.step()
        assert not d.step_was_skipped
        skipped.append(bool(getattr(g, "step_was_skipped", False)))
    scale = autoamp.report(critic).loss_scale
    assert scale.skipped_steps == sum(skipped)
    assert scale.scale == 2.0 ** (15 - sum(skipped))
    assert skipped[:3] == [False, False, True]
    assert not skipped[-1], "an endless skip"


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


@pytest.mark.parametrize(("named", "breaks"), [(True, False), (False, True)])
def test_optimizers_in_the_backward_lower_the_scale_once(
    named: bool, breaks: bool
) -> None:
    model = Deep(breaks)
    by: dict[Tensor, Any] = {p: torch.optim.SGD([p], 1e-30) for p in model.parameters()}
    scale = autoamp.DynamicLossScale(2.0**40, growth_interval=1000)
    options = {**BF16, "loss_scale": scale, "strict": not breaks}
    autoamp.convert(model, [*by.values()] if named else None, **options)
    skipped: list[bool] = []

    def step(p: Tensor) -> None:
        by[p].step()
        skipped.append(bool(by[p].step_was_skipped))
        by[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    patterns, scales = [], [scale.scale]
    for _ in range(12):
        # Times 80 in each layer: at a scale of 2**40 the fourth is infinite.
        (model(torch.full((1, 8), 1e-4)).sum() * 2.0**70).backward()
        assert scales[-1] / scale.scale in (1.0, 2.0)
        scales.append(scale.scale)
        patterns.append(tuple(skipped))
        skipped.clear()
    assert (patterns[0][0], patterns[0][-1]) == (False, True)
    assert patterns[-1] == (False,) * 4
    assert scale.growth_tracker == sum(not any(p) for p in patterns)


def test_the_floor_is_an_error_that_names_the_op() -> None:
    """Not yet in the backward in which the scale came there."""
    for options, huge in ((FP16, 1e6), (BF16, 3e38)):
        scale = autoamp.DynamicLossScale(64.0, min_scale=32.0)
        model: Any = mlp()
        by = [sgd(model[at].parameters(), momentum=0.9) for at in (0, 2)]
        autoamp.convert(model, by, **{**options, "loss_scale": scale})
        loss_of(model, 0, huge).backward()
        for optimizer in by:
            optimizer.step()
            assert optimizer.step_was_skipped
        model.zero_grad()
        before = weights_of(model), [state_of(o) for o in by]
        loss_of(model, 0, huge).backward()
        with pytest.raises(autoamp.LossScaleError) as raised:
            by[0].step()
        says(raised, 32, module="2", op="linear", option="deny=[")
        assert_same((weights_of(model), [state_of(o) for o in by]), before)
        model.zero_grad()
        loss_of(model, 0).backward()
        by[0].step()
        assert moved(before[0], model)
