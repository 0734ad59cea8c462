"""Calls past the graphs: told once, with the cause, and run as well as can be."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autoamp
from autoamp.compat.limits import Amount
from tests.logs import warned
from tests.says import says
from tests.small_models import WIDTH, Of, Quiet, converted, is_rounded, mlp, runs


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, WIDTH)


# -- calls that Dynamo steps aside from: fp32, or an error -----------------------------


def in_a_dispatch_mode(model: nn.Module, x: Tensor) -> Any:
    with Quiet():
        return model(x)


def in_jit_trace(model: nn.Module, x: Tensor) -> Any:
    return torch.jit.trace(model, (x,), check_trace=False)(x)


CAUSES = {in_a_dispatch_mode: "Quiet", in_jit_trace: "torch.jit.trace"}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("call", CAUSES, ids=lambda c: c.__name__)
def test_a_call_past_the_graphs_is_told_once_and_raises_under_strict(
    call: Callable[[nn.Module, Tensor], Any], x: Tensor, caplog
) -> None:
    model = mlp()
    exact = call(model, x)
    converted(model, strict=False)
    model(x)
    assert warned(caplog) == []
    for _ in range(2):
        assert torch.equal(call(model, x), exact)
    (warning,) = warned(caplog)
    says(warning, "'forward' ran no rewritten graph", CAUSES[call])
    ((what, why),) = [(s[0], s[1]) for s in autoamp.report(model).skipped]
    assert what == "Sequential"
    assert [each for each in CAUSES.values() if each in why] == [CAUSES[call]]
    assert runs(model) == 1
    converted(model, strict=True)
    with pytest.raises(autoamp.CaptureError):
        call(model, x)
    model(x)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def encode(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


def test_a_mode_and_a_dynamo_that_is_off_are_named(x: Tensor, caplog) -> None:
    model = converted(Encoder(), strict=False)
    model.encode(x)
    with Quiet():
        model.encode(x)
    with torch._dynamo.config.patch(disable=True):
        converted(mlp(), strict=False)(x)
    first, second = warned(caplog)
    says(first, "no rewritten graph", "Quiet")
    says(second, "Dynamo is switched off")


def test_calls_that_compute_nothing_now_and_then(x: Tensor) -> None:
    model = Of(lambda m, x: None if x is None else m.inner(x), inner=mlp())
    converted(model, strict=False)
    for _ in range(4):
        assert model(None) is None
        model(x)
    # The first call met no float op at all, and counts as none.
    coverage = autoamp.report(model).coverage
    assert (coverage.calls, coverage.calls_aside) == (7, 3)
    assert runs(model) == 4


# -- autocast stands in ----------------------------------------------------------------


def under_vmap(model: nn.Module, x: Tensor) -> Any:
    return torch.vmap(model)(x)


def under_func_grad(model: nn.Module, x: Tensor) -> Any:
    return torch.func.grad(lambda v: model(v).sum())(x)


@pytest.mark.parametrize("call", [under_vmap, under_func_grad])
def test_transforms_of_functions_run_under_autocast(
    call: Callable[[nn.Module, Tensor], Any], x: Tensor, caplog
) -> None:
    model = mlp()
    exact = call(model, x)
    converted(model, strict=False)
    model(x)
    for _ in range(2):
        assert is_rounded(call(model, x), exact)
    (warning,) = warned(caplog)
    says(warning, "torch.autocast")
    found = autoamp.report(model)
    assert [what for what, _ in found.skipped] == ["Sequential"]
    assert (found.coverage.calls, found.coverage.calls_aside) == (3, 2)
    low = model(x)
    assert runs(model) == 2, "and the model is not off for good"
    with autoamp.disabled():
        assert is_rounded(low, model(x))


class Looped(nn.Module):
    """A graph break in a loop of its own method, and no layer: no graph is left."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.eye(8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            if x.sum() > 1e9:
                break
            x = x @ weight
        return x


def of_weight(function: Callable[..., Any]) -> nn.Module:
    return Of(function, weight=nn.Parameter(torch.randn(WIDTH, WIDTH) / 3))


def sparse() -> nn.Module:
    def layer() -> nn.Module:
        return of_weight(lambda m, x, edges: torch.spmm(edges, x @ m.weight))

    return Of(lambda m, x, e: m.b(m.a(x, e).relu(), e), a=layer(), b=layer())


def nested() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor([x, x[:3]], layout=torch.jagged)
        return (rows @ m.weight).values()

    return of_weight(forward)


def nested_by_offsets() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        ends = torch.tensor([0, 2, len(x)])
        return (torch.nested.nested_tensor_from_jagged(x, ends) @ m.weight).values()

    return of_weight(forward)


CANNOT = {
    Looped: "Dynamo cannot go on after a graph break",
    sparse: "sparse tensors",
    nested: "nested tensors",
    nested_by_offsets: "nested tensors",
}


@pytest.mark.parametrize("make", CANNOT, ids=lambda f: f.__name__)
def test_a_model_that_cannot_be_captured_runs_under_autocast_from_some_call_on(
    make: Callable[[], nn.Module],
    x: Tensor,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = make()
    given = (x, torch.eye(len(x)).to_sparse()) if make is sparse else (x,)
    exact = model(*given)
    converted(model, strict=False)
    capfd.readouterr()
    for _ in range(3):
        model(*given)
    for _ in range(9):
        assert is_rounded(model(*given), exact)
    lines = warned(caplog)
    says(lines, CANNOT[make])
    says(lines, "torch.autocast")
    assert len(lines) <= 2
    assert not any("vmap" in line or "\n" in line for line in lines)
    assert "Traceback" not in capfd.readouterr().err
    assert make is not Looped or runs(model) == 0


def test_a_nested_input_runs_as_under_autocast(x: Tensor) -> None:
    rows = torch.nested.nested_tensor([x, x[:3]], layout=torch.jagged)
    model = Of(lambda m, rows: m.net(rows).values(), net=mlp())
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model(rows).float()
    converted(model, strict=False)
    for _ in range(2):
        assert torch.equal(model(rows), wanted)


def test_a_functional_module_runs_low(caplog: pytest.LogCaptureFixture) -> None:
    functorch = pytest.importorskip("functorch")
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call, weights, buffers = functorch.make_functional_with_buffers(model.eval())
    x = torch.randn(3, 64)
    fast = [weight * 1.5 for weight in weights]  # as an inner loop makes them
    exact = call(fast, buffers, x)
    converted(call, strict=False)
    found = call(fast, buffers, x)
    assert is_rounded(found, exact)
    found.sum().backward()
    assert all(weight.grad is not None for weight in weights)
    assert not warned(caplog)
    stacked = [torch.stack([weight.detach()] * 2) for weight in weights]
    each = torch.vmap(call, in_dims=(0, None, None))(stacked, buffers, x)
    assert each.shape == (2, 3, 4)
    (line,) = warned(caplog)
    says(line, "vmap")


# -- limits ----------------------------------------------------------------------------


def many_shapes(model: nn.Module, shapes: int = 10) -> None:
    with torch._dynamo.config.patch(
        automatic_dynamic_shapes=False, assume_static_by_default=True
    ):
        for rows in range(2, 2 + shapes):
            model(torch.randn(rows, WIDTH))


def test_past_the_recompile_limit_a_call_runs_under_autocast(caplog) -> None:
    model = converted(mlp(), strict=False)
    many_shapes(model)
    (line,) = warned(caplog)
    says(line, "torch.autocast", "args[0]", option="torch._dynamo.config")
    x = torch.randn(64, WIDTH)
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        found = model(x)
    coverage = autoamp.report(model).coverage
    assert (coverage.calls, coverage.calls_aside) == (11, 3)
    assert len(autoamp.report(model).graphs) == 8
    assert is_rounded(found, autoamp.revert(model)(x))


def anew(kind: str) -> Callable[[nn.Module, int], None]:
    """What a script does to a model before each call, so that no graph fits."""

    def change(model: Any, call: int) -> None:
        if kind == "closure":
            model.act = lambda h: h + call
        elif kind == "number":
            model.scale += 0.5
        else:
            model.kept[f"key {call}"] = call

    return change


@pytest.mark.parametrize("kind", ["closure", "kept", "number"])
def test_captures_are_bounded_whatever_changes(kind: str, caplog) -> None:
    made = Of(lambda m, x: m.net(m.act(x * len(m.kept) * m.scale)), net=mlp())
    made.act, made.kept, made.scale = torch.relu, {}, 1.0
    model, change = converted(made, strict=False), anew(kind)
    for call in range(30):
        change(model, call)
        model(torch.randn(3, WIDTH))
    report = autoamp.report(model)
    if kind == "number":  # it is an input of one graph
        assert len(report.graphs) <= 2
        assert (report.coverage.calls_aside, warned(caplog)) == (0, [])
        return
    (line,) = warned(caplog)
    says(line, "act" if kind == "closure" else "kept")
    assert len(report.graphs) == 8
    assert (report.coverage.calls, report.coverage.calls_aside) == (30, 22)


def test_the_recompile_limit_raises_under_strict() -> None:
    """Of a model that multiplies in its own code, and calls no module."""
    model = Of(lambda m, x: functional.linear(x, m.fc.weight), fc=nn.Linear(WIDTH, 4))
    with pytest.raises(autoamp.CaptureError) as raised:
        many_shapes(converted(model), 40)
    says(raised, "recompile limit")


def test_many_shapes_with_dynamic_shapes_do_not_reach_the_limit() -> None:
    model = converted(mlp())
    for rows in range(2, 20):
        model(torch.randn(rows, WIDTH))
    assert runs(model) == 18
    assert len(autoamp.report(model).graphs) == 2


def _first(x: Tensor, kind: str) -> Tensor:
    print(end=kind[:0])
    return x * len(kind)


def _second(x: Tensor, kind: str) -> Tensor:
    print(end=kind[:0])
    return x + len(kind)


def test_the_recompile_limit_is_said_once(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two functions need a graph of their own for each string they are given."""

    def forward(m: Any, x: Tensor, kind: str) -> Tensor:
        print(end="")
        return _second(_first(m.layer(x), kind), kind)

    model = converted(Of(forward, layer=nn.Linear(8, 8)), strict=False)
    for i in range(12):
        model(torch.randn(2, 8), "a" * (i + 1))
    (line,) = warned(caplog)
    says(line, "recompile_limit")
    assert "torch._dynamo hit" not in capfd.readouterr().err
    limited = [why for _, why in autoamp.report(model).skipped if "limit" in why]
    assert len(limited) > 1
    assert all("fp32" in why for why in limited)


# -- how much is captured --------------------------------------------------------------


def test_hooks_that_break_every_graph_end_the_capture(caplog) -> None:
    seen: list[float] = []
    caplog.set_level(logging.INFO, "autoamp")

    def count(module: nn.Module, args: Any, result: Tensor) -> None:
        seen.append(result.sum().item())

    # Layers of different widths, so that no two share a graph.
    layers = [nn.Linear(8 + i, 9 + i) for i in range(70)]
    model = converted(nn.Sequential(*layers), strict=False)
    x = torch.randn(2, 8)
    with torch.no_grad():
        handles = [each.register_forward_hook(count) for each in layers]
        for _ in range(3):
            seen.clear()
            model(x)
            assert len(seen) == 70
        graphs = len(autoamp.report(model).graphs)
        assert graphs <= 66
        (line,) = warned(caplog)
        says(line, "Sequential", "torch.autocast", "hooks")
        assert not any("is converted to" in said for said in caplog.messages)
        for handle in handles:
            handle.remove()
        caplog.clear()
        model(x)
    assert len(autoamp.report(model).graphs) == graphs + 1
    assert not warned(caplog)


@pytest.mark.parametrize(
    ("parts", "is_too_much"),
    [
        ([(i, 400) for i in range(300)], False),  # many large blocks with breaks
        ([(0, 5000)] * 6, False),  # training, eval mode, ... of one large graph
        ([(i, 2) for i in range(60)], False),
        ([(i, 2) for i in range(65)], True),
        ([(0, 5000)] * 7, True),
        ([(0, 12)] * 60, False),  # a small model at many sizes
        ([(i, 2 * (i % 8 == 0)) for i in range(64)], False),  # a logger, once
        ([(i, 2 * (i % 8 == 0)) for i in range(65)], True),
        ([(i, 30 * (i % 3 == 0)) for i in range(160)], False),  # breaks in all layers
        ([(i, 10 * (i % 4 == 0)) for i in range(160)], False),  # a solver round a net
    ],
)
def test_what_is_too_much(parts: list[tuple[int, int]], is_too_much: bool) -> None:
    amount = Amount()
    for part, nodes in parts:
        assert not amount.too_much
        amount.note(part, nodes)
    assert bool(amount.too_much) == is_too_much


_A_LOOK = """
def look_{0}(x, seen):
    seen.append(id(x) + {0})
    print(end="")
"""


@pytest.mark.parametrize("functions", [12, 90])
def test_python_that_gives_no_graph_counts(functions: int, caplog) -> None:
    """A layer after code that Dynamo traces and finds little to compute in."""
    names: dict[str, Any] = {}
    for i in range(functions):
        exec(_A_LOOK.format(i), names)
    looks = [names[f"look_{i}"] for i in range(functions)]

    def forward(m: Any, x: Tensor) -> Tensor:
        for look in looks:
            look(x, m.seen)
        return m.layer(x)  # type: ignore[no-any-return]

    made = Of(forward, layer=nn.Linear(8, 8))
    made.seen = []  # type: ignore[assignment]
    model = converted(made, strict=False)
    for _ in range(2):
        model(torch.randn(2, 8))
        assert len(warned(caplog)) == (functions > 64)
    assert all("fp32" in line and "Python" in line for line in warned(caplog))


def test_a_number_from_the_data_and_a_hook_on_a_value_are_no_obstacle(caplog) -> None:
    """Dynamo's code for a hook on a value holds a dict, so that it has no hash."""

    def forward(m: Any, x: Tensor) -> Tensor:
        number = int(x.abs().sum().item()) % 8
        result: Tensor = m.layer(x) * number
        if result.requires_grad:
            result.register_hook(lambda gradient: print(end=""))
        return result

    model: Any = converted(Of(forward, layer=nn.Linear(64, 64)), strict=False)
    for i in range(4):
        model(torch.full((2, 64), (i + 1) / 128)).sum().backward()
    assert model.layer.weight.grad is not None
    assert not warned(caplog)
