"""Faults: NaN, exhausted memory, interrupts, and a pass that fails.

A fault must do to a converted model what it does to the model itself, and no more: the
same values are lost, the same error comes out, and the next step trains on.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp import compat
from autoamp.capture import engine
from autoamp.check.verify import Verifier
from autoamp.pipeline import passes, run
from tests.conformance.table import Figures
from tests.small_models import Of
from tests.training.steps import BF16, FP16, assert_same, weights_of

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
def test_what_is_not_finite_is_where_it_is_in_fp32(
    name: str, precision: str, figures: Figures
) -> None:
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
    figures.count("steps with a bad number", 9)


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


PLAN = (
    "",
    "forward",
    "",
    "backward",
    "",
    "step",
    "",
    "step",
    "forward",
    "backward",
    "",
)


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
    precision: str, kind: type[BaseException], figures: Figures
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
    figures.count("faults in steps", sum(map(bool, PLAN)))


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


def test_memory_that_ends_while_weights_are_copied(monkeypatch) -> None:
    model = autoamp.convert(between(nn.GELU()), **BF16)
    x = torch.randn(4, WIDTH)
    model(x)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(compat, "copy_all", fail)
        with pytest.raises(torch.OutOfMemoryError, match="planted"):
            model(x)
    assert torch.equal(model(x), copy.deepcopy(model)(x))


# -- a pass that fails -----------------------------------------------------------------

STAGES: list[tuple[Any, str]] = [
    (run, "normalise"),
    *[
        (passes, name)
        for name in (
            "collect_facts",
            "classify",
            "price_graph",
            "assign",
            "insert_casts",
            "clean_up",
            "device_for",
        )
    ],
    (Verifier, "__init__"),
    (Verifier, "recount"),
    (Verifier, "verify"),
    (passes, "hoist_weight_casts"),
    (compat, "make_code"),
    (passes, "scale_edge"),
    (engine, "scaled"),
]


@contextlib.contextmanager
def failing(owner: Any, name: str, error: BaseException) -> Iterator[None]:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fail)
        yield


# A graph from which weight casts cannot be taken makes them
# (tests/rewrite/test_retreat.py).
NEEDED = [stage for stage in STAGES if stage[1] != "hoist_weight_casts"]


@pytest.mark.parametrize(("owner", "name"), NEEDED, ids=[n for _, n in NEEDED])
def test_the_model_runs_on_where_a_stage_fails(
    owner: Any, name: str, figures: Figures
) -> None:
    plain = between(nn.GELU())
    x = torch.randn(4, WIDTH)
    exact = plain(x)

    model = autoamp.convert(copy.deepcopy(plain), **NOT_STRICT)
    with failing(owner, name, ZeroDivisionError("the bridge is out")):
        assert torch.equal(model(x), exact)
        model(x).sum().backward()
    assert torch.equal(model(x), exact)
    report = autoamp.report(model)
    assert report.skipped == [("graph 0", "ZeroDivisionError: the bridge is out")]
    assert (report.runs, report.graphs) == (0, [])

    strict = autoamp.convert(copy.deepcopy(plain), **BF16)
    with (
        failing(owner, name, ZeroDivisionError("the bridge is out")),
        pytest.raises(autoamp.AutoampError, match="the bridge is out") as caught,
    ):
        strict(x)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert not torch.equal(strict(x), exact)
    assert autoamp.report(strict).runs == 1
    figures.count("stages that failed")


@pytest.mark.parametrize(("owner", "name"), STAGES, ids=[n for _, n in STAGES])
def test_an_interrupt_in_a_stage_reaches_the_user(
    owner: Any, name: str, figures: Figures
) -> None:
    model = autoamp.convert(between(nn.GELU()), **BF16)
    x = torch.randn(4, WIDTH)
    with failing(owner, name, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        model(x)
    model(x).sum().backward()
    report = autoamp.report(model)
    assert (report.runs, len(report.graphs), report.skipped) == (1, 1, [])
    figures.count("stages that were interrupted")


@pytest.mark.parametrize("where", ["output_graph.OutputGraph.call_user_compiler"])
def test_an_interrupt_in_dynamo_reaches_the_user(where: str, monkeypatch) -> None:
    model = autoamp.convert(between(nn.GELU()), **BF16)
    x = torch.randn(4, WIDTH)

    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"torch._dynamo.{where}", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(x)
    model(x)
    assert autoamp.report(model).runs == 1


def test_a_compiler_that_fails_leaves_the_model_to_python() -> None:
    def backend(gm: Any, inputs: Any) -> Any:
        raise ZeroDivisionError("no compiler")

    plain = between(nn.GELU())
    x = torch.randn(4, WIDTH)
    model = autoamp.convert(copy.deepcopy(plain), **{**NOT_STRICT, "backend": backend})
    for _ in range(3):
        assert torch.allclose(model(x), plain(x), atol=2.0**-6)
    assert "no compiler" in str(autoamp.report(model).skipped)
