"""Selects that show a whole tensor become one `unbind`, with the same gradients."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp.counted.ops import Traffic, count_traffic
from autoamp.errors import AutoampError
from autoamp.pipeline import passes
from tests.small_models import Of

WIDTH = 16
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


def of(function: Callable[..., Any]) -> Of:
    """A model of one function over two layers."""
    torch.manual_seed(0)
    return Of(function, fc=nn.Linear(WIDTH, 3 * WIDTH), other=nn.Linear(WIDTH, WIDTH))


def parts(m: Of, x: Tensor) -> Tensor:
    return m.fc(x).view(-1, 3, WIDTH)


def whole(m: Of, x: Tensor) -> Tensor:
    p = parts(m, x)
    return m.other(p[:, 0] * p[:, 1] + p[:, -1])


def trained(
    function: Callable[..., Any], **options: Any
) -> tuple[list[Tensor], Traffic]:
    """The gradients of a step, and the bytes of the step."""
    torch._dynamo.reset()
    model = autoamp.convert(
        of(function), precision="bf16", do_no_harm=False, strict=True, **options
    )

    def step() -> None:
        result = model(X)
        first = result[0] if isinstance(result, tuple) else result
        first.float().square().sum().backward()

    step()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found, count_traffic(step)


def calls(traffic: Traffic, op: str) -> int:
    return sum(n for line, n in traffic.calls.items() if line.op == op)


def test_the_gradients_are_the_same_bits_in_fewer_bytes() -> None:
    ours, moved = trained(whole)
    theirs, before = trained(whole, fuse=False)
    assert calls(moved, "select_backward") == 0
    assert calls(before, "select_backward") == 3
    assert moved.bytes("backward") < before.bytes("backward")
    assert all(map(torch.equal, ours, theirs))


def partly(m: Of, x: Tensor) -> Tensor:
    p = parts(m, x)
    return m.other(p[:, 0] + p[:, 1])


def twice(m: Of, x: Tensor) -> Tensor:
    p = parts(m, x)
    return m.other(p[:, 0] + p[:, 1] + p[:, 2] * p[:, 2].sin() * p[:, 0])


def written(m: Of, x: Tensor) -> Tensor:
    """What `unbind` gives cannot be written to in place."""
    p = parts(m, x)
    p[:, 0].mul_(2)
    return m.other(p[:, 0] + p[:, 1] + p[:, 2])


def returned(m: Of, x: Tensor) -> tuple[Tensor, Tensor]:
    """A caller may write to a part that it is given."""
    p = parts(m, x)
    return m.other(p[:, 0] + p[:, 1] + p[:, 2]), p[:, 0]


@pytest.mark.thorough(but=["partly", "written", "returned"])
@pytest.mark.parametrize("function", [partly, twice, written, returned])
def test_other_selects_stay(function: Callable[..., Any]) -> None:
    _, moved = trained(function)
    assert calls(moved, "select_backward") >= 2


def test_parts_in_another_order_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the pass runs both graphs on the same numbers."""
    right = passes.with_unbind

    def wrong(*given: Any) -> Any:
        gm = right(*given)
        items = gm.graph.find_nodes(op="call_function", target=operator.getitem)
        for item in items:
            item.args = (item.args[0], 2 - item.args[1])
        return gm

    monkeypatch.setattr(passes, "with_unbind", wrong)
    with pytest.raises(AutoampError):
        trained(whole)
