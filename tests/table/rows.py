"""A row of the table: a program, its parts and inputs, and what is expected of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.small_models import Of

ROWS: dict[str, Row] = {}
"""All rows by their names, in the order in which they are written."""


@dataclass(frozen=True)
class Row:
    """A program, and what is expected of it beside the laws.

    Attributes:
        model: makes the model, with the same numbers after the same seed.
        inputs: makes what the model is called with.
        kernels: the kernels that chains of its calls run as, in the order of the calls;
            None where nothing is promised.
        low: the ops, by base name, that run in the compute dtype wherever they stand.
        high: the ops that stay in fp32 wherever they stand.
        exact: each result is, to the bit, that of fp32.
        without: columns that cannot be had, each with the reason.
        strict: whether nothing of it may run past the pass.
    """

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[], Sequence[Any]]
    kernels: tuple[str, ...] | None = None
    low: tuple[str, ...] = ()
    high: tuple[str, ...] = ()
    exact: bool = False
    without: dict[str, str] | None = None
    strict: bool = True


Made = Callable[[], Any] | tuple[int, ...]


def row(*inputs: Made, **given: Any) -> Callable[[Any], Any]:
    """Makes a row of a program: a function of its model and inputs, or a module.

    Args:
        *inputs: the sizes of a normal tensor each, or a function that makes one.
        **given: fields of `Row`; everything else is a part of the model, as a function
            that makes a layer, parameter or buffer.

    Example:
        >>> @row((4, 8), fc=lambda: nn.Linear(8, 8), low=("linear",))
        ... def residual(m, x):
        ...     return x + m.fc(x)
    """
    fields = {name: given.pop(name) for name in [*given] if name in FIELDS}

    def add(program: Any) -> Any:
        def model() -> nn.Module:
            if isinstance(program, type):
                return program(**{name: part() for name, part in given.items()})
            return Of(program, **{name: part() for name, part in given.items()})

        def made() -> list[Any]:
            return [torch.randn(x) if isinstance(x, tuple) else x() for x in inputs]

        name = f"{program.__module__.rpartition('.')[2]}/{program.__name__}"
        assert name not in ROWS, f"there are two rows {name}"
        ROWS[name] = Row(name, model, made, **fields)
        return program

    return add


FIELDS = ("kernels", "low", "high", "exact", "without", "strict")


def linear(width: int, out: int | None = None) -> Callable[[], nn.Linear]:
    return lambda: nn.Linear(width, out or width)


def parameter(*sizes: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.randn(sizes))


def numbers(most: int, *sizes: int) -> Callable[[], Tensor]:
    """Whole numbers below `most`: labels, indices, tokens."""
    return lambda: torch.randint(most, sizes)


def frozen(*sizes: int) -> Callable[[], Tensor]:
    """A normal tensor that takes no gradient."""
    return lambda: torch.randn(sizes).detach()
