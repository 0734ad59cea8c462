"""What the user compiles: their backend is given our graphs, in whichever way."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import TensorifyScalarRestartAnalysis

import autoamp
from tests.logs import warned
from tests.says import says
from tests.small_models import BF16, WIDTH, is_rounded, mlp


class Seen:
    """A backend of the user's that keeps what it is given."""

    def __init__(self, backend: str = "eager") -> None:
        self.backend: Any = lookup_backend(backend)
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        self.graphs.append(gm)
        return self.backend(gm, inputs)

    def low_products(self) -> int:
        """Rewritten products it was given; what Dynamo captures is no ATen graph."""
        return sum(
            node.target is torch.ops.aten.linear.default
            and node.meta["val"].dtype is torch.bfloat16
            for gm in self.graphs
            for node in gm.graph.nodes
        )


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, WIDTH)


def whole(model: nn.Module, seen: Seen) -> Callable[..., Any]:
    return torch.compile(model, backend=seen)


def in_place(model: nn.Module, seen: Seen) -> Callable[..., Any]:
    model.compile(backend=seen)
    return model


def decorated(model: nn.Module, seen: Seen) -> Callable[..., Any]:
    @torch.compile(backend=seen)
    def run(value: Tensor) -> Any:
        return model(value)

    return run


WAYS = [whole, in_place, decorated]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("automatic")
def test_automatic_mode(way: Callable[..., Any], x: Tensor) -> None:
    model, seen = mlp(), Seen("aot_eager")
    compiled, plain = way(model, seen), copy.deepcopy(model)
    with autoamp.disabled():
        exact = nn.Sequential.forward(plain, x)
    exact.sum().backward()
    for _ in range(2):
        y = compiled(x)
        assert is_rounded(y, exact)
    assert seen.low_products() == 2
    y.sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("way", WAYS)
def test_converted_model(way: Callable[..., Any], x: Tensor) -> None:
    model, seen = mlp(), Seen()
    exact = model(x)
    autoamp.convert(model, **BF16, strict=True)
    compiled = way(model, seen)
    for _ in range(2):
        assert is_rounded(compiled(x), exact)
    assert seen.low_products() == 2
    coverage = autoamp.report(model).coverage
    assert coverage.share_of_calls == 1
    assert coverage.low_flops == coverage.flops == 2 * 2 * 5 * (WIDTH * 16 + 16 * 4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_as_one_graph_autocast_stands_in(precision: str, x: Tensor, caplog) -> None:
    model, seen = mlp(), Seen("aot_eager")
    exact = model(x)
    autoamp.convert(model, **{**BF16, "precision": precision})
    compiled = torch.compile(model, backend=seen, fullgraph=True)
    assert is_rounded(compiled(x), exact)
    assert len(seen.graphs) == 1
    (warning,) = warned(caplog)
    says(warning, option="fullgraph=True")
    # Nothing scales this loss: in fp16 the gradient would be 0.
    (compiled(x) * 1e-8).sum().backward()
    assert all(p.grad.abs().max() > 0 for p in model.parameters())


@pytest.mark.parametrize("named", [{"keep": "0"}, {"deny": ["linear"]}])
def test_as_one_graph_no_op_that_was_to_stay_fp32_is_low(
    named: dict[str, Any], x: Tensor, caplog
) -> None:
    model = mlp()
    exact = model(x)
    autoamp.convert(model, **BF16, **named)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), exact)
    (warning,) = warned(caplog)
    says(warning, "fp32", option="fullgraph=True")


def test_as_one_graph_strict_raises(x: Tensor) -> None:
    model = autoamp.convert(mlp(), **BF16, strict=True)
    with pytest.raises(Exception, match="rewritten graphs cannot run"):
        torch.compile(model, backend="eager", fullgraph=True)(x)


@pytest.mark.parametrize("converted", [False, True])
def test_our_own_backend_rewrites_once(converted: bool, x: Tensor) -> None:
    model, seen = mlp(), Seen()
    exact = model(x)
    if converted:
        autoamp.convert(model, **BF16)
    options = {**BF16, "backend": seen}
    compiled = torch.compile(model, backend="autoamp", options=options)
    assert is_rounded(compiled(x), exact)
    assert len(seen.graphs) == 1
    assert seen.low_products() == 2


@pytest.mark.usefixtures("automatic")
def test_an_autocast_region_in_a_function_is_left_to_it(x: Tensor) -> None:
    model, seen = mlp(), Seen()

    @torch.compile(backend=seen)
    def run(value: Tensor) -> Any:
        return model(value)

    with torch.autocast("cpu", torch.bfloat16):
        assert run(x).dtype is torch.bfloat16
    assert seen.low_products() == 0


# -- questions to Dynamo ---------------------------------------------------------------


@pytest.mark.parametrize("calls_before", [0, 2])
def test_dynamo_explains_the_models_own_code(calls_before: int, x: Tensor) -> None:
    model = mlp()
    plain = torch._dynamo.explain(model)(x)
    autoamp.convert(model, **BF16)
    for _ in range(calls_before):
        model(x)
    found = torch._dynamo.explain(model)(x)
    assert found.graph_count == plain.graph_count == 1
    assert found.graph_break_count == 0
    assert found.op_count == plain.op_count
    assert str(found).splitlines()[:3] == str(plain).splitlines()[:3]
    model(x)
    assert autoamp.report(model).runs == calls_before + 1


def test_a_backend_may_read_why_a_graph_ends(x: Tensor) -> None:
    seen = []

    def backend(gm: torch.fx.GraphModule, inputs: list[object]) -> object:
        seen.append(gm.compile_subgraph_reason.graph_break)
        return gm.forward

    model = autoamp.convert(mlp(), backend=backend, **BF16)
    with torch.no_grad():
        model(x)
    assert seen == [False]
    assert autoamp.report(model).runs == 1


# -- compilers by name, and compilers that ask for another graph -----------------------


class BeginsAgain(Seen):
    """A backend that has Dynamo trace the frame again, as inductor may."""

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        if not self.graphs:
            self.graphs.append(gm)
            raise TensorifyScalarRestartAnalysis
        return super().__call__(gm, inputs)


def by_convert(model: nn.Module, **options: Any) -> Callable[..., Any]:
    return autoamp.convert(model, **BF16, **options)


def by_name(model: nn.Module, **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend="autoamp", options={**BF16, **options})


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("way", [by_convert, by_name])
def test_a_compiler_may_ask_for_another_graph(
    way: Callable[..., Any], strict: bool, x: Tensor, caplog
) -> None:
    model, seen = mlp(), BeginsAgain()
    exact = model(x)
    assert is_rounded(way(model, backend=seen, strict=strict)(x), exact)
    assert not warned(caplog)


@pytest.mark.parametrize("way", [by_convert, by_name])
def test_a_compiler_may_be_named_as_torch_names_it(
    way: Callable[..., Any], x: Tensor
) -> None:
    model = mlp()
    exact = model(x)
    y = way(model, backend="aot_eager", strict=True)(x)
    assert is_rounded(y, exact)
    y.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
