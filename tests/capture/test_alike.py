"""Models that are alike are captured once, and share nothing else."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autoamp
from autoamp.capture import engine as engines
from autoamp.capture.program import likeness
from tests.small_models import BF16, Of


class Small(nn.Module):
    """Two layers, a number that is a buffer, and an attribute."""

    def __init__(self, tiny: float = 1.0, power: int = 1) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.power = power
        self.register_buffer("tiny", torch.tensor(tiny))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.relu(self.up(x)))
        return y**self.power * self.tiny

    def encode(self, x: Tensor) -> Tensor:
        return self.up(x)


class Broken(Small):
    """A graph break that Dynamo cannot go on from."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.down(self.up(x))
            torch._dynamo.graph_break()
        return x


@pytest.fixture
def prepared(monkeypatch) -> list[Any]:
    """What the pass was run on."""
    graphs: list[Any] = []
    inner = engines.prepare

    def counting(gm: Any, *args: Any, **kwargs: Any) -> Any:
        graphs.append(gm)
        return inner(gm, *args, **kwargs)

    monkeypatch.setattr(engines, "prepare", counting)
    return graphs


def several(
    make: Callable[[], nn.Module] = Small, count: int = 5, **options: Any
) -> list[Any]:
    """Converted models of one class, with other weights each."""
    torch.manual_seed(0)
    options = BF16 | options
    return [autoamp.convert(make(), **options) for _ in range(count)]


CLOSE = 1e-2
"""Results are below 1 and rounded to bf16 two or three times, each by at most 2**-9."""

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def alone(model: Any, x: Tensor = X) -> Tensor:
    """What a model gives by its own weights under autocast."""
    with torch.autocast("cpu", torch.bfloat16), autoamp.disabled():
        return model(x)


def test_models_of_one_class_are_captured_once(prepared: list[Any]) -> None:
    models = several()
    for model in models:
        got = model(X)
        assert torch.allclose(got, alone(model).float(), atol=CLOSE)
        got.square().sum().backward()
    assert len(prepared) == 1
    for model in models:
        report = autoamp.report(model)
        assert report.runs == 1
        assert len(report.graphs) == 1
        assert report.skipped == []
        assert all(p.grad is not None for p in model.parameters())
    grads = [m.up.weight.grad for m in models]
    assert not torch.equal(grads[0], grads[1])


def test_their_weights_are_their_own(prepared: list[Any]) -> None:
    first, second = several(count=2)
    first(X)
    before = second(X)
    with torch.no_grad():
        first.up.weight.zero_()
    assert torch.equal(second(X), before)
    assert len(prepared) == 1


def test_the_first_may_go(prepared: list[Any]) -> None:
    first, second = several(count=2)
    first(X)
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None
    assert torch.allclose(second(X), alone(second).float(), atol=CLOSE)
    assert len(prepared) == 2  # Dynamo drops what it compiled with the model it saw


@pytest.mark.thorough
def test_kinds_of_calls_are_captured_once_each(prepared: list[Any]) -> None:
    models = several()
    for model in models:
        model(X)
        model.eval()
        with torch.no_grad():
            model(X)
        assert torch.allclose(model(X[:3]), alone(model, X[:3]).float(), atol=CLOSE)
        encoded = model.encode(X)
        with autoamp.disabled():
            assert torch.allclose(encoded, model.up(X), atol=CLOSE)
    assert [autoamp.report(m).runs for m in models] == [4] * 5
    assert len(prepared) <= 5


@pytest.mark.thorough(but=["number"])
@pytest.mark.parametrize(
    "other",
    [
        lambda: Small(power=2),
        lambda: Small(tiny=1e-9),
        lambda: Small().requires_grad_(False),
        lambda: nn.Sequential(Small()),
    ],
    ids=["attribute", "number", "frozen", "another class"],
)
def test_others_have_graphs_of_their_own(
    other: Callable[[], nn.Module], prepared: list[Any]
) -> None:
    """And in fp16 a number that would be zero is not another model's number."""
    one = several(count=1, precision="fp16", loss_scale=1.0)[0]
    two = several(other, count=1, precision="fp16", loss_scale=1.0)[0]
    one(X)
    got = two(X).detach()
    with autoamp.disabled():
        assert torch.allclose(
            got, two(X), rtol=1e-2, atol=0.01 * float(got.abs().max())
        )
    assert len(prepared) == 2


@pytest.mark.parametrize("change", [{"deny": ["linear"]}, {"precision": "fp16"}])
def test_options_tell_models_apart(change: dict[str, Any], prepared: list[Any]) -> None:
    several(count=1)[0](X)
    model = several(count=1, **change)[0]
    model(X)
    rows = autoamp.report(model).ops
    low = {row.precision for row in rows if row.is_low}
    assert low == ({"fp16"} if "precision" in change else set())
    assert len(prepared) == 2


def scaled(tiny: float, within: Callable[[Tensor], Any]) -> nn.Module:
    """A number in a tensor that is neither parameter nor buffer."""

    def forward(m: Any, x: Tensor) -> Tensor:
        held: Any = m.held
        while not isinstance(held, Tensor):
            held = held.inside if isinstance(held, Holder) else held[0]
        return m.layer(x) * held * 1e4 * 1e4  # type: ignore[no-any-return]

    made = Of(forward, layer=nn.Linear(8, 8))
    made.held = within(torch.tensor(tiny))
    return made


class Holder:
    def __init__(self, inside: Any) -> None:
        self.inside = inside


@pytest.mark.thorough(but=["list", "object"])
@pytest.mark.parametrize(
    "within",
    [lambda t: [t], lambda t: {0: (t,)}, lambda t: Holder([t])],
    ids=["list", "dictionary", "object"],
)
def test_a_number_is_a_models_own_wherever_it_is_held(
    within: Callable[[Tensor], Any],
) -> None:
    """Decided by the 1.0 of the first, the second would multiply by zero in fp16."""
    (first,) = several(lambda: scaled(1.0, within), 1, precision="fp16")
    (second,) = several(lambda: scaled(1e-9, within), 1, precision="fp16")
    with torch.no_grad():
        first(X)
        got = second(X)
        with autoamp.disabled():
            assert torch.allclose(got, second(X), rtol=CLOSE, atol=CLOSE * 0.1)


def test_a_model_with_a_vocabulary_is_not_looked_through() -> None:
    model = Small()
    model.words = {str(i): i for i in range(1000)}
    assert likeness(model, (X,), {}) is None
    model.words = {str(i): i for i in range(10)}
    assert likeness(model, (X,), {}) is not None


@pytest.mark.thorough
def test_hooks_and_functions_of_an_instance_are_its_own() -> None:
    models = several(count=3)
    seen: list[int] = []
    for number, model in enumerate(models):
        model.up.register_forward_hook(lambda *_, n=number: seen.append(n))
    for model in models:
        model(X)
        model(X)
    assert seen == [0, 0, 1, 1, 2, 2]
    assert likeness(models[0], (X,), {}) is None


def test_a_function_of_torch_is_shared_and_one_with_a_closure_is_not() -> None:
    def likeness_with(function: Any) -> Any:
        model = Small()
        model.function = function
        return likeness(model, (X,), {})

    def made(by: float) -> Callable[[Tensor], Tensor]:
        return lambda x: x * by

    same = likeness_with(functional.relu)
    assert same is not None
    assert same == likeness_with(functional.relu)
    assert likeness_with(made(1.0)) != likeness_with(made(2.0))


def test_a_part_that_is_converted_by_itself_keeps_to_itself() -> None:
    models = [nn.Sequential(part, nn.Linear(8, 8)) for part in several(count=2)]
    for model in models:
        autoamp.convert(model, precision="bf16", do_no_harm=False)
        model(X)
        assert likeness(model, (X,), {}) is None
        assert autoamp.report(model).runs == 1


def test_what_is_left_to_python_is_in_every_report(prepared: list[Any]) -> None:
    models, graphs = several(Broken, count=3), []
    for model in models:
        model(X)
        graphs.append(len(prepared))
    assert graphs[0] == graphs[-1] > 0, "all are captured once"
    reports = [autoamp.report(model) for model in models]
    assert reports[0].runs == reports[1].runs == reports[2].runs > 0
    assert reports[0].skipped
    assert reports[0].skipped == reports[1].skipped == reports[2].skipped


def test_loss_scales_are_their_own() -> None:
    """An overflow of one skips no step of another."""
    models = several(count=2, precision="fp16", loss_scale="dynamic")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    for size in (1.0, 1.0):
        for model in models:
            (model(X).square().mean() * size).backward()
    for optimizer in optimizers:
        optimizer.zero_grad()
    (models[0](X).square().mean() * 1e30).backward()
    models[1](X).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert [o.step_was_skipped for o in optimizers] == [True, False]


@torch.compiler.disable
def by_python(module: nn.Module, x: Tensor) -> Any:
    return module(x)


@pytest.mark.thorough
def test_one_inside_the_call_of_another() -> None:
    """After a graph break the outer model's graphs count for it again."""
    inner = several(count=1)[0]

    def outer() -> nn.Module:
        return Of(
            lambda m, x: m.after(by_python(inner, m.before(x))),
            before=nn.Linear(8, 8),
            after=nn.Linear(8, 8),
        )

    models = several(outer, count=2)
    for model in models:
        model(X)
    assert [autoamp.report(m).runs for m in models] == [2, 2]
    assert autoamp.report(inner).runs == 2


def test_reverted_models_leave_the_others_converted() -> None:
    first, second, third = several(count=3)
    for model in (first, second):
        model(X)
    autoamp.revert(first)
    for model in (second, third):
        model(X)
    assert autoamp.report(second).runs == 2
    assert autoamp.report(third).runs == 1
    with autoamp.disabled():
        expected = first(X)
    assert torch.equal(first(X), expected)


def test_after_a_reset_of_dynamo_models_are_captured_anew(prepared: list[Any]) -> None:
    first, second = several(count=2)
    first(X)
    torch._dynamo.reset()
    second(X)
    first(X)
    assert [autoamp.report(m).runs for m in (first, second)] == [2, 1]
    assert len(prepared) == 3
    assert len(autoamp.report(second).graphs) == 1
