"""Faults: NaN, exhausted memory, interrupts, a pass that fails, threads and processes.

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
from autoamp import compat
from autoamp.capture import engine
from autoamp.check.verify import Verifier
from autoamp.compat import inductor
from autoamp.pipeline import passes, run
from autoamp.rules import parse, table
from tests.metrics import relative_error
from tests.small_models import Of
from tests.training.steps import BF16, FP16, assert_same, mlp, state_of, weights_of

WIDTH = 8
NOT_STRICT = {**BF16, "strict": False}

# -- NaN and infinities ----------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v)


def between(*layers: nn.Module, width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.Linear(width, WIDTH))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "silu": lambda: between(nn.SiLU()),
    "relu": lambda: between(nn.ReLU()),
    "layer norm": lambda: between(nn.LayerNorm(WIDTH)),
    "batch norm": lambda: between(nn.BatchNorm1d(WIDTH)),
    "softmax": lambda: between(nn.Softmax(-1)),
    "attention": lambda: between(Attention()),
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
    if place == "input":
        x[1, 2] = bad
    if place == "gradient":
        grad[2, 1] = bad
    if place == "weight":
        with torch.no_grad():
            next(model.parameters())[3, 1] = bad
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
            ours = outcome(copy.deepcopy(base), bad, place)
            assert_same(ours, expected)
            seen += sum(int(k.count_nonzero()) for k in expected if k is not None)
    assert seen > 9, "nothing was lost anywhere: the test tests nothing"
    assert any(row.is_low for row in autoamp.report(base).ops)


@pytest.mark.parametrize("place", ["input", "weight gradient"])
def test_fp16_skips_the_bad_steps_and_no_other(place: str) -> None:
    scale = autoamp.DynamicLossScale(climbs=False)  # it moves by skips alone
    model = autoamp.convert(between(nn.GELU()), **{**FP16, "loss_scale": scale})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    skipped = []
    for step in range(6):
        bad = step in (2, 4)
        before = weights_of(model)
        optimizer.zero_grad()
        x = torch.randn(4, WIDTH)
        if bad and place == "input":
            x[1, 2] = float("nan")
        loss = model(x).square().mean()
        (loss * torch.inf if bad and place != "input" else loss).backward()
        optimizer.step()
        skipped.append(optimizer.step_was_skipped)
        assert (differs(before, model)) is not bad
        assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert skipped == [step in (2, 4) for step in range(6)]
    state = autoamp.report(model).loss_scale
    assert (state.scale, state.skipped_steps) == (2.0**13, 2)


def differs(before: dict[str, Tensor], model: nn.Module) -> bool:
    return any(not torch.equal(before[k], v) for k, v in weights_of(model).items())


# -- errors in the middle of a step ----------------------------------------------------

_armed: dict[str, type[BaseException]] = {}
"""What is raised, by place, until it is."""


def _break_at(place: str) -> None:
    kind = _armed.pop(place, None)
    if kind is not None:
        raise kind("planted")


@torch.library.custom_op("autoamp_faults::fragile", mutates_args=())
def fragile(x: Tensor) -> Tensor:
    _break_at("forward")
    return x.clone()


@torch.library.custom_op("autoamp_faults::fragile_grad", mutates_args=())
def fragile_grad(g: Tensor) -> Tensor:
    _break_at("backward")
    return g.clone()


fragile.register_fake(torch.empty_like)
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


def train(model: nn.Module, plan: tuple[str, ...], kind: type[BaseException]) -> None:
    """A step for each entry of the plan, which is where an error is planted."""
    optimizer = Halting(model.parameters(), lr=0.1)
    for step, place in enumerate(plan):
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
        if not place:
            continue
        gc.collect()
        assert seen() is None, f"step {step}, {place}: its input is still held"
        with torch.no_grad():
            probe = torch.ones(3, WIDTH)
            # A deep copy has copies of its weights of its own.
            assert torch.equal(model(probe), copy.deepcopy(model)(probe))


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
    train(model, PLAN, kind)
    by_hand(expected)
    assert_same(weights_of(model), weights_of(expected))
    report = autoamp.report(model)
    assert report.skipped == []
    assert len(report.graphs) <= 2  # with gradients and without


def by_hand(model: nn.Module) -> None:
    """What `PLAN` comes to."""
    weights = list(model.parameters())
    for step, place in enumerate(PLAN):
        model.zero_grad()
        torch.manual_seed(step)
        x = torch.randn(4, WIDTH)
        if place in ("forward", "backward"):
            continue
        model(x).square().mean().backward()
        with torch.no_grad():
            for weight in weights[:1] if place == "step" else weights:
                assert weight.grad is not None
                weight.sub_(weight.grad, alpha=0.1)


def test_memory_that_ends_while_weights_are_copied() -> None:
    model = autoamp.convert(between(nn.GELU()), **BF16)
    x = torch.randn(4, WIDTH)
    model(x)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)

    error = torch.OutOfMemoryError("planted")
    with failing(compat, "copy_all", error), pytest.raises(torch.OutOfMemoryError):
        model(x)
    assert torch.equal(model(x), copy.deepcopy(model)(x))


# -- a pass that fails -----------------------------------------------------------------

STAGES: list[tuple[Any, str]] = [
    (run, "normalise"),
    (passes, "classify"),
    (passes, "insert_casts"),
    (Verifier, "verify"),
    (compat, "make_code"),
    (engine, "scaled"),
]
each_stage = pytest.mark.parametrize(
    ("owner", "name"), STAGES, ids=[name for _, name in STAGES]
)


def failing(owner: Any, name: str, error: BaseException) -> Any:
    return mock.patch.object(owner, name, side_effect=error)


@each_stage
def test_the_model_runs_on_where_a_stage_fails(owner: Any, name: str) -> None:
    plain = between(nn.GELU())
    x = torch.randn(4, WIDTH)
    exact = plain(x)
    error = ZeroDivisionError("the bridge is out")

    model = autoamp.convert(copy.deepcopy(plain), **NOT_STRICT)
    with failing(owner, name, error):
        assert torch.equal(model(x), exact)
        model(x).sum().backward()
    assert torch.equal(model(x), exact)
    report = autoamp.report(model)
    assert report.skipped == [("graph 0", "ZeroDivisionError: the bridge is out")]
    assert (report.runs, report.graphs) == (0, [])

    strict = autoamp.convert(copy.deepcopy(plain), **BF16)
    with failing(owner, name, error), pytest.raises(autoamp.AutoampError) as caught:
        strict(x)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert not torch.equal(strict(x), exact)
    assert autoamp.report(strict).runs == 1


@each_stage
def test_an_interrupt_in_a_stage_reaches_the_user(owner: Any, name: str) -> None:
    model = autoamp.convert(between(nn.GELU()), **BF16)
    x = torch.randn(4, WIDTH)
    with failing(owner, name, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        model(x)
    model(x).sum().backward()
    report = autoamp.report(model)
    assert (report.runs, len(report.graphs), report.skipped) == (1, 1, [])


def test_a_compiler_that_fails_leaves_the_model_to_python() -> None:
    def backend(gm: Any, inputs: Any) -> Any:
        raise ZeroDivisionError("no compiler")

    plain = between(nn.GELU())
    x = torch.randn(4, WIDTH)
    model = autoamp.convert(copy.deepcopy(plain), **{**NOT_STRICT, "backend": backend})
    for _ in range(3):
        assert torch.allclose(model(x), plain(x), atol=2.0**-6)
    assert "no compiler" in str(autoamp.report(model).skipped)


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
            exact = model(x)
    return relative_error([y], [exact])


def trained_beside(model: nn.Module, seed: int) -> list[tuple[float, float]]:
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
def test_eight_threads_train_a_model_each(loss_scale: str) -> None:
    """(Not bit for bit as one after the other: so much torch itself does not keep.)"""
    start = threading.Barrier(THREADS)
    models = [
        autoamp.convert(mlp(), **{**BF16, "loss_scale": loss_scale})
        for _ in range(THREADS)
    ]

    def at_once(seed: int) -> list[tuple[float, float]]:
        start.wait()
        return trained_beside(models[seed], seed)

    with ThreadPoolExecutor(THREADS) as pool:
        rows = [row for rows in pool.map(at_once, range(THREADS)) for row in rows]
    assert min(stale for _, stale in rows) > 2 * ERROR, "an old copy would not show"
    assert max(error for error, _ in rows) < ERROR
    for model in models:
        report = autoamp.report(model)
        assert (report.runs, report.skipped) == (4 * STEPS, [])
        assert len(report.graphs) == 2  # with gradients and without


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


# -- processes -------------------------------------------------------------------------


def _trained_elsewhere(model: nn.Module, x: Tensor) -> tuple[bool, Any, Any]:
    """Whether a model is converted here, and its results before and after a step."""
    torch.set_num_threads(1)
    before = model(x).detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).square().mean().backward()
    optimizer.step()
    return autoamp.is_converted(model), before.tolist(), model(x).tolist()


def in_process(method: str, model: nn.Module, x: Tensor) -> tuple[bool, Any, Any]:
    """The same in a process that the model was handed to, or begun in."""
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(1, context, _keep, (model, x)) as pool:
        return pool.submit(_trained_from_kept).result(240)


def _keep(*given: Any) -> None:
    _KEPT[:] = given


def _trained_from_kept() -> tuple[bool, Any, Any]:
    return _trained_elsewhere(*_KEPT)


_KEPT: list[Any] = []


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
    found = in_process("fork", model, x)
    assert found == _trained_elsewhere(twin, x)
    assert found[0] is True
    assert found[1] != found[2]
    assert model(x).tolist() == found[1]


def test_a_model_sent_to_a_process_is_plain_there() -> None:
    """As pickles are: it runs, in fp32, and the sender is told."""
    model = autoamp.convert(mlp(), **BF16)
    plain = autoamp.revert(copy.deepcopy(model))
    x = torch.randn(4, 8)
    model(x)
    converted, before, _ = in_process("spawn", model, x)
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


def test_calls_past_the_recompile_limit_are_right_and_told() -> None:
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


# -- another torch ---------------------------------------------------------------------


def test_a_report_says_where_inductor_does_not_tell_of_casts() -> None:
    torch._dynamo.reset()
    model = autoamp.convert(mlp(), backend="inductor", **BF16)
    with (
        failing(inductor, "_fates", AttributeError("a node of another torch")),
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch.no_grad(),
    ):
        assert model(torch.ones(4, 8)).isfinite().all()
    said = " ".join(str(autoamp.report(model)).split())
    assert "inductor does not tell which casts it keeps inside a kernel" in said


def test_ops_this_torch_lacks_are_left_out_of_the_lists(monkeypatch) -> None:
    """The built-in rules name them; the model runs, and says what has no rule."""
    gone = ("aten::linear", "aten::tanh", "aten::scaled_dot_product_attention")
    model, x = mlp(), torch.randn(4, 8)
    exact = model(x)
    exists = parse.exists
    monkeypatch.setattr(parse, "exists", lambda op: op not in gone and exists(op))
    table._load_builtin.cache_clear()
    try:
        autoamp.convert(model, **FP16)
        y = model(x)
        y.sum().backward()
        report = autoamp.report(model)
        unlisted = {row.op for row in report.ops if not row.listed}
        assert unlisted == {f"{op}.default" for op in gone[:2]}
        assert not any(row.is_low for row in report.ops if "linear" in row.op)
        assert "Ops in no list" in report.full()
        assert torch.allclose(y, exact)
    finally:
        monkeypatch.undo()
        table._load_builtin.cache_clear()
    again = autoamp.convert(copy.deepcopy(model), **BF16)
    again(x)
    assert any(row.is_low for row in autoamp.report(again).ops)
