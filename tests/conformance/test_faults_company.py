"""Company: threads, processes, shared weights, and conversions that come and go."""

from __future__ import annotations

import copy
import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.conformance.table import Figures
from tests.metrics import relative_error
from tests.training.steps import BF16, assert_same, mlp, state_of, weights_of

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
            exact = model(x)
    return relative_error([y], [exact])


def train(model: nn.Module, seed: int) -> list[tuple[float, float]]:
    """After each step, the error, and what that of weights one step old would be."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    found = []
    for x in batches(seed):
        with torch.no_grad():
            before = model(x)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            stale = relative_error([before], [model(x)])
        found.append((off_by(model, x), stale))
    return found


# -- threads ---------------------------------------------------------------------------


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("loss_scale", ["off", "dynamic"])
def test_eight_threads_train_a_model_each(loss_scale: str, figures: Figures) -> None:
    """(Not bit for bit as one after the other: so much torch itself does not keep.)"""
    start = threading.Barrier(THREADS)
    models = [
        autoamp.convert(mlp(), **{**BF16, "loss_scale": loss_scale})
        for _ in range(THREADS)
    ]

    def at_once(seed: int) -> list[tuple[float, float]]:
        start.wait()
        return train(models[seed], seed)

    with ThreadPoolExecutor(THREADS) as pool:
        rows = [row for rows in pool.map(at_once, range(THREADS)) for row in rows]
    assert min(stale for _, stale in rows) > 2 * ERROR, "an old copy would not show"
    assert max(error for error, _ in rows) < ERROR
    for model in models:
        report = autoamp.report(model)
        assert (report.runs, report.skipped) == (4 * STEPS, [])
        assert len(report.graphs) == 2  # with gradients and without
    figures.count("steps in threads", THREADS * STEPS)
    figures.worst("error over bound", max(error for error, _ in rows) / ERROR)


@pytest.mark.usefixtures("one_thread")
def test_eight_threads_call_one_model(figures: Figures) -> None:
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
    figures.count("calls in threads", THREADS * STEPS)


# -- processes -------------------------------------------------------------------------


def _in_process(model: nn.Module, x: Tensor, results: Any) -> None:
    """Trains in a process that a converted model was handed to, or begun in."""
    torch.set_num_threads(1)
    before = model(x).detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).square().mean().backward()
    optimizer.step()
    after = model(x).detach()
    results.put([autoamp.is_converted(model), before.tolist(), after.tolist()])


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
    results = context.Queue()
    process = context.Process(target=_in_process, args=(model, x, results))
    process.start()
    found = results.get(timeout=120)
    process.join(120)
    assert process.exitcode == 0

    class Here:
        put = staticmethod(lambda row: row)

    kept: list[Any] = []
    Here.put = staticmethod(kept.append)
    _in_process(twin, x, Here)
    assert found == kept[0]
    assert found[0] is True
    assert found[1] != found[2]
    assert_same(weights_of(model), weights_of(autoamp.revert(model)))
    model.zero_grad()
    autoamp.convert(model, **BF16)
    assert model(x).tolist() == found[1]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_model_sent_to_a_process_is_plain_there(method: str) -> None:
    """As pickles are: it runs, in fp32, and the sender is told."""
    model = autoamp.convert(mlp(), **BF16)
    plain = autoamp.revert(copy.deepcopy(model))
    x = torch.randn(4, 8)
    model(x)
    context = multiprocessing.get_context(method)
    results = context.Queue()
    process = context.Process(target=_in_process, args=(model, x, results))
    process.start()
    converted, before, _ = results.get(timeout=240)
    process.join(120)
    assert process.exitcode == 0
    assert converted is False
    assert torch.allclose(torch.tensor(before), plain(x), atol=1e-6)
    model(x)
    assert autoamp.report(model).runs == 2


# -- shared weights --------------------------------------------------------------------


def pair() -> tuple[nn.Module, nn.Module]:
    """Two models of the same weights."""
    first = mlp()
    return first, nn.Sequential(first[0], nn.GELU(), first[2])


@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("loss_scale", ["off", "dynamic"])
def test_two_models_that_share_weights(loss_scale: str, optimizers: int) -> None:
    """The one sees at once what the other's step has written."""
    first, second = pair()
    plain = copy.deepcopy((first, second))
    options = {**BF16, "loss_scale": loss_scale}

    def run(pair: tuple[nn.Module, nn.Module], low: bool) -> list[float]:
        made = [torch.optim.SGD(pair[0].parameters(), lr=0.5, momentum=0.5)]
        if optimizers == 2:
            made.append(torch.optim.Adam(pair[1].parameters(), lr=0.1))
        losses = []
        for step, x in enumerate(batches(0)):
            optimizer = made[step % optimizers]
            optimizer.zero_grad()
            loss = sum(model(x).square().mean() for model in pair)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if low:
                assert max(off_by(model, x) for model in pair) < ERROR
        return losses

    for model in (first, second):
        autoamp.convert(model, **options)
    ours, expected = run((first, second), True), run(plain, False)
    # Two roundings, of the forward and of the backward, add up over the steps.
    assert torch.allclose(
        torch.tensor(ours), torch.tensor(expected), rtol=2 * STEPS * ERROR
    )
    for model in (first, second):
        assert autoamp.report(model).runs == 2 * STEPS


# -- conversions that come and go ------------------------------------------------------


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

    def from_here(on: nn.Module, seed: int) -> Any:
        """The stretch by a model that is in one mode for good."""
        on.load_state_dict(model.state_dict())
        other = torch.optim.Adam(on.parameters(), lr=1e-2)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return stretch(on, other, seed)

    for round_, low in enumerate([False, True, False, True, True, False]):
        if low:
            both = (model, optimizer) if named else (model,)
            autoamp.convert(*both, **BF16)
        else:
            autoamp.revert(model)
        expected = from_here(always if low else plain, round_)
        assert_same(stretch(model, optimizer, round_), expected)
        assert autoamp.is_converted(model) is low
    assert "step" not in optimizer.__dict__
    assert int(next(iter(optimizer.state.values()))["step"]) == 6 * STEPS


# -- the recompile limit ---------------------------------------------------------------


class Breaks(nn.Module):
    """Of two graphs, of which the second's code belongs to all models of the class."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        torch._dynamo.graph_break()
        return self.fc(torch.tanh(h))


def outer() -> nn.Module:
    return nn.Sequential(Breaks())


def test_calls_past_the_recompile_limit_are_right_and_told(figures: Figures) -> None:
    """And the limit one model has met is not another's, though they share code."""
    limit = torch._dynamo.config.recompile_limit
    static = torch._dynamo.config.patch(
        automatic_dynamic_shapes=False, assume_static_by_default=True
    )
    first = autoamp.convert(outer(), **{**BF16, "strict": False})
    second = autoamp.convert(outer(), **BF16)
    with static:
        first(torch.randn(2, 8))
        graphs = autoamp.report(first).runs
        assert graphs > 1
        for rows in [*range(2, limit + 5), 2, 3, limit + 4]:
            assert off_by(first, torch.randn(rows, 8)) < ERROR
        [(_, why)] = autoamp.report(first).skipped
        assert "forward: some calls of it run in fp32" in why
        assert "torch._dynamo.config.recompile_limit" in why
        coverage = autoamp.report(first).coverage
        assert (coverage.calls_aside, coverage.calls_in_part) == (0, 0)
        assert coverage.low_flops == coverage.flops, "the Linear is still captured"
        before = autoamp.report(first).runs
        assert off_by(first, torch.randn(2, 8)) > 0
        assert autoamp.report(first).runs > before, "what was captured runs no more"
        for rows in range(2, limit + 1):
            second(torch.randn(rows, 8))
    assert autoamp.report(second).runs == graphs * (limit - 1)
    assert autoamp.report(second).skipped == []
    figures.count("calls past the limit", 5)
