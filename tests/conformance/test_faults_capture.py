"""Another torch: names missing by which captures, locks and scalers are known.

A model is as right without them as ever, and each test says what else is lost.
"""

from __future__ import annotations

import copy
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, fx, nn

import autoamp
from autoamp.compat.dynamo import entry
from tests.capture.test_custom_fwd import (
    BODIES,
    CPU_FWD,
    Model,
    function,
    reason_of,
    run,
)
from tests.capture.test_layers import Looping
from tests.capture.test_traces_of_threads import Trace
from tests.conformance.table import Figures
from tests.conformance.test_faults_torch import hide, trained
from tests.small_models import converted
from tests.training.steps import (
    BF16,
    FP16,
    assert_same,
    loss_of,
    mlp,
    scaling_of,
    weights_of,
)

THREADS = 4


@pytest.fixture(scope="module")
def expected() -> tuple[dict[str, Tensor], int]:
    return trained(BF16)


# -- a trace of another thread ---------------------------------------------------------


def test_an_unknown_refusal_during_a_trace_of_another_thread(
    monkeypatch, figures: Figures
) -> None:
    """What is lost: the call runs in fp32, and says so; the next one is converted."""
    torch._dynamo.reset()
    monkeypatch.setattr(entry, "_FORBIDDEN", "in the words of another torch")
    model, x = autoamp.convert(mlp().eval(), **BF16), torch.randn(4, 8)
    wanted = model(x)
    trace = Trace()
    trace.start()
    assert trace.is_under_way.wait(60)
    exact = model(x)
    trace.may_end.set()
    trace.join(60)
    assert not torch.equal(exact, wanted)
    assert "torch.fx has traced it" in autoamp.report(model).skipped[0][1]
    assert torch.equal(model(x), wanted)
    assert autoamp.report(model).runs == 2
    figures.count("names taken away")


# -- what is told of a frame -----------------------------------------------------------


def looped() -> tuple[Tensor, list[str], list[str]]:
    """What the model gives, its low ops, and why something of it is in no graph."""
    gc.collect()  # models alike are captured once while one of them lives
    torch._dynamo.reset()  # what is left to Python once would not be told again
    torch.manual_seed(0)
    model = autoamp.convert(Looping(), precision="bf16", do_no_harm=False)
    y = model(torch.randn(2, 4, 16))
    report = autoamp.report(model)
    low = [row.op for row in report.ops if row.is_low]
    return y.detach(), low, [why for _, why in report.skipped]


def test_without_a_reason_layers_are_captured_and_what_is_left_is_told(
    monkeypatch, figures: Figures
) -> None:
    """Nothing is lost: Dynamo's rules and its counters tell the same."""
    y, low, why = looped()
    assert low
    assert why
    hide(monkeypatch, "skip_reason")
    again, *same = looped()
    assert torch.equal(again, y)
    assert same == [low, why]
    figures.count("names taken away")


@pytest.mark.parametrize("rules", ["trace_rules", "check"])
def test_without_rules_layers_run_in_fp32_and_it_is_told(
    rules: str, monkeypatch, figures: Figures
) -> None:
    """What is lost: layers called from code left to Python are in no graph."""
    hide(monkeypatch, "skip_reason", rules)
    y, low, why = looped()
    torch.manual_seed(0)
    exact = Looping()(torch.randn(2, 4, 16))
    assert torch.equal(y, exact)
    assert low == []
    assert any("ran no rewritten graph" in each for each in why)
    figures.count("names taken away")


def test_without_counters_graphs_are_the_same(monkeypatch, figures: Figures) -> None:
    """What is lost: the report does not name the function that is left to Python."""
    y, low, why = looped()
    hide(monkeypatch, "skip_reason", "counters")
    again, same, untold = looped()
    assert torch.equal(again, y)
    assert same == low
    assert why
    assert untold == []
    figures.count("names taken away")


# -- what is remembered of inputs ------------------------------------------------------


def swap(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None
        torch.utils.swap_tensors(p, nn.Parameter(p.detach().clone()))


@pytest.mark.parametrize(
    "name", ["fake_tensor_converter", "meta_converter", "describer", "lookup_tensor"]
)
def test_training_is_the_same_where_fakes_are_remembered(
    name: str, expected: tuple[dict[str, Tensor], int], monkeypatch, figures: Figures
) -> None:
    """What is lost: torch refuses to swap a weight, as after its own captures."""
    free = autoamp.convert(mlp(), **BF16)
    free(torch.randn(4, 8)).sum().backward()
    swap(free)
    hide(monkeypatch, name)
    assert_same(trained(BF16), expected)
    del free
    gc.collect()  # or what was captured for others would be run
    held = autoamp.convert(mlp(), **BF16)
    held(torch.randn(4, 8)).sum().backward()
    with pytest.raises(RuntimeError, match="weakref"):
        swap(held)
    figures.count("names taken away")


# -- one compilation at a time ---------------------------------------------------------


def test_models_compile_one_at_a_time_without_dynamos_lock(
    expected: tuple[dict[str, Tensor], int], monkeypatch, figures: Figures
) -> None:
    """What is lost: what a user compiles in another thread may meet our limits."""
    hide(monkeypatch, "compile_lock")
    now: list[int] = []
    most: list[int] = []
    real = entry.recurrent_results

    @contextmanager
    def watched() -> Iterator[None]:
        """Inside our lock, and outside of what Dynamo locks by itself."""
        now.append(1)
        most.append(len(now))
        time.sleep(0.01)
        with real():
            yield
        now.pop()

    monkeypatch.setattr(entry, "recurrent_results", watched)
    models = [autoamp.convert(mlp(), **BF16) for _ in range(THREADS)]
    start = threading.Barrier(THREADS)

    def work(model: nn.Module) -> None:
        start.wait()
        model(torch.randn(4, 8)).sum().backward()

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [autoamp.report(model).runs for model in models] == [1] * THREADS
    assert max(most) == 1
    assert_same(trained(BF16), expected)
    figures.count("names taken away")


# -- who traces, and who scales --------------------------------------------------------


class Head(nn.Module):
    """Not an `Of`: `torch.fx` traces no `*args`."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(x).relu())


def test_fx_traces_a_converted_child_of_an_older_torch(
    monkeypatch, figures: Figures
) -> None:
    """What is lost: a `torch.export` may be called a trace of `torch.fx` as well."""
    hide(monkeypatch, "is_fx_symbolic_tracing")
    parent, x = Head(), torch.randn(3, 8)
    plain, exact = fx.symbolic_trace(parent), parent(x)
    autoamp.convert(parent.body, **BF16)
    again = fx.symbolic_trace(parent)
    assert again.code == plain.code
    assert torch.equal(again(x), exact)
    ((_, why),) = autoamp.report(parent.body).skipped
    assert "torch.fx has traced it" in why
    assert not torch.equal(parent(x), exact)
    assert autoamp.report(parent.body).runs == 1
    figures.count("names taken away")


def scaled(model: nn.Module) -> list[float]:
    """The scales of a script that has a GradScaler, whose steps are all taken."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def test_a_grad_scaler_that_shows_no_scale_is_taken_to_be_in_use(
    monkeypatch, figures: Figures
) -> None:
    """Twice scaled, every gradient here would overflow."""
    torch.manual_seed(0)
    known = mlp()
    unknown = copy.deepcopy(known)
    autoamp.convert(known, **FP16)
    scales = scaled(known)
    assert scales == [2.0**14] * 4
    hide(monkeypatch, "_scale")
    autoamp.convert(unknown, **FP16)
    assert scaled(unknown) == scales
    assert_same(weights_of(unknown), weights_of(known))
    figures.count("names taken away")


def test_beside_a_grad_scaler_that_shows_no_scale_a_step_is_unscaled(
    monkeypatch, figures: Figures
) -> None:
    """What is lost: what is too small for fp16 in that first step, and no other."""
    hide(monkeypatch, "_scale")
    scaler = torch.amp.GradScaler("cpu")  # of another model
    model = autoamp.convert(mlp(), **FP16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    arrived = []
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step, 1e-8).backward()
        arrived.append(any(p.grad.any() for p in model.parameters()))
        optimizer.step()
    assert scaler.is_enabled()
    assert arrived == [False, True, True]
    assert scaling_of(model).ledger.foreign is False
    figures.count("names taken away")


# -- what the author of a Function asks for --------------------------------------------


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_functions_stay_fp32_where_dynamo_shows_no_call(
    monkeypatch, figures: Figures
) -> None:
    """What is lost: `custom_fwd(cast_inputs=...)` is not followed."""
    hide(monkeypatch, "call_apply")
    applied = function(BODIES["product"], CPU_FWD(cast_inputs=torch.bfloat16))
    model = converted(Model(applied))
    run(model)
    assert "stays fp32" in reason_of(model)
    figures.count("names taken away")
