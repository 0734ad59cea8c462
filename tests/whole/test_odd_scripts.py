"""What people do with models that the automatic mode must not stumble over."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import autoamp
from autoamp.training.ledger import BACKWARDS
from tests.metrics import relative_error

WIDTH = 16
CLOSE = {"bf16": 2.0**-5, "fp16": 2.0**-8}
"""Four times the dtype's eps: a few roundings follow each other."""


@pytest.fixture(params=["bf16", "fp16"])
def precision(request) -> Iterator[str]:
    autoamp.enable(precision=request.param, do_no_harm=False)
    yield request.param
    autoamp.disable()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 4))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Any:
        return self.inner(x).sin()


def x_of(rows: int = 8) -> Tensor:
    return torch.randn(rows, WIDTH)


# -- regions recomputed by the script --------------------------------------------------


def test_checkpoint_round_a_model(precision: str) -> None:
    """Each new size, and each new grad mode, is captured under checkpoint's hooks."""
    model = mlp()
    for rows in (8, 8, 5, 3):
        x = x_of(rows)
        with torch.no_grad():
            model(x)
        model.zero_grad()
        checkpoint(model, x, use_reentrant=False).square().mean().backward()
        ours = [p.grad for p in model.parameters()]
        model.zero_grad()
        with autoamp.disabled():
            model(x).square().mean().backward()
        exact = [p.grad for p in model.parameters()]
        assert relative_error(ours, exact) < CLOSE[precision]
    coverage = autoamp.report(model).coverage
    assert coverage.calls_aside == 0


def test_hooks_of_saved_tensors_see_the_model_only(precision: str) -> None:
    seen: list[Tensor] = []

    def pack(value: Tensor) -> Tensor:
        seen.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        mlp()(x_of()).sum().backward()
    assert seen
    assert {type(value) for value in seen} <= {Tensor, nn.Parameter}


# -- steps that begin before the first call --------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"), [(torch.optim.SGD, {}), (torch.optim.LBFGS, {"max_iter": 3})]
)
def test_first_call_inside_a_step(
    kind: Any, options: dict[str, int], precision: str
) -> None:
    """Its first gradients overflow in fp16: they must not be stepped by."""
    model, x, y = mlp(), x_of(64), 10 * torch.randn(64, 4)
    optimizer = kind(model.parameters(), lr=1e-4, **options)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y, reduction="sum")
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure).detach()) for _ in range(12)]
    assert all(p.isfinite().all() for p in model.parameters())
    assert losses[-1] < losses[0]
    assert autoamp.is_converted(model)


# -- classes with ideas of their own ---------------------------------------------------


class GroupsOfParameters(Net):
    def parameters(self, group: str) -> Any:
        raise AssertionError("not the library's to call")


class Config(Net):
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return {"rate": 1.0}[name]  # a KeyError


class Anything(Net):
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return None


@pytest.mark.parametrize("kind", [GroupsOfParameters, Config, Anything])
def test_classes_that_answer_otherwise(kind: type[nn.Module], precision: str) -> None:
    model, x = kind(), x_of()
    with autoamp.disabled():
        exact = kind.forward(model, x)
    ours = model(x)
    assert relative_error(ours, exact) < CLOSE[precision]
    assert not torch.equal(ours, exact)
    assert autoamp.is_converted(model)


class Equal(Net):
    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)


class Later(Net):
    async def forward(self, x: Tensor) -> Any:
        await asyncio.sleep(0)
        return self.inner(x)


class Piecewise(Net):
    def forward(self, x: Tensor) -> Iterator[Tensor]:
        for row in x:
            yield self.inner(row)


def test_what_can_only_be_left_alone(precision: str) -> None:
    x = x_of()
    model: nn.Module = Equal()
    with autoamp.disabled():
        exact = Equal.forward(model, x)
    assert relative_error(model(x), exact) < CLOSE[precision]
    for_later = Later()
    assert relative_error(asyncio.run(for_later(x)), for_later.inner(x)) == 0
    pieces = Piecewise()(x)
    assert next(pieces).shape == (4,)
    assert len(list(pieces)) == 7


# -- copies, pickles, replaced code ----------------------------------------------------


def test_a_copy_of_the_names_runs_its_own_weights(precision: str) -> None:
    model, x = Net(), x_of()
    model(x)
    other = Net.__new__(Net)
    other.__dict__.update(model.__dict__)
    other._modules = {"inner": mlp()}
    with autoamp.disabled():
        exact = Net.forward(other, x)
    assert relative_error(other(x), exact) < CLOSE[precision]
    assert autoamp.is_converted(model)
    with autoamp.disabled():
        exact = Net.forward(model, x)
    assert relative_error(model(x), exact) < CLOSE[precision]


def test_a_class_with_another_forward(precision: str) -> None:
    class Changing(Net):
        pass

    model, x = Changing(), x_of()
    before = model(x)
    Changing.forward = lambda self, x: self.inner(x) + 100
    after = model(x)
    assert (after - before).min() > 90


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own
def test_scripting_after_training(precision: str) -> None:
    model, x = mlp(), x_of()
    model(x)
    assert autoamp.is_converted(model)
    scripted = torch.jit.script(model)(x)
    with autoamp.disabled():
        assert torch.equal(scripted, model(x))


def test_steps_by_hand(precision: str) -> None:
    """Nobody would skip an overflow of theirs, so nothing scales their loss."""
    model, x = mlp(), x_of(64)
    for _ in range(3):
        loss = model(x).square().sum()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        assert all(g.isfinite().all() for g in grads)
    with autoamp.disabled():
        loss = model(x).square().sum()
        exact = torch.autograd.grad(loss, list(model.parameters()))
    assert relative_error(list(grads), list(exact)) < CLOSE[precision]


def test_anomalies_are_not_those_of_the_scale(precision: str) -> None:
    model, x = mlp(), x_of(64)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    with torch.autograd.set_detect_anomaly(True):
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()


class Judged(nn.Sequential):
    """Gives its loss: no gradient enters by whose size the scale could go."""

    def __init__(self) -> None:
        super().__init__(*mlp())

    def forward(self, x: Tensor) -> Tensor:
        return (100 * super().forward(x)).square().mean()


def test_clipping_that_wants_finite_gradients(precision: str) -> None:
    """While the loss scale finds its place, whole steps are skipped, and no error."""
    model, x = Judged(), x_of(64)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    before, skipped = copy.deepcopy(model.state_dict()), []
    for _ in range(12):
        optimizer.zero_grad()
        model(x).backward()
        for part in (model, model[2]):
            clip_grad_norm_(part.parameters(), 1.0, error_if_nonfinite=True)
        torch.nn.utils.get_total_norm(
            (p.grad for p in model.parameters()), error_if_nonfinite=True
        )
        torch.nn.utils.get_total_norm(model[0].weight.grad, error_if_nonfinite=True)
        optimizer.step()
        skipped.append(bool(getattr(optimizer, "step_was_skipped", False)))
    assert not skipped[-1]
    assert skipped[0] == (precision == "fp16")
    assert not torch.equal(model[2].weight, before["2.weight"])


def test_clipping_still_refuses_what_is_infinite_by_itself(precision: str) -> None:
    BACKWARDS.runs.clear()  # what models of other tests found is theirs while they live
    model, x = mlp(), x_of()
    model(x).sum().backward()
    weight = torch.ones(3, requires_grad=True)
    weight.grad = torch.full((3,), torch.inf)
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("beside", [False, True])
def test_clipping_still_refuses_a_loss_that_is_nan(
    precision: str, beside: bool
) -> None:
    """Also while the last scaled backward is that of another model, and overflowed."""
    model, x = mlp(), x_of()
    if beside:
        autoamp.disable()
        autoamp.enable(precision="fp16", do_no_harm=False)
        other = Judged()
        other(1e3 * x).backward()
        assert BACKWARDS.runs[-1].overflowed
        autoamp.disable()
        autoamp.enable(precision=precision, do_no_harm=False)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    for factor in (1.0, torch.nan):
        optimizer.zero_grad()
        (model(x).sum() * factor).backward()
        if factor == 1.0:
            optimizer.step()
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def test_clipping_of_weights_before_the_graph_that_overflows(request) -> None:
    """Their optimizer holds no weight of that graph, which passes its gradient on."""
    request.addfinalizer(autoamp.disable)
    autoamp.enable(precision="fp16", do_no_harm=False)
    model, x = Judged(), x_of(64)
    before = nn.Parameter(torch.ones(WIDTH))
    optimizers = [torch.optim.SGD(ps, 1e-6) for ps in ([before], model.parameters())]
    overflows = 0
    for _ in range(12):
        (10 * model(x * before)).backward()
        clip_grad_norm_([before], 1.0, error_if_nonfinite=True)
        assert before.grad is not None
        overflows += not before.grad.isfinite().all()
        for each in optimizers:
            each.step()
            each.zero_grad()
    assert overflows


def test_a_model_converted_by_name_tells_of_an_overflow_nobody_skips(caplog) -> None:
    model, x = Judged(), x_of(64)
    autoamp.convert(model, precision="fp16", do_no_harm=False)
    finite = []
    for _ in range(12):
        grads = torch.autograd.grad(model(x), list(model.parameters()))
        finite.append(all(g.isfinite().all() for g in grads))
    assert finite[-1]
    assert not finite[0]
    messages = [record.message for record in caplog.records]
    assert len([m for m in messages if "overflowed at loss scale" in m]) == 1


class Forces(Net):
    """Energy and forces: a backward inside the forward."""

    def forward(self, x: Tensor) -> Any:
        x = x.requires_grad_()
        energy = self.inner(x).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy, force


def test_a_backward_inside_a_forward(precision: str) -> None:
    model, x = Forces(), x_of()
    for _ in range(2):
        energy, force = model(x.clone())
        model.zero_grad()
        (energy + force.square().sum()).mul(1e-2).backward()
    ours = [force, *(p.grad for p in model.parameters())]
    model.zero_grad()
    with autoamp.disabled():
        energy, exact = model(x.clone())
        (energy + exact.square().sum()).mul(1e-2).backward()
    theirs = [exact, *(p.grad for p in model.parameters())]
    assert relative_error(ours, theirs) < CLOSE[precision]
    report = autoamp.report(model)
    assert report.skipped == []
    assert len(report.graphs) == 1
