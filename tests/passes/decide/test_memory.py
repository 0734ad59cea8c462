"""What a placement keeps for the backward is what autograd keeps, and no more."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autoamp.passes.check.saved_bytes import bytes_held, saved_bytes, tensors_saved
from tests.passes.decide.door import (
    Device,
    Problem,
    energy,
    kept_bytes,
    least_cost,
    price_graph,
    weighed,
    within,
)
from tests.small_models import Of, converted, rewritten
from tests.strategies import problems


def pointwise(m: Any, x: Tensor) -> Tensor:
    return m.second(F.gelu(m.first(x))).relu()


def norms(m: Any, x: Tensor) -> Tensor:
    return F.layer_norm(m.first(x), (8,)).softmax(-1).tanh()


def read_in_both(m: Any, x: Tensor) -> Tensor:
    """A relu keeps its fp32 result, and a product a low copy."""
    x = (x + m.first(x)).relu()
    return x * m.second(x).exp()


def images(m: Any, x: Tensor) -> Tensor:
    x = F.batch_norm(m.conv(x[:, None, None]), None, None, training=True)
    return F.max_pool2d(x.relu_(), (1, 2)).flatten(1)


def masks(m: Any, x: Tensor) -> Tensor:
    return F.dropout(m.first(x), 0.5).sigmoid().cumsum(-1)


def heads(m: Any, x: Tensor) -> Tensor:
    x = m.first(x).view(1, 4, 2, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(x, x, x)


def views(m: Any, x: Tensor) -> Tensor:
    """Parts of one value are kept as the whole value, once."""
    a, b = m.first(x).chunk(2, -1)
    return F.log_softmax(a * b.sigmoid(), -1)


def frozen(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = m.first(x).exp()
    return m.second(x.detach()).cos()


PROGRAMS = [pointwise, norms, read_in_both, images, masks, heads, views, frozen]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_the_bytes_kept_are_those_that_autograd_keeps(
    program: Callable[..., Any],
) -> None:
    """In fp32, and in the emitted graph with every op low that may be.

    Masks and indices have the same size in any precision, and do not count.
    """
    torch.manual_seed(0)
    layers = {"first": nn.Linear(8, 8), "second": nn.Linear(8, 8)}
    model = Of(program, conv=nn.Conv2d(1, 3, 1), **layers)
    x = torch.randn(4, 8)
    made = rewritten(model, [x], "bf16")
    found, weights = made.assignment, [*model.parameters(), *made.gm.parameters()]

    def kept(run: Callable[..., Any]) -> int:
        saved = tensors_saved(lambda: run(x.clone()), weights)
        return sum(bytes_held(t) for t in saved if t.is_floating_point())

    assert kept_bytes(found.prices.kept, frozenset()) == kept(model)
    assert found.low
    always_fp32 = 16 if program is heads else 0  # the log-sums of its exponentials
    assert found.kept == kept(made.gm) - always_fp32


SLOW = Device("test", 2.0, 100.0, 4.0, 16.0, True)
"""A cast of 512 numbers and its backward take 32 720 units of 0.1 ns."""


def last_in_fp32(m: Any, x: Tensor) -> Tensor:
    """The last layer is faster in fp32, and keeps twice as much there."""
    return m.second(m.first(x).cumsum(-1))


@pytest.mark.parametrize(
    ("objective", "gain", "is_low"),
    [
        ("time", 200_000, True),
        ("time", 60_000, False),  # all fp32 would be faster
        ("memory", 60_000, True),
    ],
)
def test_no_more_is_kept_than_under_autocast(
    objective: str, gain: int, is_low: bool
) -> None:
    layers = {"first": nn.Linear(8, 8), "second": nn.Linear(8, 8)}
    ops = {"linear": (1 + gain, 1), "cumsum": (1, 1), "linear_1": (2, 1)}

    def price(gm: Any, seen: Any, _: Device, **told: Any) -> Any:
        return replace(price_graph(gm, seen, SLOW, **told), ops=ops)

    options = {"do_no_harm": True, "objective": objective, "price": price}
    model, x = Of(last_in_fp32, **layers), torch.randn(64, 8)
    made = rewritten(model, [x], "bf16", free_weights=True, **options)
    found = made.assignment
    fastest, least = least_cost(found.problem)
    assert fastest == {"linear"}
    assert ("linear_1" in found.low) is is_low
    assert (found.cost > least) is is_low
    if is_low:
        assert found.kept < kept_bytes(found.prices.kept, fastest)
        said = found.decisions["linear_1"].choice
        assert said == "so placed that less is kept for the backward"


def scatters(m: Any, x: Tensor) -> Tensor:
    """The sums are fp32, and what reads them may be low: autocast sums low."""
    for layer in (m.first, m.second):
        h = layer(x)
        there = m.edges[1][:, None].expand(-1, WIDTH)
        x = h.new_zeros(ROWS, WIDTH).scatter_add(0, there, h[m.edges[0]]).relu()
    return m.last(x)


def behind_checkpoints(m: Any, x: Tensor) -> Tensor:
    """The last layer is faster in fp32; what the checkpoints gain pays for it."""
    for layer in (m.first, m.second):
        x = checkpoint(lambda x, f=layer: x + f(x).relu(), x, use_reentrant=False)
    return m.last(x)


def two_layouts(m: Any, x: Tensor) -> Tensor:
    """One convolution is faster where the relu's result has its channels last."""
    x = m.wide(x[:256].view(4, 64, 8, 8)[:, :8]).relu()
    return m.strided(x).sum() + m.thin(x).sum()


ROWS, WIDTH = 4096, 64


@pytest.mark.usefixtures("bf16_units")
@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("program", [scatters, behind_checkpoints, two_layouts])
def test_a_converted_model_keeps_no_more_than_under_autocast(
    program: Callable[..., Any], needs_gradient: bool
) -> None:
    torch.manual_seed(0)
    layers = {
        "first": nn.Linear(WIDTH, WIDTH),
        "second": nn.Linear(WIDTH, WIDTH),
        "last": nn.Linear(WIDTH, 7),
        "wide": nn.Conv2d(8, 256, 1),
        "strided": nn.Conv2d(256, 64, 1, stride=2),
        "thin": nn.Conv2d(256, 16, 1),
    }
    edges = torch.randint(0, ROWS, (2, 4 * ROWS))
    model, plain = (Of(program, edges=edges, **layers) for _ in range(2))
    x = torch.randn(ROWS, WIDTH, requires_grad=needs_gradient)
    converted(model, do_no_harm=True)(x).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        autocasts = saved_bytes(lambda: plain(x), plain.parameters()).total
    ours = saved_bytes(lambda: model(x), model.parameters()).total
    assert ours <= autocasts


def points(problem: Problem) -> list[tuple[int, int]]:
    """The cost and the bytes of each legal placement; the shares are the bytes."""
    names, timed = sorted(problem.unary), replace(problem, shares=[])
    found = []
    for size in range(len(names) + 1):
        for labels in itertools.combinations(names, size):
            cost = energy(timed, frozenset(labels))
            if cost is not None:
                found.append((cost, kept_bytes(problem.shares, labels)))
    return found


@settings(max_examples=100)
@given(problems(7), st.integers(0, 20), st.integers(0, 9))
def test_bytes_are_brought_to_the_limit(
    problem: Problem, limit: int, more: int
) -> None:
    """Within the time allowed, and to the least that a price on bytes reaches."""
    legal = points(problem)
    assume(legal)
    timed, kept = replace(problem, shares=[]), problem.shares
    fastest, slowest = min(legal), min(legal)[0] + more

    def point(priced: Problem) -> tuple[int, int]:
        low, _ = least_cost(priced)
        cost = energy(timed, low)
        assert cost is not None
        return cost, kept_bytes(kept, low)

    byte = 1 + max(cost for cost, _ in legal)
    assert point(weighed(timed, kept, byte)) == min(legal, key=lambda p: p[::-1])
    low, _ = least_cost(timed)
    cost, size = point(within(timed, kept, low, limit, slowest, byte))
    assert cost <= slowest
    if point(timed)[1] <= limit:
        assert (cost, size) == point(timed)
    elif size > limit:
        # No placement that a price on bytes picks has fewer bytes in that time.
        picked = [p for p in legal if _is_a_corner(p, legal)]
        assert size <= min(bytes_ for time, bytes_ in picked if time <= slowest)
    assert fastest[0] <= cost


def _is_a_corner(point: tuple[int, int], legal: list[tuple[int, int]]) -> bool:
    """Whether some price on bytes makes this placement the only one of least cost."""
    cost, size = point
    steeper = [(c - cost) / (size - s) for c, s in legal if s < size]
    flatter = [(cost - c) / (s - size) for c, s in legal if s > size]
    same = any(s == size and c < cost for c, s in legal)
    return not same and max([0.0, *flatter]) < min([1e9, *steeper])
