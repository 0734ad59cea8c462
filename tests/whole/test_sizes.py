"""A graph that was captured at some sizes still means the same at others."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.metrics import relative_error
from tests.small_models import Of, converted

WIDTH = 8
CLOSE = 0.02  # rounding of two layers; what is tested here is off by 0.3 and more

Factor = Callable[[Tensor, int], Tensor]
NUMBERS: dict[str, Factor] = {
    "arange": lambda h, n: torch.arange(0, n * 0.5, 0.5),
    "linspace": lambda h, n: torch.linspace(h.sum() * 0, n * 0.5, n),
    "full": lambda h, n: torch.full((n,), n * 0.5),
    "slope": lambda h, n: F.leaky_relu(h, 1 / n).sum(1),
    "where": lambda h, n: torch.where(h.sum(1) > n / 7, n**0.5, 0.0 * n),
    "bool": lambda h, n: h.sum(1, keepdim=n > 3)[:, 0],
}
"""Numbers that are made of the length of an input."""


def times(factor: Factor) -> Callable[[Any, Tensor], Tensor]:
    return lambda m, x: m.fc(x) * factor(x, x.shape[0])[:, None]


PROGRAMS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str, Any]] = {
    **{name: (times(factor), "bf16", (5, 7, 9)) for name, factor in NUMBERS.items()},
    # The sum of more rows leaves the range of fp16, and that of fewer does not.
    "sum": (lambda m, x: m.fc(x.abs() * 30).abs().sum(0) / 1e3, "fp16", (4, 6, 3000)),
    # Of symbolic sizes its fake result is that of a decomposition.
    "lstm": (lambda m, x: m.fc(m.rnn(x)[0]), "bf16", ((3, 4), (2, 5), (5, 6))),
    # A factor beyond the range of fp16 is not cut off at its end.
    "factor": (lambda m, x: m.other(m.fc(x) / 1e6 * 1e6), "fp16", (4, 6)),
    "whole factor": (lambda m, x: m.other(m.fc(x) / 10**6 * 10**6), "fp16", (4, 6)),
}
"""A program, its precision, and the sizes before the width that it is called at."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_means_the_same_at_each_size(name: str) -> None:
    program, precision, sizes = PROGRAMS[name]
    layers = {"fc": nn.Linear(WIDTH, WIDTH), "other": nn.Linear(WIDTH, WIDTH)}
    plain = Of(program, **layers, rnn=nn.LSTM(WIDTH, WIDTH, batch_first=True))
    model = converted(copy.deepcopy(plain), precision=precision)
    for size in sizes:
        x = torch.randn(*(size if isinstance(size, tuple) else (size,)), WIDTH)
        assert relative_error(model(x), plain(x)) < CLOSE


def test_a_gradient_that_sums_more_rows_later_is_exact() -> None:
    norm = nn.LayerNorm(WIDTH)
    model = converted(nn.Sequential(nn.Linear(WIDTH, WIDTH), norm))
    for rows in (4, 6, 16000):
        norm.zero_grad()
        model(torch.randn(rows, WIDTH)).sum().backward()
    assert norm.bias.grad.tolist() == [16000.0] * WIDTH


def test_the_gradient_of_a_piece_of_a_weight_used_often_is_exact() -> None:
    def often(m: Any, x: Tensor) -> Tensor:
        piece, _ = m.fc.weight.chunk(2)
        # In bf16, 256 + 1 is 256.
        return torch.stack([F.linear(x, piece) for _ in range(300)]).sum()

    model = converted(Of(often, fc=nn.Linear(WIDTH, WIDTH)))
    model(torch.ones(1, WIDTH)).backward()
    assert model.fc.weight.grad[0].tolist() == [300.0] * WIDTH


class Doubled(torch.autograd.Function):
    """Doubles its operand in place."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        a.mul_(2)
        ctx.mark_dirty(a)
        return a

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@pytest.mark.filterwarnings(
    # Dynamo's own, when it captures a custom Function.
    "ignore:.*should not be instantiated:DeprecationWarning"
)
def test_a_sub_graph_that_is_not_traced_may_write_to_what_it_is_handed() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        hidden = m.fc(x)
        before = m.other(hidden)
        hidden = hidden.clone()
        return m.other(Doubled.apply(hidden)) + before + hidden

    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    plain = Of(forward, fc=layers[0], other=layers[1])
    model, x = converted(copy.deepcopy(plain)), torch.randn(4, WIDTH)
    assert relative_error(model(x), plain(x)) < CLOSE


def test_a_hook_and_a_list_given_after_the_capture_are_heeded() -> None:
    """A hook that is registered later is called, and a list is filled once."""

    def noting(m: Any, x: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(m.fc(x))
        return m.other(seen[0])

    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    plain = Of(noting, fc=layers[0], other=layers[1])
    model, x = converted(copy.deepcopy(plain)), torch.randn(4, WIDTH)
    for hooked, low in itertools.product((False, True), (False, True)):
        if hooked and not low:
            for each in (plain, model):
                each.fc.register_forward_hook(lambda _, __, out: out * 2)
        seen: list[Tensor] = []
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            found = model(x, seen)
        assert len(seen) == 1
        assert relative_error(found.float(), plain(x, [])) < CLOSE
