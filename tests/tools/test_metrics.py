"""The instruments measure what they say, and do not disturb what they measure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autoamp.tools.count import Cast
from tests.metrics import count_ops, saved_bytes
from tests.models import BY_NAME, Case

# What Dynamo itself warns of while it captures a Function, or a value crossing a break.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*should not be instantiated:DeprecationWarning"
    ),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

BF16 = torch.bfloat16


class Captured:
    """A model compiled by a back end that only counts how often its graphs run."""

    def __init__(self, model: nn.Module) -> None:
        self.runs = 0
        torch._dynamo.reset()

        def call(*args: Any, **kwargs: Any) -> Any:
            return type(model).forward(model, *args, **kwargs)

        self.call = torch.compile(call, backend=self._backend)

    def _backend(self, gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.runs += 1
            return gm(*args)

        return run


RECOMPUTES = pytest.mark.skipif(
    not hasattr(torch._higher_order_ops.wrap, "_always_prefer_recompute"),
    reason="this torch's own operator recomputes nothing in an eager back end",
)
CAPTURED = [
    "mlp",
    pytest.param("checkpoint", marks=RECOMPUTES),
    "straight_through",
    "branching",
]


def _backward(case: Case, call: Callable[..., Any]) -> None:
    args, kwargs = case.inputs(0)
    case.loss(call(*args, **kwargs)).backward()


@pytest.mark.parametrize("name", CAPTURED)
def test_counting_does_not_stop_capture_and_misses_nothing(name: str) -> None:
    case = BY_NAME[name]
    model = case.model()
    eager = count_ops(lambda: _backward(case, model))
    captured = Captured(model)
    counts = count_ops(lambda: _backward(case, captured.call))
    assert captured.runs == (2 if name == "branching" else 1)
    # Eager checkpoint stops its recompute early, the captured operator does not.
    assert counts.flops[torch.float32] >= eager.flops[torch.float32] > 0
    if name != "checkpoint":
        assert counts.flops == eager.flops


def test_casts_are_told_apart() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    x = torch.randn(2, 4)

    def step() -> None:
        y = x.to(BF16) @ weight.t().to(BF16)
        y.float().sum().backward()

    counts = count_ops(step, [weight])
    assert counts.casts == {
        Cast("forward", "value", "down"): 1,
        Cast("forward", "weight", "down"): 1,
        Cast("forward", "value", "up"): 1,
        Cast("backward", "value", "down"): 1,  # of the gradient of `.float()`
        Cast("backward", "value", "up"): 1,  # of the weight's gradient
    }
    assert counts.total_casts == counts.cast_count() == 5
    assert counts.cast_count(phase="forward") == 3
    assert counts.flops == {BF16: 2 * (2 * 2 * 4 * 4)}  # forward, and the weight's
    assert counts.low_share == 1.0


def test_refreshing_weight_copies_is_counted_by_tensor() -> None:
    weights = [nn.Parameter(torch.randn(3)) for _ in range(4)]
    copies = [torch.empty(3, dtype=BF16) for _ in weights]

    def refresh() -> None:
        with torch.no_grad():
            torch._foreach_copy_(copies, weights)
            copies[0].copy_(weights[0])
            copies[1].copy_(torch.randn(3))  # not from a parameter: a cast

    counts = count_ops(refresh, weights)
    assert counts.refreshed == 5
    assert counts.casts == {Cast("forward", "value", "down"): 1}


def test_recurrent_and_attention_flops_are_counted() -> None:
    lstm = nn.LSTM(8, 16)
    counts = count_ops(lambda: lstm(torch.randn(5, 3, 8)), lstm.parameters())
    assert counts.flops.total() == 5 * 3 * 2 * (4 * 16 * 8 + 4 * 16 * 16)
    q = torch.randn(2, 4, 6, 8, requires_grad=True)

    def attend() -> None:
        functional.scaled_dot_product_attention(q, q, q).sum().backward()

    # Two products forward; five backward, since flash attention computes one again.
    assert count_ops(attend).flops.total() == 7 * 2 * 2 * 4 * 6 * 6 * 8


def test_saved_bytes_counts_storages_once_and_tells_weight_copies() -> None:
    weight = nn.Parameter(torch.randn(6, 4))
    x = torch.randn(2, 4, requires_grad=True)

    def forward() -> Tensor:
        low = weight.to(BF16)
        y = x.to(BF16)
        return y @ low.t() + y @ low.t()

    saved = saved_bytes(forward, [weight])
    assert saved.weight_copies == 6 * 4 * 2
    assert saved.total == (6 * 4 + 2 * 4) * 2
