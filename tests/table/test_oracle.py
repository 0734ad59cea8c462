"""The oracle sees each law broken by a model that is wrong in one thing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.says import says
from tests.small_models import Of
from tests.table import oracle
from tests.table.rows import Row

Wrong = Callable[[Any, Tensor], Any]


def right(m: Any, x: Tensor) -> Any:
    hidden = m.fc(x)
    m.seen.add_(1)
    return {"all": hidden, "first": hidden[:1], "drawn": torch.rand(2)}


def plain(m: Any, x: Tensor) -> Any:
    return m.fc(x) + m.seen


def made(function: Wrong) -> Of:
    return Of(function, fc=nn.Linear(8, 8), seen=torch.zeros(1))


ROW = Row("right", lambda: made(right), lambda: [torch.randn(4, 8)])


def changed(change: Callable[[dict[str, Tensor]], Any]) -> Wrong:
    return lambda m, x: change(right(m, x))


def off(result: dict[str, Tensor]) -> Any:
    """One part in a hundred: bf16 rounds to one in 256."""
    hidden = result["all"] * 1.01
    return {**result, "all": hidden, "first": hidden[:1]}


def not_counted(m: Any, x: Tensor) -> Any:
    return right(Of(right, fc=m.fc, seen=torch.zeros(1)), x)


def drawn_twice(m: Any, x: Tensor) -> Any:
    result = right(m, x)
    torch.rand(1)
    return result


def input_written(m: Any, x: Tensor) -> Any:
    return right(m, x.add_(0.0).mul_(1.0).add_(1e-6 * x.detach().abs()))


def gradient_of_another(m: Any, x: Tensor) -> Any:
    return right(m, x + 0.05 * (x - x.detach()))


WRONG: dict[str, tuple[Wrong, str]] = {
    "value": (changed(off), "truth"),
    "gradient": (gradient_of_another, "gradient of input"),
    "dtype": (changed(lambda r: {**r, "drawn": r["drawn"].double()}), "output 2"),
    "nest": (changed(lambda r: tuple(r.values())), "nest"),
    "no gradient": (changed(lambda r: {**r, "first": r["first"].detach()}), "output 1"),
    "strides": (
        changed(lambda r: {**r, "all": r["all"].t().contiguous().t()}),
        "strides",
    ),
    "memory": (changed(lambda r: {**r, "first": r["first"].clone()}), "share"),
    "buffer": (not_counted, "seen"),
    "random state": (drawn_twice, "random"),
    "input": (input_written, "input 0"),
}


def test_what_is_right_passes() -> None:
    oracle.check(ROW, "bf16", made(right))


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_in_one_thing_is_found(name: str) -> None:
    function, told = WRONG[name]
    with pytest.raises(AssertionError) as raised:
        oracle.check(ROW, "bf16", made(function))
    says(raised, told)


@pytest.mark.parametrize("promise", [{"low": ("relu",)}, {"high": ("linear",)}])
def test_what_a_row_promises_of_its_ops_is_asked(promise: dict[str, Any]) -> None:
    row = Row("promising", lambda: made(plain), ROW.inputs, **promise)
    with pytest.raises(AssertionError) as raised:
        oracle.check(row, "bf16")
    says(raised, op=next(iter(promise.values()))[0])


def test_a_promised_kernel_is_asked_for() -> None:
    row = Row("promising", lambda: made(plain), ROW.inputs, kernels=("gelu",))
    with pytest.raises(AssertionError):
        oracle.check(row, "bf16")
