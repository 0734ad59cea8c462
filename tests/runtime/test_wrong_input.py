"""An input that the model refuses raises the model's own error, once, and no pages."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autoamp
from tests.quick import each_pair
from tests.small_models import BF16, Of

pytestmark = pytest.mark.usefixtures("off_again")


class Model(nn.Module):
    """Takes rows of 8 numbers, indices below 5, and a dict of further tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        self.table = nn.Embedding(5, 4)

    def forward(
        self,
        x: Tensor,
        rows: Tensor | None = None,
        more: dict[str, Tensor] | None = None,
    ) -> Tensor:
        y = self.body(x)
        if rows is not None:
            y = y + self.table(rows)
        if more is not None:
            y = y + more["bias"]
        return y


def good() -> Tensor:
    return torch.ones(3, 8)


WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "a product's shapes": ((torch.ones(3, 7),), {}),
    "a product in fp64": ((good().double(),), {}),
    "a product of truth values": ((good().bool(),), {}),
    "a sum's shapes": ((good(),), {"more": {"bias": torch.ones(5)}}),
    "indices that are floats": ((good(), torch.ones(3)), {}),
    "an index out of range": ((good(), torch.tensor([1, 2, 9])), {}),
    "a missing key": ((good(),), {"more": {"weight": torch.ones(4)}}),
    "too few arguments": ((), {}),
    "an unknown argument": ((good(),), {"mask": None}),
    "no tensor": (("text",), {}),
}


def error_of(model: nn.Module, args: tuple[Any, ...], kwargs: Any) -> Exception:
    try:
        model(*args, **kwargs)
    except Exception as error:  # noqa: BLE001
        return error
    raise AssertionError("the model takes the input")


def by_convert(model: nn.Module) -> nn.Module:
    return autoamp.convert(model, **BF16)


def by_the_mode(model: nn.Module) -> nn.Module:
    autoamp.enable(**BF16)
    return model


@pytest.mark.parametrize(
    ("wrong", "convert", "trains"),
    each_pair(WRONG, [by_convert, by_the_mode], [True, False]),
    ids=lambda each: ("eval", "train")[each] if isinstance(each, bool) else None,
)
def test_the_error_is_the_plain_models(
    wrong: str,
    convert: Callable[[nn.Module], nn.Module],
    trains: bool,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """CI has each wrong input by each way, and in each mode by one of them."""
    args, kwargs = WRONG[wrong]
    model = Model().train(trains)
    expected = error_of(copy.deepcopy(model), args, kwargs)
    model = convert(model)
    for call in ("first", "after a good one"):
        found = error_of(model, args, kwargs)
        assert (type(found), str(found)) == (type(expected), str(expected)), call
        shown = "".join(traceback.format_exception(found))
        assert shown.count(f"{type(found).__name__}:") == 1
        assert "TorchRuntimeError" not in shown
        assert "fake tensor" not in shown
        model(good())
    printed = capfd.readouterr().err
    assert "Traceback" not in printed + caplog.text
    assert "failed while attempting" not in printed + caplog.text
    assert "WON'T CONVERT" not in caplog.text
    assert len(printed.splitlines()) <= 3


def ones(*sizes: int) -> Tensor:
    return torch.ones(*sizes, dtype=torch.long)


REFUSED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = {
    "an integer weight": (functional.linear, ones(8, 8)),
    "an integer bias": (lambda h, i: functional.linear(h, h, i), ones(8)),
    "a product with a vector": (lambda h, i: h @ i, ones(8)),
    "a sum and a product": (lambda h, i: torch.addmm(i, h, h), ones(8, 8)),
    "a norm's weight": (lambda h, i: functional.layer_norm(h, (8,), i), ones(8)),
    "rows put": (lambda h, i: h.index_put((ROWS,), i), ones(8, 8)),
    "a cross product": (lambda h, i: torch.linalg.cross(h[:, :3], i), ones(8, 3)),
}
"""Calls of floats and integers that kernels refuse, and fake tensors do not."""

ROWS = torch.arange(8)


def refused(call: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    """One call of the result of a product and an integer tensor."""
    return Of(lambda m, x, i: call(m.body(x), i), body=nn.Linear(8, 8))


@pytest.mark.parametrize("name", REFUSED)
def test_an_error_about_integers_names_the_dtypes_of_the_model(name: str) -> None:
    call, integers = REFUSED[name]
    args = torch.ones(8, 8), integers
    expected = error_of(refused(call), args, {})
    found = error_of(autoamp.convert(refused(call), **BF16), args, {})
    assert (type(found), str(found)) == (type(expected), str(expected))


def test_integers_that_are_indices_or_masks_keep_nothing_fp32() -> None:
    def looks(m: Any, x: Tensor, mask: Tensor) -> Any:
        h = m.body(x).gather(0, ROWS[:, None].expand(8, 8))
        h = functional.scaled_dot_product_attention(h, h, h, attn_mask=mask)
        return m.body(h[ROWS].masked_fill(~mask, 0.0))

    model = autoamp.convert(Of(looks, body=nn.Linear(8, 8)), **BF16)
    model(torch.ones(8, 8), torch.ones(8, 8).bool())
    assert not [r for r in autoamp.report(model).ops if r.precision == "fp32"]
