"""`torch.compile(model, backend="autoamp")` of code that Dynamo leaves to Python."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import autoamp
from autoamp.runtime import compile_backend
from tests.logs import warned
from tests.says import says
from tests.small_models import BF16, WIDTH, Of, Quiet, is_rounded, mlp

# Dynamo looks at `.grad` of whatever crosses a break; it hides the warning, though not
# from a filter that makes it an error.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)


def by_name(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    options = {**BF16, "backend": "eager", **options}
    compiled: Any = torch.compile(model, backend="autoamp", options=options)
    return compiled  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def afresh() -> None:
    torch._dynamo.reset()
    compile_backend._BACKENDS.clear()  # what it has said, it says no more


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 3, WIDTH)


def padded(model: Any, x: Tensor) -> Any:
    return model.head(model.inner(x)[0])


def packed(model: Any, x: Tensor) -> Any:
    given = pack_padded_sequence(x, torch.tensor([5, 4, 2]))
    return model.head(pad_packed_sequence(model.inner(given)[0])[0])


@pytest.mark.parametrize("forward", [padded, packed])
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_recurrent_layers_run_low(kind: Any, forward: Any, x: Tensor, caplog) -> None:
    if forward is packed and torch.__version__.startswith("2.11"):
        pytest.skip("torch 2.11 cannot pad a packed sequence of fake tensors")
    model = Of(forward, inner=kind(WIDTH, 8), head=nn.Linear(8, 4))
    plain, allowed = copy.deepcopy(model), torch._dynamo.config.allow_rnn
    y, exact = by_name(model, strict=True)(x), plain(x)
    assert is_rounded(y, exact)
    assert not warned(caplog)
    assert torch._dynamo.config.allow_rnn == allowed
    y.sum().backward()
    exact.sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0.05, atol=0.05)


def test_no_compiler_gets_a_recurrent_layer(x: Tensor, caplog) -> None:
    model = Of(padded, inner=nn.LSTM(WIDTH, 8), head=nn.Linear(8, 4))
    exact = model(x)
    assert is_rounded(by_name(model, backend="inductor", strict=True)(x), exact)
    (warning,) = warned(caplog)
    says(warning, "LSTM")


def tried(model: Any, x: Tensor) -> Any:
    try:
        print(end="")
        return model.inner(x) @ model.weight
    finally:
        pass


def trying() -> Of:
    return Of(tried, inner=mlp(), weight=nn.Parameter(torch.randn(4, 4)))


@pytest.mark.parametrize("is_method", [True, False])
def test_what_is_left_to_python_is_said_once(
    is_method: bool, x: Tensor, caplog
) -> None:
    model = trying()
    exact = model(x)
    function = model if is_method else lambda x: tried(model, x)
    for options in ({}, {"guard": False}):  # an answer under one set is none for others
        caplog.clear()
        compiled = by_name(function, **options)
        for _ in range(2):
            assert is_rounded(compiled(x), exact)  # the modules inside are captured
        (warning,) = warned(caplog)
        says(warning, "tried", "fp32", __file__)
    with pytest.raises(autoamp.AutoampError) as raised:
        by_name(model, strict=True)(x)
    says(raised, "tried", "fp32", __file__)


def test_code_that_computes_nothing_may_be_left(x: Tensor, caplog) -> None:
    names: list[str] = []

    def noted(name: str) -> None:
        try:
            print(end="")
            names.append(name)
        finally:
            pass

    inner = mlp()

    def run(x: Tensor) -> Any:
        y = inner(x)
        noted("first")
        return y

    assert is_rounded(by_name(run, strict=True)(x), inner(x))
    assert names
    assert not warned(caplog)


def test_a_dispatch_mode_is_said_and_ends(x: Tensor, caplog) -> None:
    model = Of(lambda m, x: m.inner(x) + 1, inner=mlp())
    exact, compiled = model(x), by_name(model)
    with Quiet():
        assert torch.equal(compiled(x), exact)
    (warning,) = warned(caplog)
    says(warning, "dispatch mode", "fp32")
    assert is_rounded(compiled(x), exact)


def test_the_recompile_limit_is_said(caplog) -> None:
    model = mlp()
    options = {**BF16, "backend": "eager"}
    compiled: Any = torch.compile(
        model, backend="autoamp", options=options, dynamic=False
    )
    for rows in range(2, 12):
        compiled(torch.randn(rows, WIDTH))
    (warning,) = warned(caplog)
    says(warning, "recompile_limit", "fp32")


def test_a_bad_option_is_an_error_where_there_is_no_graph(x: Tensor) -> None:
    for name, value, told in (
        ("precision", "fp7", "'fp7'"),
        ("precison", "bf16", "'precison'"),
    ):
        with pytest.raises(autoamp.AutoampError) as raised:
            by_name(trying(), **{name: value})(x)
        says(raised, told)


def test_a_second_derivative_is_told_what_runs_next(x: Tensor, caplog) -> None:
    compiled = by_name(mlp(), backend="aot_eager")
    y = compiled(x.requires_grad_())
    torch.autograd.grad(y.sum(), x, create_graph=True)
    (warning,) = warned(caplog)
    says(warning, "create_graph=True", "torch._dynamo.reset()")
    torch._dynamo.reset()
    (first,) = torch.autograd.grad(compiled(x).square().sum(), x, create_graph=True)
    first.sum().backward()
