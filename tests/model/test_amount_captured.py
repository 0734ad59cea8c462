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


class _Stack(nn.Module):
    """Layers of different widths, so that no two share a graph."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8 + i, 9 + i) for i in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [r for r in caplog.records if r.levelno >= logging.WARNING]
    return [r.getMessage() for r in records if r.name.startswith("autoamp")]


@pytest.mark.thorough
def test_hooks_that_break_every_graph_end_the_capture(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[float] = []
    caplog.set_level(logging.INFO, "autoamp")

    def count(module: nn.Module, args: Any, result: Tensor) -> None:
        seen.append(result.sum().item())

    model = autoamp.convert(_Stack(70), precision="bf16", do_no_harm=False)
    x = torch.randn(2, 8)
    with torch.no_grad():
        handles = [each.register_forward_hook(count) for each in model.layers]
        counts = []
        for _ in range(3):
            seen.clear()
            model(x)
            counts.append(len(seen))
        assert counts == [70, 70, 70]
        graphs = len(autoamp.report(model).graphs)
        assert graphs <= 66
        (line,) = _lines(caplog)
        assert "_Stack: calls run under torch.autocast" in line
        assert "hooks" in line
        assert not any("is converted to" in said for said in caplog.messages)
        for handle in handles:
            handle.remove()
        caplog.clear()
        model(x)
    assert len(autoamp.report(model).graphs) == graphs + 1
    assert not _lines(caplog)


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


class _MostlyPython(nn.Module):
    """Layers amid code that Dynamo traces and finds little to compute in."""

    def __init__(self, functions: int) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.seen: list[float] = []
        names: dict[str, Any] = {}
        for i in range(functions):
            exec(_A_LOOK.format(i), names)
        self.looks = [names[f"look_{i}"] for i in range(functions)]

    def forward(self, x: Tensor) -> Tensor:
        for look in self.looks:
            look(x, self.seen)
        return self.layer(x)  # type: ignore[no-any-return]


_A_LOOK = """
def look_{0}(x, seen):
    seen.append(id(x) + {0})
    print(end="")
"""


@pytest.mark.parametrize("functions", [12, 90])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.thorough
def test_python_that_gives_no_graph_counts(
    functions: int, parts: int, caplog: pytest.LogCaptureFixture
) -> None:
    each = [_MostlyPython(functions // parts) for _ in range(parts)]
    model = autoamp.convert(_Parts(each), precision="bf16", do_no_harm=False)
    x = torch.randn(2, 8)
    for _ in range(2):
        for part in model:
            part(x)
        lines = _lines(caplog)
        assert len(lines) == (functions > 64)
    assert all("run in fp32" in line and "Python" in line for line in lines)


class _Parts(nn.ModuleList):
    def forward(self) -> None:
        raise AssertionError("its modules are called by themselves")


class _ManyKinds(nn.Module):
    """Functions that need a graph of their own for each string they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, kind: str) -> Tensor:
        print(end="")
        return _second(_first(self.layer(x), kind), kind)


def _first(x: Tensor, kind: str) -> Tensor:
    print(end=kind[:0])
    return x * len(kind)


def _second(x: Tensor, kind: str) -> Tensor:
    print(end=kind[:0])
    return x + len(kind)


def test_the_recompile_limit_is_said_once(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    model = autoamp.convert(_ManyKinds(), precision="bf16", do_no_harm=False)
    for i in range(12):
        model(torch.randn(2, 8), "a" * (i + 1))
    (line,) = _lines(caplog)
    assert "recompile_limit" in line
    assert "torch._dynamo hit" not in capfd.readouterr().err
    limited = [why for _, why in autoamp.report(model).skipped if "limit" in why]
    assert len(limited) > 1


class _Jagged(nn.Module):
    """A model that makes its batch a nested tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, rows: list[Tensor]) -> Tensor:
        batch = torch.nested.nested_tensor(rows, layout=torch.jagged)
        return self.second(self.first(batch).relu()).values()  # type: ignore[no-any-return]


class _FromJagged(_Jagged):
    def forward(self, rows: list[Tensor]) -> Tensor:
        ends = torch.tensor([0, *(len(r) for r in rows)]).cumsum(0)
        batch = torch.nested.nested_tensor_from_jagged(torch.cat(rows), ends)
        return self.second(self.first(batch).relu()).values()  # type: ignore[no-any-return]


class _OfJagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, batch: Tensor) -> Tensor:
        return self.inner(batch).values()  # type: ignore[no-any-return]


def _nested(rows: list[Tensor]) -> Tensor:
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


@pytest.mark.parametrize(
    ("make", "given"),
    [(_Jagged, list), (_FromJagged, list), (_OfJagged, _nested)],
)
@pytest.mark.thorough
def test_nested_tensors_run_as_under_autocast(
    make: Callable[[], nn.Module],
    given: Callable[[list[Tensor]], Any],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    torch.manual_seed(0)
    model = make()
    rows = [torch.randn(n, 16) for n in (3, 5, 2)]
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model(given(rows)).float()
    autoamp.convert(model, precision="bf16", do_no_harm=False)
    capfd.readouterr()
    for _ in range(2):
        found = model(given(rows))
        assert found.dtype == torch.float32
        assert torch.equal(found, wanted)
    (line,) = _lines(caplog)
    assert "nested tensors" in line
    assert "\n" not in line
    assert "Traceback" not in capfd.readouterr().err


class _TimesItem(nn.Module):
    """Multiplies by a whole number that only the data tell."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        number = int(x.abs().sum().item()) % 8
        return self.layer(x) * number  # type: ignore[no-any-return]


def test_a_number_from_the_data_is_captured(caplog: pytest.LogCaptureFixture) -> None:
    model = autoamp.convert(_TimesItem(), precision="bf16", do_no_harm=False)
    for i in range(4):
        model(torch.full((2, 64), (i + 1) / 128))
    assert not _lines(caplog)


def test_a_functional_module_runs_low(caplog: pytest.LogCaptureFixture) -> None:
    functorch = pytest.importorskip("functorch")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call, weights, buffers = functorch.make_functional_with_buffers(model.eval())
    x = torch.randn(3, 64)
    fast = [weight * 1.5 for weight in weights]  # as an inner loop makes them
    true = call(fast, buffers, x)
    with torch.autocast("cpu", torch.bfloat16):
        rough = call(fast, buffers, x)
    autoamp.convert(call, precision="bf16", do_no_harm=False)
    found = call(fast, buffers, x)
    assert 0 < (found - true).abs().sum() <= 1.1 * (rough - true).abs().sum()
    found.sum().backward()
    assert all(weight.grad is not None for weight in weights)
    assert not _lines(caplog)
    stacked = [torch.stack([weight.detach()] * 2) for weight in weights]
    each = torch.vmap(call, in_dims=(0, None, None))(stacked, buffers, x)
    assert each.shape == (2, 3, 4)
    (line,) = _lines(caplog)
    assert "vmap" in line


class _WithHookedValue(nn.Module):
    """Dynamo's code for a hook on a value holds a dict, so that it has no hash."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        if result.requires_grad:
            result.register_hook(lambda gradient: print(end=""))
        return result


def test_a_hook_on_a_value_is_no_obstacle() -> None:
    model = autoamp.convert(_WithHookedValue(), precision="bf16", do_no_harm=False)
    model(torch.randn(2, 64)).sum().backward()
    assert model.layer.weight.grad is not None
