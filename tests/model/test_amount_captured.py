"""How much of a model is captured, and models that autocast stands in for."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp.compat.limits import Amount
from tests.logs import warned
from tests.small_models import BF16, Of


@pytest.mark.thorough
def test_hooks_that_break_every_graph_end_the_capture(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[float] = []
    caplog.set_level(logging.INFO, "autoamp")

    def count(module: nn.Module, args: Any, result: Tensor) -> None:
        seen.append(result.sum().item())

    # Layers of different widths, so that no two share a graph.
    layers = [nn.Linear(8 + i, 9 + i) for i in range(70)]
    model = autoamp.convert(nn.Sequential(*layers), **BF16)
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
        assert "Sequential: calls run under torch.autocast" in line
        assert "hooks" in line
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


def mostly_python(functions: int) -> nn.Module:
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
    return made


@pytest.mark.parametrize("functions", [12, 90])
@pytest.mark.thorough
def test_python_that_gives_no_graph_counts(
    functions: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = autoamp.convert(mostly_python(functions), **BF16)
    for _ in range(2):
        model(torch.randn(2, 8))
        lines = warned(caplog)
        assert len(lines) == (functions > 64)
    assert all("run in fp32" in line and "Python" in line for line in lines)


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

    model = autoamp.convert(Of(forward, layer=nn.Linear(8, 8)), **BF16)
    for i in range(12):
        model(torch.randn(2, 8), "a" * (i + 1))
    (line,) = warned(caplog)
    assert "recompile_limit" in line
    assert "torch._dynamo hit" not in capfd.readouterr().err
    limited = [why for _, why in autoamp.report(model).skipped if "limit" in why]
    assert len(limited) > 1
    assert all("some calls of it run in fp32" in why for why in limited)


def nested(rows: list[Tensor]) -> Tensor:
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def nested_by_offsets(rows: list[Tensor]) -> Tensor:
    ends = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(torch.cat(rows), ends)


@pytest.mark.parametrize(
    ("inside", "given"),
    [(nested, list), (nested_by_offsets, list), (lambda batch: batch, nested)],
)
@pytest.mark.thorough
def test_nested_tensors_run_as_under_autocast(
    inside: Callable[[Any], Tensor],
    given: Callable[[list[Tensor]], Any],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Made by the model of the rows that it is given, or given to it."""
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
    model = Of(lambda m, rows: m.net(inside(rows)).values(), net=net)
    rows = [torch.randn(n, 16) for n in (3, 5, 2)]
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model(given(rows)).float()
    autoamp.convert(model, **BF16)
    capfd.readouterr()
    for _ in range(2):
        found = model(given(rows))
        assert found.dtype == torch.float32
        assert torch.equal(found, wanted)
    (line,) = warned(caplog)
    assert "nested tensors" in line
    assert "\n" not in line
    assert "Traceback" not in capfd.readouterr().err


def test_a_number_from_the_data_is_captured(caplog: pytest.LogCaptureFixture) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        number = int(x.abs().sum().item()) % 8
        return m.layer(x) * number  # type: ignore[no-any-return]

    model = autoamp.convert(Of(forward, layer=nn.Linear(64, 64)), **BF16)
    for i in range(4):
        model(torch.full((2, 64), (i + 1) / 128))
    assert not warned(caplog)


def test_a_functional_module_runs_low(caplog: pytest.LogCaptureFixture) -> None:
    functorch = pytest.importorskip("functorch")
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call, weights, buffers = functorch.make_functional_with_buffers(model.eval())
    x = torch.randn(3, 64)
    fast = [weight * 1.5 for weight in weights]  # as an inner loop makes them
    true = call(fast, buffers, x)
    with torch.autocast("cpu", torch.bfloat16):
        rough = call(fast, buffers, x)
    autoamp.convert(call, **BF16)
    found = call(fast, buffers, x)
    assert 0 < (found - true).abs().sum() <= 1.1 * (rough - true).abs().sum()
    found.sum().backward()
    assert all(weight.grad is not None for weight in weights)
    assert not warned(caplog)
    stacked = [torch.stack([weight.detach()] * 2) for weight in weights]
    each = torch.vmap(call, in_dims=(0, None, None))(stacked, buffers, x)
    assert each.shape == (2, 3, 4)
    (line,) = warned(caplog)
    assert "vmap" in line


def test_a_hook_on_a_value_is_no_obstacle() -> None:
    """Dynamo's code for a hook on a value holds a dict, so that it has no hash."""

    def forward(m: Any, x: Tensor) -> Tensor:
        result: Tensor = m.layer(x)
        if result.requires_grad:
            result.register_hook(lambda gradient: print(end=""))
        return result

    model: Any = autoamp.convert(Of(forward, layer=nn.Linear(64, 64)), **BF16)
    model(torch.randn(2, 64)).sum().backward()
    assert model.layer.weight.grad is not None
