"""Layers of torch.nn called in functions that Dynamo leaves to Python."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.metrics import count_ops, relative_error
from tests.quick import some_slow
from tests.says import says

WIDTH = 16
PRODUCTS = 12
"""One after another on the way through the model below: 3 + 6 + 2 + 1."""


class Looping(nn.Module):
    """What is computed in `forward` is never in a graph: the break is in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.deep = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True)
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if x.sum() > 1e9:
                break
            x = x + layer(x).relu()
        return self.head(self.net(self.deep(x)))


@pytest.mark.parametrize("precision", some_slow(["bf16", "fp16"], "bf16".__eq__))
def test_layers_are_low_where_their_caller_is_left_to_python(precision: str) -> None:
    """No further off than a rounding for every product, forward and backward."""
    unit = 2**-9 if precision == "bf16" else 2**-12
    torch.manual_seed(0)
    model = Looping()
    plain = copy.deepcopy(model)
    autoamp.convert(model, precision=precision, do_no_harm=False, strict=True)
    for batch in (2, 3):
        x = torch.randn(batch, 4, WIDTH)
        model.zero_grad()
        plain.zero_grad()
        outputs, expected = model(x), plain(x)
        outputs.square().mean().backward()
        expected.square().mean().backward()
        assert outputs.dtype is torch.float32
        assert relative_error(outputs, expected) < PRODUCTS * unit
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.grad.dtype is torch.float32
            assert relative_error(ours.grad, theirs.grad) < 2 * PRODUCTS * unit
    counts = count_ops(lambda: model(x), model.parameters())
    assert counts.low_flops
    assert not counts.high_flops
    ((what, why),) = autoamp.report(model).skipped
    says(what, line=f"{__file__}:")
    says(why, "Python")


class Guarded(Looping):
    """Its loop is in a region in which the model wants fp32."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if x.sum() > 1e9:
                break
            with torch.autocast("cpu", enabled=False):
                x = x + self.net(layer(x))
        return self.head(x)


def test_layers_stay_fp32_where_the_model_switches_autocast_off() -> None:
    torch.manual_seed(0)
    model, x = Guarded(), torch.randn(2, 4, WIDTH)
    seen: list[Tensor] = []
    model.head.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model(x)
    autoamp.convert(model, precision="bf16", do_no_harm=False, strict=True)
    for _ in range(2):
        with torch.autocast("cpu", enabled=False):  # the caller's is not the model's
            model(x)
    exact, *ours = seen
    assert all(torch.equal(each, exact) for each in ours)
    assert [row.op for row in autoamp.report(model).ops if row.precision == "bf16"] == [
        "aten::linear.default"
    ]
    assert any(
        "switched autocast off" in why for _, why in autoamp.report(model).skipped
    )


def test_autocast_switched_off_round_a_compiled_model_is_the_callers() -> None:
    """Scripts have `with torch.autocast("cuda", enabled=args.amp)`."""
    options = {"do_no_harm": False, "backend": "eager"}
    layer = nn.Linear(WIDTH, WIDTH)
    compiled = torch.compile(layer, backend="autoamp", options=options)
    x = torch.randn(4, WIDTH)
    with torch.autocast("cpu", enabled=False):
        counts = count_ops(lambda: compiled(x))
    assert counts.low_flops
