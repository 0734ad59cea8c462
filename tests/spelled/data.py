"""Hostile data: what parameters and inputs are made of, and what the loss asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.spelled.layers import BATCH, WIDTH, Layer, Spelling

Change = Callable[[Layer, Tensor], Tensor]
"""Changes a model's parameters in place, and gives another input."""


def scaled(by: float) -> Change:
    """The layer reads numbers of this size."""

    def change(m: Layer, x: Tensor) -> Tensor:
        m.before.bias *= by
        return x * by

    return change


def shifted(by: float) -> Change:
    def change(m: Layer, x: Tensor) -> Tensor:
        m.before.bias += by
        return x

    return change


def input_shifted(m: Layer, x: Tensor) -> Tensor:
    return x + 100


def part(m: Layer, i: int) -> slice:
    """Where the queries, keys or values are among what `before` gives."""
    i = i % m.parts
    return slice(i * WIDTH, (i + 1) * WIDTH)


def sink(m: Layer, x: Tensor) -> Tensor:
    """All queries attend to the first token: its value is small, the others near 3."""
    weight, bias = m.before.weight, m.before.bias
    x = x * 0.5
    x[..., -1] = 0
    x[:, 0, -1] = 1
    weight[part(m, -1), -1] = -3
    bias[part(m, -1)] = 3
    if m.parts == 3:
        weight[part(m, 1), -1] = 4
        bias[part(m, 0)] = 4
    return x


def sink_of_opposites(m: Layer, x: Tensor) -> Tensor:
    """As `sink`, and values are large: of one sign where looked at, else of another."""
    x = sink(m, x)
    m.before.weight[part(m, -1)] *= 1e4
    m.before.bias[part(m, -1)] = 3e4
    m.before.weight[part(m, -1), -1] = -6e4
    return x


def alike(m: Layer, x: Tensor) -> Tensor:
    """All tokens of a text are nearly the same."""
    return x[:, :1] + 1e-2 * x


def the_same(m: Layer, x: Tensor) -> Tensor:
    return x[:, :1].expand_as(x).clone()


def rows_of_zeros(m: Layer, x: Tensor) -> Tensor:
    m.before.bias.zero_()
    x[:, ::3] = 0
    return x


def rows_of_little(m: Layer, x: Tensor) -> Tensor:
    m.before.bias.zero_()
    x[:, ::3] *= 1e-13
    x[:, 1::3] *= 1e-6
    return x


def constant_rows(m: Layer, x: Tensor) -> Tensor:
    m.before.bias.fill_(2.0)
    x[:, ::3] = 0
    return x


def outliers(m: Layer, x: Tensor) -> Tensor:
    m.before.bias[::7] += 100
    x[0, 0] *= 300
    return x


def large_scores(m: Layer, x: Tensor) -> Tensor:
    for i in range(max(1, m.parts - 1)):
        m.before.weight[part(m, i)] *= 8
    return x


def key_bias(m: Layer, x: Tensor) -> Tensor:
    m.before.bias[part(m, min(1, m.parts - 1))] += 8
    return x


def value_bias(m: Layer, x: Tensor) -> Tensor:
    m.before.bias[part(m, -1)] += 30
    return x


def values_only(by: float) -> Change:
    def change(m: Layer, x: Tensor) -> Tensor:
        m.before.weight[part(m, -1)] *= by
        m.before.bias[part(m, -1)] *= by
        return x

    return change


def vectors(m: Layer, x: Tensor) -> Tensor:
    """The layer's own weight and bias are large, and far from zero."""
    m.weight.mul_(30).add_(300)
    m.bias.add_(torch.linspace(-200, 300, WIDTH))
    return x


CHANGES: dict[str, Change] = {
    "plain": lambda m, x: x,
    **{f"scale {s:g}": scaled(s) for s in (1e-30, 1e-4, 1e-2, 30, 3e2, 3e3, 1e4)},
    **{f"offset {s:g}": shifted(s) for s in (5.0, 30.0, -30.0, 1e3)},
    **{f"values {s:g}": values_only(s) for s in (1e-4, 3e3, 1e4)},
}
for _change in (
    *(input_shifted, sink, sink_of_opposites, alike, the_same, rows_of_zeros),
    *(rows_of_little, constant_rows, outliers, large_scores, key_bias, value_bias),
    vectors,
):
    CHANGES[_change.__name__] = _change

LENGTHS = (24, 24, 24, 1, 2, 7, 64, 100, 200, 300)


def one_hot(like: Tensor, generator: torch.Generator) -> Tensor:
    found = torch.zeros_like(like)
    at = torch.randint(like.numel(), (3,), generator=generator)
    found.view(-1)[at] = 1.0
    return found


def random(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator)


COTANGENTS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "random": random,
    "one-hot": one_hot,
    "constant": lambda like, generator: torch.full_like(like, 0.5),
    "large": lambda like, generator: random(like, generator) * 300,
    "tiny": lambda like, generator: random(like, generator) * 1e-6,
    "near one": lambda like, generator: random(like, generator) * 0.01 + 1,
}


@dataclass(frozen=True)
class Situation:
    """What a model is run on."""

    change: str = "plain"
    length: int = 24
    cotangent: str = "random"

    def __str__(self) -> str:
        return f"{self.change}, {self.length} tokens, {self.cotangent}"

    def made(self, spelling: Spelling, seed: int) -> tuple[Layer, Tensor, Tensor]:
        """A model, an input, and the gradient of the output."""
        torch.manual_seed(seed)
        model = Layer(spelling).eval()
        x = torch.randn(BATCH, self.length, WIDTH)
        with torch.no_grad():
            model.weight += 0.1 * torch.randn(WIDTH)
            model.bias += 0.1 * torch.randn(WIDTH)
            x = CHANGES[self.change](model, x)
        generator = torch.Generator().manual_seed(seed + 1000)
        return model, x, COTANGENTS[self.cotangent](torch.zeros_like(x), generator)
