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
from tests.runtime.test_user_compile import Seen
from tests.small_models import Of, converted, runs


class Small(nn.Module):
    """Two layers, a number that is a buffer, and an attribute."""

    def __init__(self, tiny: float = 1.0, power: int = 1, **more: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.power = power
        self.register_buffer("tiny", torch.tensor(tiny))
        vars(self).update(more)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.relu(self.up(x)))
        return y**self.power * self.tiny

    def encode(self, x: Tensor) -> Tensor:
        return self.up(x)


class Halved(Small):
    """A graph break between its layers."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        torch._dynamo.graph_break()
        return self.down(x.relu())


class Outer(Halved):
    def forward(self, x: Tensor) -> Tensor:
        return self.up(super().forward(x))


class Broken(Small):
    """A graph break that Dynamo cannot go on from."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.down(self.up(x))
            torch._dynamo.graph_break()
        return x


@pytest.fixture
def seen() -> Seen:
    return Seen()


def several(
    make: Callable[[], nn.Module] = Small, count: int = 5, **options: Any
) -> list[Any]:
    """Converted models of one class, with other weights each."""
    torch.manual_seed(0)
    return [converted(make(), strict=False, **options) for _ in range(count)]


CLOSE = 1e-2
"""Results are below 1 and rounded to bf16 two or three times, each by at most 2**-9."""

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def check(model: Any, x: Tensor = X, **close: float) -> Tensor:
    """A model gives what it gives by its own weights under autocast, or in fp32."""
    found = model(x)
    with torch.no_grad(), autoamp.disabled():
        assert torch.allclose(found, model(x), **{"atol": CLOSE, **close})
    return found


@pytest.mark.parametrize(("make", "graphs"), [(Small, 1), (Halved, 2), (Outer, 3)])
def test_models_of_one_class_are_captured_once_and_have_their_own_weights(
    make: type[Small], graphs: int, seen: Seen
) -> None:
    """However many they are: Dynamo compiles a function at most eight times."""
    models = several(make, count=10, backend=seen)
    for model in models:
        check(model).square().sum().backward()
    assert len(seen.graphs) == graphs
    for model in models:
        report = autoamp.report(model)
        found = report.runs, len(report.graphs), report.skipped
        assert found == (graphs, graphs, [])
        assert all(p.grad is not None for p in model.parameters())
    first, second, *_ = models
    assert not torch.equal(first.up.weight.grad, second.up.weight.grad)
    before = second(X)
    with torch.no_grad():
        first.up.weight.zero_()
    assert torch.equal(second(X), before)
    gone = weakref.ref(first)
    models.clear()
    del model, first
    gc.collect()
    assert gone() is None
    check(second)
    # Dynamo drops what it compiled with the model it saw.
    assert len(seen.graphs) <= 2 * graphs


def test_kinds_of_calls_are_captured_once_each(seen: Seen) -> None:
    models = several(backend=seen)
    for model in models:
        model(X)
        model.eval()
        with torch.no_grad():
            model(X)
        check(model, X[:3])
        encoded = model.encode(X)
        with autoamp.disabled():
            assert torch.allclose(encoded, model.up(X), atol=CLOSE)
    assert [runs(m) for m in models] == [4] * 5
    assert len(seen.graphs) <= 5


# -- what tells models apart -----------------------------------------------------------


class Holder:
    def __init__(self, inside: Any) -> None:
        self.inside = inside


def held(tiny: float, within: Callable[[Tensor], Any]) -> nn.Module:
    """A number in a tensor that is neither parameter nor buffer."""

    def forward(m: Any, x: Tensor) -> Tensor:
        held: Any = m.held
        while not isinstance(held, Tensor):
            held = held.inside if isinstance(held, Holder) else held[0]
        return m.layer(x) * held * 1e4 * 1e4  # type: ignore[no-any-return]

    made = Of(forward, layer=nn.Linear(8, 8))
    made.held = within(torch.tensor(tiny))
    return made


def calling(function: Any) -> nn.Module:
    made = Of(lambda m, x: m.call(m.layer(x)), layer=nn.Linear(8, 8))
    made.call = function
    return made


def times(by: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * by


PAIRS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "attribute": (Small, lambda: Small(power=2)),
    "number": (Small, lambda: Small(tiny=1e-9)),
    "frozen": (Small, lambda: Small().requires_grad_(False)),
    "another class": (Small, lambda: nn.Sequential(Small())),
    "closure": (lambda: calling(times(1.0)), lambda: calling(times(2.0))),
    **{
        name: (lambda w=within: held(1.0, w), lambda w=within: held(1e-9, w))
        for name, within in {
            "in a list": lambda t: [t],
            "in a dictionary": lambda t: {0: (t,)},
            "in an object": lambda t: Holder([t]),
        }.items()
    },
}


@pytest.mark.parametrize("name", PAIRS)
def test_others_have_graphs_of_their_own(name: str, seen: Seen) -> None:
    """And in fp16 a number that would be zero is not another model's number."""
    options = {"precision": "fp16", "loss_scale": 1.0, "backend": seen}
    one, two = (several(make, 1, **options)[0] for make in PAIRS[name])
    one(X)
    with torch.no_grad():
        size = float(two(X).abs().max())
        assert size > 0
    check(two, rtol=1e-2, atol=0.01 * size)
    assert len(seen.graphs) >= 2


@pytest.mark.parametrize("change", [{"deny": ["linear"]}, {"precision": "fp16"}])
def test_options_tell_models_apart(change: dict[str, Any]) -> None:
    several(count=1)[0](X)
    model = several(count=1, **change)[0]
    model(X)
    low = {row.precision for row in autoamp.report(model).ops if row.is_low}
    assert low == ({"fp16"} if "precision" in change else set())


SHARED: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "a few words": (lambda: Small(words={str(i): i for i in range(10)}), 1),
    "a vocabulary": (lambda: Small(words={str(i): i for i in range(1000)}), 2),
    "a function of torch's": (lambda: Small(function=functional.relu), 1),
}


@pytest.mark.parametrize("name", SHARED)
def test_what_is_looked_through_is_shared(name: str, seen: Seen) -> None:
    make, graphs = SHARED[name]
    for model in several(make, 2, backend=seen):
        model(X)
    assert len(seen.graphs) == graphs


def test_hooks_of_an_instance_are_its_own() -> None:
    models = several(count=3)
    called: list[int] = []
    for number, model in enumerate(models):
        model.up.register_forward_hook(lambda *_, n=number: called.append(n))
    for model in models:
        model(X)
        model(X)
    assert called == [0, 0, 1, 1, 2, 2]


# -- what is counted, told and reverted is each model's own ----------------------------


def test_a_part_that_is_converted_by_itself_keeps_to_itself() -> None:
    for part in several(count=2):
        model = converted(nn.Sequential(part, nn.Linear(8, 8)))
        model(X)
        assert runs(model) == 1


def test_what_is_left_to_python_is_in_every_report(seen: Seen) -> None:
    models, graphs = several(Broken, count=3, backend=seen), []
    for model in models:
        model(X)
        graphs.append(len(seen.graphs))
    assert graphs[0] == graphs[-1] > 0, "all are captured once"
    reports = [autoamp.report(model) for model in models]
    assert reports[0].runs == reports[1].runs == reports[2].runs > 0
    assert reports[0].skipped == reports[1].skipped == reports[2].skipped != []


def test_loss_scales_are_their_own() -> None:
    """An overflow of one skips no step of another."""
    models = several(count=2, precision="fp16", loss_scale="dynamic")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    for model in models:
        model(X).square().mean().backward()
    for optimizer in optimizers:
        optimizer.zero_grad()
    (models[0](X).square().mean() * torch.inf).backward()
    models[1](X).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert [o.step_was_skipped for o in optimizers] == [True, False]


@torch.compiler.disable
def by_python(module: nn.Module, x: Tensor) -> Any:
    return module(x)


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
    assert [runs(m) for m in (*models, inner)] == [2, 2, 2]


def test_reverted_models_leave_the_others_converted() -> None:
    first, second, third = several(count=3)
    first(X), second(X)
    autoamp.revert(first)
    second(X), third(X)
    assert (runs(second), runs(third)) == (2, 1)
    with autoamp.disabled():
        expected = first(X)
    assert torch.equal(first(X), expected)


def test_after_a_reset_of_dynamo_models_are_captured_anew(seen: Seen) -> None:
    first, second = several(count=2, backend=seen)
    first(X)
    torch._dynamo.reset()
    second(X)
    first(X)
    assert (runs(first), runs(second)) == (2, 1)
    assert len(autoamp.report(second).graphs) == 1
