"""Programs that load, wrap, nest or give up an optimizer of half weights."""

from __future__ import annotations

import copy
import io
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.optim import Optimizer

import autoamp
from autoamp.training.attach import boundary_of
from tests.logs import warned
from tests.says import says
from tests.training.steps import masters_of

BF16, FP32 = torch.bfloat16, torch.float32
KEY = "autoamp_masters"
BOTH = pytest.mark.parametrize("how", ["convert", "enable"])


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    yield
    autoamp.disable()


def net(dtype: torch.dtype = BF16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4)
    ).to(dtype)


def adam(model: nn.Module, lr: float = 1e-3) -> optim.AdamW:
    return optim.AdamW(model.parameters(), lr=lr)


def take(model: nn.Module, optimizer: Any, how: str, **options: Any) -> None:
    """Converts a model with its optimizer, or has the automatic mode do so."""
    if how == "convert":
        autoamp.convert(model, optimizer, **options)
    else:
        autoamp.enable(hot=False, do_no_harm=False, **options)


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    dtype = next(model.parameters()).dtype
    x = torch.randn(16, 8, generator=generator).to(dtype)
    aim = torch.randint(0, 4, (16,), generator=generator)
    return nn.functional.cross_entropy(model(x).float(), aim)


def train(model: nn.Module, optimizer: Any, steps: range, **given: Any) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward(**given)
        optimizer.step()


def contents(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """The weights, the masters and the state."""
    state = [optimizer.state[p] for p in model.parameters()]
    found = [*model.parameters(), *optimizer.state_dict()[KEY].values()]
    found += [value for each in state for value in each.values()]
    return [each.detach().clone() for each in found]


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


# -- checkpoints -----------------------------------------------------------------------


@pytest.mark.parametrize("masters", ["split", "fp32"])
@pytest.mark.parametrize("order", ["convert last", "model last", "automatic"])
def test_what_was_loaded_before_there_were_masters_is_found(
    order: str, masters: Any
) -> None:
    model = net()
    optimizer = adam(model)
    autoamp.convert(model, optimizer, masters=masters)
    train(model, optimizer, range(4))
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    train(model, optimizer, range(4, 8))
    file.seek(0)
    weights, state = torch.load(file)
    other = net()
    resumed = adam(other)
    if order != "model last":
        other.load_state_dict(weights)
    resumed.load_state_dict(state)
    other.load_state_dict(weights)
    take(
        other, resumed, "enable" if order == "automatic" else "convert", masters=masters
    )
    train(other, resumed, range(4, 8))
    assert same(contents(other, resumed), contents(model, optimizer))


def test_carried_masters_follow_what_plain_training_has_written() -> None:
    model = net()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    autoamp.convert(model, optimizer)
    train(model, optimizer, range(4))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    plain = net()
    of_plain = optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    plain.load_state_dict(saved[0])
    of_plain.load_state_dict(saved[1])
    train(plain, of_plain, range(4, 8))
    moments = {p: of_plain.state[p]["exp_avg"].clone() for p in plain.parameters()}
    autoamp.convert(plain, of_plain)
    for param, master in masters_of(of_plain).items():
        assert torch.equal(master.to(BF16), param)
        assert torch.equal(of_plain.state[param]["exp_avg"].to(BF16), moments[param])


def wrapped(model: nn.Sequential, by: str) -> Any:
    if by == "compile":
        return torch.compile(model, backend="eager")
    if by == "inside":
        model[0] = checkpoint_wrapper(model[0])
        return model
    return nn.DataParallel(model) if by == "DataParallel" else model


@BOTH
@pytest.mark.parametrize("by", ["compile", "DataParallel", "inside"])
def test_names_are_those_of_the_model_without_wrappers(how: str, by: str) -> None:
    names = [name for name, _ in net().named_parameters()]
    model = net()
    around = wrapped(model, by)
    optimizer = adam(around)
    take(model if by == "compile" else around, optimizer, how)
    train(around, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    assert list(saved[KEY]) == names
    autoamp.disable()
    plain = net()
    resumed = adam(plain)
    autoamp.convert(plain, resumed)
    resumed.load_state_dict(saved)
    plain.load_state_dict({n: m.to(BF16) for n, m in saved[KEY].items()})
    found = resumed.state_dict()[KEY]
    assert same([*found.values()], [*saved[KEY].values()])
    # A checkpoint of earlier, with a wrapper's names: positions tell.
    old = {**saved, KEY: {f"module.{n}": m for n, m in saved[KEY].items()}}
    resumed.load_state_dict(old)
    assert same([*resumed.state_dict()[KEY].values()], [*saved[KEY].values()])


def test_an_fp32_model_takes_masters_over_after_the_models_own_state() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).to(BF16)
    model[2].weight = model[0].weight
    optimizer = adam(model)
    autoamp.convert(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((4, 8), float(step)).to(BF16)).float().sum().backward()
        optimizer.step()
    full = copy.deepcopy(model).float()
    full.load_state_dict(model.state_dict())
    masters = optimizer.state_dict()[KEY]
    assert not full.load_state_dict(masters, strict=False).unexpected_keys
    for mine, param in zip(full.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, masters_of(optimizer)[param])


# -- how long things live --------------------------------------------------------------


@BOTH
def test_nothing_keeps_an_optimizer_alive_and_the_next_has_split_masters(
    how: str,
) -> None:
    model = net()
    before: Any = None
    for _ in range(3):
        optimizer = adam(model)
        take(model, optimizer, how)
        train(model, optimizer, range(2))
        boundary = boundary_of(optimizer)
        assert boundary is not None
        assert boundary.masters is not None
        assert not boundary.masters.of, "all are split"
        before = boundary  # which outlives its optimizer
    gone = weakref.ref(optimizer)
    moment = weakref.ref(optimizer.state[model[0].weight]["exp_avg"])
    del optimizer
    assert gone() is None
    assert moment() is None
    assert before.masters.params == []
    loss_of(model, 0).backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {BF16}


# -- weights that become half-precision ones, or cease to be ---------------------------


def test_a_model_made_half_after_convert_gets_masters() -> None:
    model = net(FP32)
    optimizer = adam(model, lr=1e-4)
    autoamp.convert(model, optimizer, precision="bf16")
    train(model, optimizer, range(2))
    model.to(BF16)
    train(model, optimizer, range(2, 40))
    assert set(masters_of(optimizer)) == set(model.parameters())
    assert int((masters_of(optimizer)[model[1].weight] != 1).sum()) == 16


def test_a_model_made_double_goes_on_without() -> None:
    model = net()
    optimizer = adam(model)
    autoamp.convert(model, optimizer)
    train(model, optimizer, range(3))
    digits = {p: m.detach().clone() for p, m in masters_of(optimizer).items()}
    model.double()
    later = optim.SGD(model.parameters(), lr=0.0)
    optimizer.state_dict()
    assert all(torch.equal(p, digits[p].double()) for p in model.parameters())
    train(model, later, range(2))
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {
        torch.float64
    }


class Listing(optim.SGD):
    """Holds all weights of a model, the frozen ones too, and a buffer of its own."""

    def __init__(self, model: nn.Module) -> None:
        self.all = [*model.parameters()]
        self.last = [torch.zeros_like(p) for p in self.all]
        super().__init__([p for p in self.all if p.requires_grad], lr=0.1)


def test_frozen_weights_that_an_optimizer_holds_stay_half() -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = Listing(model)
    autoamp.convert(model, optimizer)
    train(model, optimizer, range(2))
    assert {p.dtype for p in model.parameters()} == {BF16}
    assert {each.dtype for each in optimizer.last} == {FP32}
    assert len(masters_of(optimizer)) == 4


# -- optimizers round optimizers -------------------------------------------------------


class Slow(Optimizer):
    """Pulls the weights back to slow ones at every second step, as Lookahead does."""

    def __init__(self, inside: Optimizer) -> None:
        self.optimizer = inside
        super().__init__([*inside.param_groups[0]["params"]], {"pull": 0.5})
        self.state: Any = defaultdict(dict)
        self.taken = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.optimizer.step(closure)
        self.taken += 1
        for p in self.param_groups[0]["params"] if self.taken % 2 == 0 else ():
            slow = self.state[p].setdefault("slow", p.clone())
            slow.lerp_(p, self.param_groups[0]["pull"])
            p.copy_(slow)

    def show(self) -> None:
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.lerp_(self.state[p].get("slow", p), 0.25)


def test_the_automatic_mode_waits_until_no_step_round_another_is_halfway() -> None:
    model = net()
    optimizer = Slow(adam(model))
    take(model, optimizer, "enable")
    for step in range(7):
        optimizer.optimizer.zero_grad()
        loss_of(model, step).backward()
        assert bool(masters_of(optimizer.optimizer)) == (step > 0)
        optimizer.step()
        optimizer.show()
    assert set(masters_of(optimizer.optimizer)) == set(model.parameters())
    assert {s["slow"].dtype for s in optimizer.state.values()} == {FP32}


def test_an_optimizer_round_another_computes_with_masters_too() -> None:
    model, by_hand = net(), net()
    wide = [nn.Parameter(p.detach().float()) for p in by_hand.parameters()]
    optimizer, other = Slow(adam(model)), Slow(optim.AdamW(wide, lr=1e-3))
    autoamp.convert(model, optimizer)
    for step in range(7):
        optimizer.optimizer.zero_grad()
        loss_of(model, step).backward()
        loss_of(by_hand, step).backward()
        for master, half in zip(wide, by_hand.parameters(), strict=True):
            assert half.grad is not None
            master.grad, half.grad = half.grad.float(), None
        for each in (optimizer, other):
            each.step()
            if step > 3:
                each.show()
        for master, half in zip(wide, by_hand.parameters(), strict=True):
            half.data.copy_(master.detach())
    found = masters_of(optimizer.optimizer)
    assert same(
        [found[p].detach() for p in model.parameters()], [*map(Tensor.detach, wide)]
    )


def closure_of(model: Any, optimizer: Slow, step: int) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        assert model[0].weight.dtype == BF16
        return loss

    return closure


@pytest.mark.parametrize("by_name", [False, True])
def test_the_closure_of_an_optimizer_round_another_meets_half_weights(
    by_name: bool,
) -> None:
    trained = []
    for early in (False, True):
        model = net()
        optimizer = Slow(adam(model))
        autoamp.convert(model, optimizer)
        for step in range(4):
            closure = closure_of(model, optimizer, step)
            if early:
                closure()
                optimizer.step()
            elif by_name:
                optimizer.step(closure=closure)
            else:
                optimizer.step(closure)
        trained.append([m.detach() for m in masters_of(optimizer.optimizer).values()])
    assert same(*trained)


# -- where masters do not serve --------------------------------------------------------


class SecondOrder(optim.SGD):
    """Differentiates the gradients in its step, as AdaHessian does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = self.param_groups[0]["params"]
        grads = [p.grad for p in params]
        towards = [torch.ones_like(g) for g in grads]
        curves = torch.autograd.grad(grads, params, towards, retain_graph=True)
        for p, g, h in zip(params, grads, curves, strict=True):
            p.sub_(0.1 * g / (h.abs() + 1))


class Forward(optim.SGD):
    """Runs the model in its step, as methods without a backward do."""

    model: nn.Module

    def step(self, closure: Any = None) -> Any:
        params = [*self.model.parameters()]
        grads = torch.autograd.grad(loss_of(self.model, 3), params)
        with torch.no_grad():
            for p, g in zip(params, grads, strict=True):
                p.sub_(g, alpha=0.1)


@BOTH
@pytest.mark.parametrize("kind", [SecondOrder, Forward])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_step_that_differentiates_has_the_weights_as_they_are(
    kind: Any, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "autoamp")
    trained = []
    for amp in (False, True):
        model = net()
        optimizer = kind(model.parameters(), lr=0.1)
        optimizer.model = model
        if amp:
            take(model, optimizer, how, guard=False)
        train(model, optimizer, range(4), create_graph=True)
        trained.append([p.detach() for p in model.parameters()])
    assert same(*trained)
    assert masters_of(optimizer) == {}
    (line,) = warned(caplog)
    says(line, kind.__name__, "no fp32 masters", "step(closure)")


class Checks(optim.SGD):
    """Raises before it writes anything, whatever the weights are."""

    fails = True

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise RuntimeError("not now")
        return super().step(closure)


@BOTH
def test_a_step_that_raises_without_masters_too_keeps_them(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, twin = net(), net()
    optimizer = Checks(model.parameters(), lr=1e-3, momentum=0.9)
    other = optim.SGD(twin.parameters(), lr=1e-3, momentum=0.9)
    optimizer.fails = False
    take(model, optimizer, how, masters="fp32")
    for step in range(6):
        for each, of in ((model, optimizer), (twin, other)):
            of.zero_grad()
            loss_of(each, step).backward()
        if step == 0 and how == "convert":
            autoamp.convert(twin, other, masters="fp32")
        optimizer.fails = step == 3
        if step == 3:
            with pytest.raises(RuntimeError, match="not now"):
                optimizer.step()
        else:
            optimizer.step()
            other.step()
    assert same(contents(model, optimizer), contents(twin, other))
    assert not warned(caplog)


def test_a_weight_that_torch_cannot_exchange_has_no_master(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, plain = net(), net()
    optimizer, of_plain = (
        optim.LBFGS(model.parameters()),
        optim.LBFGS(plain.parameters()),
    )
    autoamp.convert(model, optimizer)
    held = torch._C._WeakTensorRef(model[1].weight)
    for each, of in ((model, optimizer), (plain, of_plain)):

        def closure(each: nn.Module = each, of: Any = of) -> Tensor:
            of.zero_grad()
            loss = loss_of(each, 0)
            loss.backward()
            return loss

        of.step(closure)
    assert not held.expired()
    assert same([*model.parameters()], [*plain.parameters()])
    (line,) = warned(caplog)
    says(line, "LBFGS", "no fp32 masters", "weakrefs")
