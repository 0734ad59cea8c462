"""Faults: NaN, exhausted memory, interrupts, a trace that fails, threads and processes.

A fault must do to a converted model what it does to the model itself, and no more: the
same values are lost, the same error comes out, and the next step trains on.
"""

from __future__ import annotations

import copy
import gc
import multiprocessing
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.metrics import relative_error
from tests.says import says
from tests.small_models import Of
from tests.training.steps import BF16, FP16, assert_same, mlp, state_of, weights_of

WIDTH = 8

# -- NaN and infinities ----------------------------------------------------------------


def attention() -> Of:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.project(x).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v)

    return Of(forward, project=nn.Linear(WIDTH, 3 * WIDTH))


def between(*layers: nn.Module, width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.Linear(width, WIDTH))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "silu": lambda: between(nn.SiLU()),
    "relu": lambda: between(nn.ReLU()),
    "layer norm": lambda: between(nn.LayerNorm(WIDTH)),
    "batch norm": lambda: between(nn.BatchNorm1d(WIDTH)),
    "softmax": lambda: between(nn.Softmax(-1)),
    "attention": lambda: between(attention()),
    "pool": lambda: between(nn.MaxPool1d(2), width=WIDTH // 2),
}
# Not GELU: of an infinity some CPUs make NaN in fp32 and infinity in fp16.  Not a
# convolution: torch's own bf16 kernel multiplies infinities by the zeros it pads
# channels with, and gives NaN where its fp32 kernel gives infinity.
BAD = (float("nan"), float("inf"), -float("inf"))


def kinds_of(value: Tensor | None) -> Any:
    """Where a tensor holds what."""
    if value is None:
        return None
    return value.isnan() + 2 * value.isposinf().int() + 4 * value.isneginf().int()


def outcome(model: nn.Module, bad: float, place: str) -> list[Any]:
    """Kinds of the values and gradients of one step with one bad number in it."""
    torch.manual_seed(1)
    x, grad = torch.randn(2, 5, WIDTH).unbind()
    spoilt = {"input": x, "gradient": grad, "weight": next(model.parameters())}
    with torch.no_grad():
        spoilt[place][3, 1] = bad
    y = model(x.requires_grad_())
    y.backward(grad)
    grads = [p.grad for p in model.parameters()]
    return list(map(kinds_of, [y, x.grad, *grads, *model.buffers()]))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_not_finite_is_where_it_is_in_fp32(name: str, precision: str) -> None:
    model = MODELS[name]()
    # Scaled by 1: whatever is infinite was not made so by the scale.
    options = {**BF16, "precision": precision, "loss_scale": 1.0}
    base = autoamp.convert(copy.deepcopy(model), **options)
    seen = 0
    for bad in BAD:
        for place in ("input", "weight", "gradient"):
            expected = outcome(copy.deepcopy(model), bad, place)
            assert_same(outcome(copy.deepcopy(base), bad, place), expected)
            seen += sum(int(k.count_nonzero()) for k in expected if k is not None)
    assert seen > 9, "nothing was lost anywhere: the test tests nothing"
    assert any(row.is_low for row in autoamp.report(base).ops)


# -- errors in the middle of a step ----------------------------------------------------

_armed: dict[str, type[BaseException]] = {}
"""What is raised, by place, until it is."""


def _break_at(place: str) -> None:
    kind = _armed.pop(place, None)
    if kind is not None:
        raise kind("planted")


_traced: list[int] = []


def _shape_of(x: Tensor) -> Tensor:
    _traced.append(0)
    _break_at(f"trace {len(_traced)}")
    return torch.empty_like(x)


@torch.library.custom_op("autoamp_faults::fragile", mutates_args=())
def fragile(x: Tensor) -> Tensor:
    _break_at("forward")
    return x.clone()


@torch.library.custom_op("autoamp_faults::fragile_grad", mutates_args=())
def fragile_grad(g: Tensor) -> Tensor:
    _break_at("backward")
    return g.clone()


fragile.register_fake(_shape_of)
fragile_grad.register_fake(torch.empty_like)
torch.library.register_autograd(
    "autoamp_faults::fragile",
    lambda _, g: fragile_grad(g),
    setup_context=lambda ctx, inputs, output: None,
)


def Fragile() -> Of:
    """Runs out of memory between its layers, where it is told to."""
    return Of(
        lambda m, x: m.second(torch.tanh(fragile(m.first(x)))),
        first=nn.Linear(WIDTH, 16),
        second=nn.Linear(16, WIDTH),
    )


class Halting(torch.optim.SGD):
    """Writes to its first weight, then may fail."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        weights = self.param_groups[0]["params"]
        for place, weight in enumerate(weights):
            with torch.no_grad():
                weight.sub_(weight.grad, alpha=0.1)
            if place == 0:
                _break_at("step")


PLAN = ("", "forward", "", "backward", "", "step", "", "step")
PLAN += ("forward", "backward", "")


def train(model: nn.Module, kind: type[BaseException]) -> None:
    """A step for each entry of the plan, which is where an error is planted."""
    optimizer = Halting(model.parameters(), lr=0.1)
    for step, place in enumerate(PLAN):
        optimizer.zero_grad()
        torch.manual_seed(step)
        x = torch.randn(4, WIDTH)
        seen = weakref.ref(x)
        if place:
            _armed[place] = kind
        fell = False
        try:
            model(x).square().mean().backward()
            optimizer.step()
        except kind:
            fell = True
        assert fell is bool(place)
        del x
        assert not _armed
        if place:
            gc.collect()
            assert seen() is None, f"step {step}, {place}: its input is still held"
            assert_copies_are_fresh(model)


def assert_copies_are_fresh(model: nn.Module) -> None:
    """A deep copy makes low copies of its weights of its own."""
    with torch.no_grad():
        probe = torch.ones(3, WIDTH)
        assert torch.equal(model(probe), copy.deepcopy(model)(probe))


def by_hand(model: nn.Module) -> None:
    """What `PLAN` comes to."""
    weights = list(model.parameters())
    for step, place in enumerate(PLAN):
        if place in ("forward", "backward"):
            continue
        model.zero_grad()
        torch.manual_seed(step)
        model(torch.randn(4, WIDTH)).square().mean().backward()
        with torch.no_grad():
            for weight in weights[:1] if place == "step" else weights:
                assert weight.grad is not None
                weight.sub_(weight.grad, alpha=0.1)


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "compiled"])
def test_training_goes_on_after_a_fault(
    precision: str, kind: type[BaseException]
) -> None:
    """It is bit for bit a run that stops by itself where the faults are."""
    options = {**BF16, "loss_scale": "off"} if precision != "fp16" else FP16
    if precision == "compiled":
        options = {**options, "backend": lambda gm, _: gm.forward}
    model = autoamp.convert(Fragile(), **options)
    expected = copy.deepcopy(model)
    train(model, kind)
    by_hand(expected)
    assert_same(weights_of(model), weights_of(expected))
    report = autoamp.report(model)
    assert report.skipped == []
    assert len(report.graphs) <= 2  # with gradients and without


def test_memory_that_ends_while_weights_are_copied() -> None:
    model = autoamp.convert(between(nn.GELU()), **BF16)
    x = torch.randn(4, WIDTH)
    model(x)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)
    ends = mock.Mock(side_effect=torch.OutOfMemoryError("planted"))
    refused = pytest.raises(torch.OutOfMemoryError)
    with mock.patch("torch._foreach_copy_", ends), refused:
        model(x)
    assert_copies_are_fresh(model)


# -- a first call that fails -----------------------------------------------------------


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["trace 2", "compiler"])
def test_a_first_call_that_fails(place: str, kind: type[BaseException]) -> None:
    """Not strict, the model runs on, low or told of; an interrupt reaches the user."""

    def backend(gm: Any, inputs: Any) -> Any:
        _break_at("compiler")
        return gm.forward

    plain = Fragile()
    x = torch.randn(4, WIDTH)
    options = {**BF16, "strict": False, "backend": backend}
    model = autoamp.convert(copy.deepcopy(plain), **options)
    _traced.clear()
    _armed.clear()
    _armed[place] = kind
    if kind is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            model(x)
    for _ in range(2):
        assert torch.allclose(model(x), plain(x), atol=2.0**-6)
    model(x).sum().backward()
    assert not _armed, "nothing failed"
    report = autoamp.report(model)
    low = any(row.is_low for row in report.ops)
    assert low is not bool(report.skipped)
    assert low or kind is ZeroDivisionError


# -- company: threads, processes, shared weights, conversions that come and go ---------

THREADS = 8
STEPS = 10


def batches(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 8, generator=generator) for _ in range(STEPS)]


ERROR = 3 * 3 * 2**-9
"""Of a model of three low ops: each rounds two operands and a result to bf16."""


def off_by(model: nn.Module, x: Tensor) -> float:
    """Relative error of a converted model to fp32 with the weights it has now."""
    with torch.no_grad():
        y = model(x)
        with autoamp.disabled():
            return relative_error([y], [model(x)])


@pytest.mark.usefixtures("one_thread")
def test_eight_threads_call_one_model() -> None:
    """The first call of each shape too, with gradients and without."""
    model = autoamp.convert(mlp(), **BF16)
    start = threading.Barrier(THREADS)

    def work(thread: int) -> list[Tensor]:
        start.wait()
        with torch.set_grad_enabled(thread % 2 == 0):
            return [model(x).detach() for x in batches(thread)]

    with ThreadPoolExecutor(THREADS) as pool:
        ours = list(pool.map(work, range(THREADS)))
    with autoamp.disabled(), torch.no_grad():
        exact = [[model(x) for x in batches(thread)] for thread in range(THREADS)]
    for outputs, expected in zip(ours, exact, strict=True):
        assert 0 < relative_error(outputs, expected) < ERROR
    report = autoamp.report(model)
    assert (len(report.graphs), report.skipped) == (2, [])


def _trained_elsewhere(model: nn.Module, x: Tensor) -> tuple[bool, Any, Any]:
    """Whether a model is converted here, and its results before and after a step."""
    torch.set_num_threads(1)
    before = model(x).detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).square().mean().backward()
    optimizer.step()
    return autoamp.is_converted(model), before.tolist(), model(x).tolist()


_KEPT: list[Any] = []


def _trained_from_kept() -> tuple[bool, Any, Any]:
    return _trained_elsewhere(*_KEPT)


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.usefixtures("one_thread")
def test_a_fork_trains_as_its_parent(called_before: bool) -> None:
    """With one thread.

    With several, torch itself hangs: a bf16 product in a process that is forked after a
    bf16 product waits for threads of oneDNN that have not been forked with it.
    """
    model = autoamp.convert(mlp(), **BF16)
    twin, x = copy.deepcopy(model), torch.randn(4, 8)
    if called_before:
        model(x)
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, context, _KEPT.extend, ([model, x],)) as pool:
        found = pool.submit(_trained_from_kept).result(240)
    assert found == _trained_elsewhere(twin, x)
    assert found[0] is True
    assert found[1] != found[2]
    assert model(x).tolist() == found[1]


@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("loss_scale", ["off", "dynamic"])
def test_two_models_that_share_weights(loss_scale: str, optimizers: int) -> None:
    """The one sees at once what the other's step has written."""
    first = mlp()
    second = nn.Sequential(first[0], nn.GELU(), first[2])
    made = [torch.optim.SGD(first.parameters(), lr=0.5, momentum=0.5)]
    if optimizers == 2:
        made.append(torch.optim.Adam(second.parameters(), lr=0.1))
    for model in (first, second):
        autoamp.convert(model, **{**BF16, "loss_scale": loss_scale})
    for step, x in enumerate(batches(0)):
        optimizer = made[step % optimizers]
        optimizer.zero_grad()
        sum(model(x).square().mean() for model in (first, second)).backward()
        before = weights_of(first)
        optimizer.step()
        assert any(not torch.equal(before[k], v) for k, v in weights_of(first).items())
        assert max(off_by(model, x) for model in (first, second)) < ERROR
    for model in (first, second):
        assert autoamp.report(model).runs == 2 * STEPS


@pytest.mark.parametrize("named", [False, True])
def test_converted_reverted_and_converted_again_in_training(named: bool) -> None:
    """Each stretch is what it would be from that state on; the state is kept."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    plain = copy.deepcopy(model)
    always = autoamp.convert(copy.deepcopy(model), **BF16)

    def stretch(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> Any:
        for x in batches(seed):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return weights_of(model), state_of(optimizer)

    for turn, low in enumerate([False, True, False, True, True, False]):
        if low:
            autoamp.convert(model, *([optimizer] if named else []), **BF16)
        else:
            autoamp.revert(model)
        # The same stretch by a model that is in one mode for good.
        twin = always if low else plain
        twin.load_state_dict(model.state_dict())
        other = torch.optim.Adam(twin.parameters(), lr=1e-2)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        expected = stretch(twin, other, turn)
        assert_same(stretch(model, optimizer, turn), expected)
        assert autoamp.is_converted(model) is low
    assert "step" not in optimizer.__dict__
    assert int(next(iter(optimizer.state.values()))["step"]) == 6 * STEPS


def test_calls_past_the_recompile_limit_are_right_and_told() -> None:
    """And the limit one model has met is not another's, though they share code."""

    def halves(m: Any, x: Tensor) -> Tensor:
        h = m.fc(x)
        torch._dynamo.graph_break()
        return m.fc(torch.tanh(h))

    def outer() -> nn.Module:
        return nn.Sequential(Of(halves, fc=nn.Linear(8, 8)))

    limit = torch._dynamo.config.recompile_limit
    first = autoamp.convert(outer(), **{**BF16, "strict": False})
    second = autoamp.convert(outer(), **BF16)
    with torch._dynamo.config.patch(
        automatic_dynamic_shapes=False, assume_static_by_default=True
    ):
        for rows in [*range(2, limit + 5), 2, 3, limit + 4]:
            assert off_by(first, torch.randn(rows, 8)) < ERROR
        told = [why for _, why in autoamp.report(first).skipped]
        says(told, option="torch._dynamo.config.recompile_limit")
        for rows in range(2, limit + 1):
            second(torch.randn(rows, 8))
    assert autoamp.report(second).skipped == []
