"""Training scripts by precisions by optimizers, all held to the same expectations.

Each script is one step of training, with one batch that may be bad.  A run that meets
bad batches skips those steps, which change nothing; to the bit it equals a run that
never saw them.
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
from torch import Tensor, nn

import autoamp
from autoamp.dtypes import parse_low_dtype
from autoamp.training.attach import boundary_of, give_masters
from autoamp.training.scale import resolve_loss_scale
from autoamp.weights import copies
from tests.training.steps import (
    HUGE,
    OPTIMIZERS,
    WIDTH,
    assert_same,
    batch,
    begin_at,
    mlp,
    name,
    scaling_of,
    state_of,
    weights_of,
)

pytestmark = [
    pytest.mark.one_model,
    pytest.mark.usefixtures("device", "one_thread"),
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
]

STEPS = 4
SCALE = 2.0**10


@dataclass(frozen=True)
class Way:
    """A precision, and what makes a batch bad in it.

    Attributes:
        half: the parameters are in half precision themselves, with fp32 masters.
        scale: the first loss scale.
    """

    precision: str
    options: dict[str, Any] = field(default_factory=dict)
    half: bool = False
    bad: float = HUGE
    scale: float = SCALE

    @property
    def low(self) -> torch.dtype:
        found = parse_low_dtype(self.precision)
        assert found is not None
        return found

    @property
    def dtype(self) -> torch.dtype:
        return self.low if self.half else torch.float32


STATIC = {"loss_scale": SCALE}
LOW = {"do_no_harm": False, "strict": True}
WAYS = {
    "bf16": Way("bf16", {**LOW, "loss_scale": "dynamic"}, scale=2.0**15),
    "bf16 guard": Way("bf16", LOW, bad=math.inf, scale=1.0),
    "fp16": Way("fp16", {**LOW, **STATIC}),
    "bf16 parameters": Way("bf16", half=True, bad=math.inf, scale=1.0),
    "fp16 parameters": Way("fp16", STATIC, half=True, bad=math.inf),
}


# -- scripts ---------------------------------------------------------------------------

Make = Callable[[nn.Module], Any]
Step = Callable[["World", int, float], None]
STEPS_OF: dict[str, Step] = {}


def plain_models(way: str, before: bool) -> nn.ModuleList:
    torch.manual_seed(0)
    models = nn.ModuleList([mlp(), mlp()])
    if before:
        models[0][2] = nn.Linear(8, WIDTH)
    return models.to(WAYS[way].dtype)


@pytest.fixture(autouse=True, scope="module")
def _no_model_outlives_the_table() -> Iterator[None]:
    """Optimizers of later tests are not to be met by the table's models."""
    yield
    converted.cache_clear()
    gc.collect()
    torch._dynamo.reset()


@functools.cache
def converted(way: str, before: bool) -> nn.ModuleList:
    """Two models, converted and captured; copies of these are trained."""
    chosen, models = WAYS[way], plain_models(way, before)
    if way == "bf16 parameters":
        return models  # nothing of theirs is captured: each World converts them
    for model in models[before:]:
        options = {"precision": chosen.precision, **chosen.options}
        forgotten = torch.optim.SGD(model.parameters(), 0.1) if chosen.half else None
        autoamp.convert(model, forgotten, **options)
        x = batch(0)[0].to(chosen.dtype)
        for given in (x, x.clone().requires_grad_()):
            model(given).sum().backward()
        model.zero_grad()
    return models


class World:
    """The models and optimizers of one run of a script.

    In a `reference` nothing is converted, and everything is fp32.
    """

    def __init__(
        self, case: str, way: str, make: Make, *, reference: bool = False
    ) -> None:
        self.case, self.way, self.make = case, WAYS[way], make
        self.name, self.reference = way, reference
        before = case == "a layer before the model"
        self.scaler: Any = None
        if case == "scaled by the user":
            self.scaler = torch.amp.GradScaler(
                torch.get_default_device().type, init_scale=SCALE
            )
        if reference:
            self.models: Any = plain_models(way, before).float()
            self.way = Way("fp32")
        else:
            self.models = copy.deepcopy(converted(way, before))
        first = self.models[0]
        trained = [first]
        if case == "two optimizers":
            trained = [first[0], first[2]]
        elif case.startswith("two models"):
            trained = [self.models]
        self.optimizers: list[Any] = [make(part) for part in trained]
        both = before or trained[0] is self.models
        if reference:
            return
        for model in self.models[before : 1 + both]:
            self.meet(model)

    def meet(self, model: nn.Module) -> None:
        """What `convert(model, optimizers)` does about the optimizers."""
        if not autoamp.is_converted(model):
            autoamp.convert(model, self.optimizers, precision=self.way.precision)
            return
        scaling = scaling_of(model)
        scaling.ledger.foreign = True if self.scaler is not None else None
        scaling.ledger.skips.clear()
        asked = self.way.options.get("loss_scale", "off")
        begin_at(scaling, resolve_loss_scale(asked, self.way.low))
        for optimizer in self.optimizers:
            name(optimizer, model)
            give_masters(boundary_of(optimizer), model)

    def loss(
        self, number: int, factor: float, model: nn.Module | None = None
    ) -> Tensor:
        x, y = (t.to(self.way.dtype) for t in batch(number))
        result = (model or self.models[0])(x)
        return nn.functional.mse_loss(result.float(), y.float()) * factor

    @property
    def weights(self) -> list[Tensor]:
        groups = [g for o in self.optimizers for g in o.param_groups]
        return [p for g in groups for p in g["params"]]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.models.zero_grad()

    def contents(self) -> Any:
        """All that a skipped step leaves as it is."""
        states = [state_of(o) for o in self.optimizers]
        return weights_of(self.models), states, self.masters()

    def masters(self) -> list[Tensor]:
        found = [boundary_of(o) for o in self.optimizers]
        of = [b.masters.of for b in found if b is not None and b.masters is not None]
        return [m.detach().clone() for one in of for m in one.values()]


def script(function: Step) -> Step:
    STEPS_OF[function.__name__.replace("_", " ")] = function
    return function


@script
def plain(w: World, number: int, factor: float) -> None:
    w.loss(number, factor).backward()
    w.step()


STEPS_OF["two optimizers"] = plain


@script
def accumulation(w: World, number: int, factor: float) -> None:
    for micro, by in enumerate((1.0, factor, 1.0)):
        w.loss(10 * number + micro, by / 3).backward()
    w.step()


@script
def clipped_by_value(w: World, number: int, factor: float) -> None:
    w.loss(number, factor).backward()
    nn.utils.clip_grad_value_(w.weights, 0.5)
    w.step()


@script
def clipped_by_norm(w: World, number: int, factor: float) -> None:
    w.loss(number, factor).backward()
    nn.utils.clip_grad_norm_(w.weights, 0.5)
    w.step()


@script
def zeroed_in_place(w: World, number: int, factor: float) -> None:
    w.optimizers[0].zero_grad(set_to_none=False)
    w.loss(number, factor).backward()
    w.optimizers[0].step()


@script
def closure(w: World, number: int, factor: float) -> None:
    calls = []

    def evaluated() -> Tensor:
        w.models.zero_grad()
        loss = w.loss(number, factor)
        loss.backward()
        calls.append(loss)
        return loss

    assert w.optimizers[0].step(evaluated) is calls[0]
    assert len(calls) == 1
    w.models.zero_grad()


@script
def asked_of_autograd(w: World, number: int, factor: float) -> None:
    grads = torch.autograd.grad(w.loss(number, factor), w.weights, create_graph=True)
    for p, grad in zip(w.weights, grads, strict=True):
        p.grad = grad.detach().to(p.grad_dtype or p.dtype)
    w.step()


@script
def second_backward(w: World, number: int, factor: float) -> None:
    loss = w.loss(number, 1.0)
    loss.backward(retain_graph=True)
    (loss * factor).backward()
    w.step()


@script
def overflow_thrown_away(w: World, number: int, factor: float) -> None:
    w.loss(number, w.way.bad).backward()
    w.models.zero_grad()
    w.loss(number, factor).backward()
    w.step()


@script
def overflow_zeroed_in_place(w: World, number: int, factor: float) -> None:
    w.loss(number, w.way.bad).backward()
    w.optimizers[0].zero_grad(set_to_none=False)
    w.loss(number, factor).backward()
    w.step()


@script
def asked_of_autograd_and_clipped(w: World, number: int, factor: float) -> None:
    grads = torch.autograd.grad(w.loss(number, factor), w.weights)
    for p, grad in zip(w.weights, grads, strict=True):
        p.grad = grad.clamp(-1, 1).to(p.grad_dtype or p.dtype)
    w.step()


@script
def evaluated_often(w: World, number: int, factor: float) -> None:
    """As LBFGS does.  A bad batch is bad at any loss scale."""

    def evaluated() -> Tensor:
        w.models.zero_grad()
        loss = w.loss(number, 1.0 if factor == 1.0 else math.inf)
        loss.backward()
        return loss

    w.optimizers[0].step(evaluated)
    w.models.zero_grad()


@script
def scaled_by_the_user(w: World, number: int, factor: float) -> None:
    assert w.scaler is not None
    w.scaler.scale(w.loss(number, factor)).backward()
    w.scaler.unscale_(w.optimizers[0])
    nn.utils.clip_grad_norm_(w.weights, 0.5)
    w.scaler.step(w.optimizers[0])
    w.scaler.update(SCALE)
    w.models.zero_grad()


@script
def gradient_penalty(w: World, number: int, factor: float) -> None:
    x = batch(number)[0].to(w.way.dtype).requires_grad_()
    out = w.models[0](x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    penalty = slope.float().square().sum()
    (out.float().square().mean() + penalty * factor).backward()
    w.step()


@script
def two_models_in_one_backward(w: World, number: int, factor: float) -> None:
    first, second = w.models
    (w.loss(number, 1.0, first) + w.loss(number, factor, second)).backward()
    w.step()


@script
def a_layer_before_the_model(w: World, number: int, factor: float) -> None:
    first, second = w.models
    w.loss(number, factor, nn.Sequential(first, second)).backward()
    w.step()


@script
def average_swapped_in_and_back(w: World, number: int, factor: float) -> None:
    """As for an evaluation, between a forward and its backward."""
    loss, kept = w.loss(number, factor), [p.detach().clone() for p in w.weights]
    for p in w.weights:
        p.data.copy_(2 * p.data)
    with torch.no_grad():
        w.loss(number, 1.0)
    for p, old in zip(w.weights, kept, strict=True):
        p.data.copy_(old)
    loss.backward()
    w.step()


@script
def loaded_after_each_step(w: World, number: int, factor: float) -> None:
    plain(w, number, factor)
    if factor == 1.0:
        state = w.models.state_dict()
        w.models.load_state_dict({k: 0.5 * v for k, v in state.items()})


@script
def resumed_at_each_step(w: World, number: int, factor: float) -> None:
    again = World(w.case, w.name, w.make, reference=w.reference)
    weights, states = w.models.state_dict(), [o.state_dict() for o in w.optimizers]
    again.models.load_state_dict(copy.deepcopy(weights))
    for optimizer, state in zip(again.optimizers, states, strict=True):
        optimizer.load_state_dict(copy.deepcopy(state))
    w.models, w.optimizers = again.models, again.optimizers
    plain(w, number, factor)


# -- what holds for each ---------------------------------------------------------------


def good_step(w: World, number: int) -> None:
    before = w.contents()
    STEPS_OF[w.case](w, number, 1.0)
    assert w.scaler is not None or not any(o.step_was_skipped for o in w.optimizers)
    after = w.contents()
    moved = [not torch.equal(before[0][k], v) for k, v in after[0].items()]
    assert any(moved) or not torch.equal(before[2][0], after[2][0])


def bad_step(w: World) -> None:
    before = w.contents()
    STEPS_OF[w.case](w, 7, w.way.bad)
    # A GradScaler skips a step by never calling it.
    assert w.scaler or all(o.step_was_skipped for o in w.optimizers), "nobody noticed"
    after = w.contents()
    if w.scaler is not None:  # torch hands a fused kernel the flag, and makes its state
        before, after = before[::2], after[::2]
    assert_same(after, before)


def assert_fresh(w: World) -> None:
    """The next call meets the weights as they are, rounded."""
    boundaries = [boundary_of(o) for o in w.optimizers]
    for boundary in boundaries:
        assert boundary is not None
        of = boundary.masters.of if boundary.masters is not None else {}
        assert bool(of) is w.way.half
        for param, master in of.items():
            assert master.dtype == torch.float32
            assert torch.equal(param, master.to(param.dtype))
    with torch.no_grad():
        for model in w.models:
            if autoamp.is_converted(model):
                model(batch(0)[0].to(w.way.dtype))
    kept = copies.COPIES.get(w.way.low, {})
    found = [(p, kept[id(p)].low) for p in w.models.parameters() if id(p) in kept]
    assert found or w.way.half
    for param, low in found:
        assert low is None or torch.equal(low, param.to(w.way.low))


def assert_scale(w: World, bads: int) -> None:
    """As documented: a dynamic one is halved by each bad batch, and others stay.

    Each step of an optimizer that is skipped counts.
    """
    model = next((m for m in w.models if autoamp.is_converted(m)), None)
    if model is None or w.name == "bf16 parameters":
        return  # of bf16 parameters nothing is captured, and nothing counts
    scale = scaling_of(model).domain.loss_scale
    bads = 0 if w.scaler is not None else bads
    assert scale.skipped_steps == bads * len(w.optimizers)
    halvings = bads if isinstance(scale, autoamp.DynamicLossScale) else 0
    assert scale.scale == w.way.scale / 2**halvings


def trained(case: str, way: str, make: Make, bads: tuple[int, ...]) -> World:
    w = World(case, way, make)
    for number in range(STEPS):
        if number in bads:
            bad_step(w)
            assert_fresh(w)
        good_step(w, number)
        assert_fresh(w)
    if case != "resumed at each step":  # each run of which counts its own
        assert_scale(w, len(bads))
    return w


ROUNDINGS = 2 * (8 + 8)
"""The most roundings to the low dtype between a weight and its gradient: two layers
cast an input, two weights and two biases and compute three ops, the backward computes
seven and casts what enters; a penalty goes this way twice."""

LINEAR = ("SGD", "OldStyle")
"""Optimizers whose updates are linear in the gradients: so are the updates' errors."""


def assert_near_fp32(w: World, case: str, way: str) -> None:
    """The weights are fp32's, but for the roundings in each step.

    Each rounding is off by half an epsilon of what is rounded, and an error in the
    weights passes into the gradients of each later step: the bound is so large a part
    of the way that the fp32 weights went.
    """
    exact, length = World(case, way, w.make, reference=True), torch.zeros(())
    first = before = _vector(exact)
    for number in range(STEPS):
        STEPS_OF[case](exact, number, 1.0)
        length = length + (_vector(exact) - before).norm()
        before = _vector(exact)
    error = (_vector(w) - before).norm()
    assert error <= ROUNDINGS * STEPS * torch.finfo(w.way.low).eps / 2 * length
    assert not torch.equal(first, before)


def _vector(w: World) -> Tensor:
    """The trained weights, or their masters where there are any, as one vector."""
    masters = [b.masters.of for b in map(boundary_of, w.optimizers) if b and b.masters]
    of = {p: m for each in masters for p, m in each.items()}
    return torch.cat([of.get(p, p).detach().flatten() for p in w.weights]).double()


def LBFGS(model: nn.Module) -> Any:
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)


KINDS = ("SGD", "AdamW-fused", "OldStyle")


def cases() -> list[Any]:
    """All optimizers with the plain script, three kinds of them with the others.

    The quick tests hold each script in each precision and each optimizer in one.
    """
    found = []
    for case, (at, way) in itertools.product(STEPS_OF, enumerate(WAYS)):
        if case == "a layer before the model" and WAYS[way].bad != HUGE:
            continue  # masters and the guard are for weights of the model alone
        if case == "asked of autograd and clipped" and WAYS[way].bad != HUGE:
            continue  # only a flag outlasts the clipping
        labels = list(OPTIMIZERS) if case == "plain" else list(KINDS)
        if case == "evaluated often":
            if way == "bf16":
                continue  # retries until the lowest loss scale: see test_lbfgs.py
            labels = ["LBFGS"]
        turn = at + list(STEPS_OF).index(case)
        for place, label in enumerate(labels):
            every = len(WAYS) if case == "plain" else len(labels)
            quick = (place - turn) % every == 0
            marks = [] if quick else [pytest.mark.slow]
            found.append(pytest.param(case, way, label, marks=marks))
    return found


@pytest.mark.thorough(but=["cpu-gradient penalty-bf16 parameters-OldStyle"])
@pytest.mark.parametrize(("case", "way", "label"), cases())
def test_a_run_with_bad_batches_is_the_run_without(
    case: str, way: str, label: str
) -> None:
    make = LBFGS if label == "LBFGS" else OPTIMIZERS[label]
    clean = trained(case, way, make, ())
    dirty = trained(case, way, make, (0, 2))
    assert_same(dirty.contents(), clean.contents())
    if label in LINEAR:
        assert_near_fp32(clean, case, way)
