"""Questions about models that compute on DTensors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import autoamp
from tests.one_rank import one_rank
from tests.says import says

X = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def net() -> Iterator[nn.Module]:
    torch.manual_seed(0)
    up, down = nn.Linear(64, 128), nn.Linear(128, 64)
    made = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), up, nn.GELU(), down)
    with one_rank() as mesh:
        plan = {"2": ColwiseParallel(), "4": RowwiseParallel()}
        yield parallelize_module(made, mesh, plan)


def options(precision: str) -> dict[str, Any]:
    return {"precision": precision, "do_no_harm": False}


def test_compare_computes_on_the_mesh(net: nn.Module) -> None:
    """Each op's error is of its rounding: stand-ins hold no data, and would show."""
    found = autoamp.compare(net, X, **options("bf16"))
    errors = [each.added for each in found.nodes]
    assert any(each.op.startswith("autoamp::") for each in found.nodes)
    assert all(math.isfinite(each) and each < 0.02 for each in errors)
    assert 0 < found.errors.output <= 1.05 * found.autocast.output


def test_an_overflow_is_found_where_it_is(net: nn.Module) -> None:
    with torch.no_grad():
        net[2].weight.mul_(1e6)
    found = autoamp.find_overflow(net, X, **options("fp16"))
    says(found, op="linear", module="in 2")
