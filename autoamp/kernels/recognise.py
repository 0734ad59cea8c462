"""Tells which kernel a chain computes, by the numbers and not by the spelling.

A chain and a kernel are both run in float64 on the same numbers: small, large and
ordinary ones, negative and positive.  The ops of chains are smooth functions, with no
comparisons and no limits (`in_chains` in `rules/families.toml`), and two smooth
functions that agree on all these numbers, to less than fp32 resolves, are one function.
So one row of `kernels/table.py` covers every way in which a function is written:
`x.pow(3)`, `x * x * x`, constants cut off after ten digits, factors in any order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE
from autoamp.kernels.chains import Chain, is_cast
from autoamp.kernels.table import KERNELS, Kernel

TOLERANCE = 2.0**-22
"""The largest difference, as a share of the largest number of a row, or of the element:
two units in the last place of fp32, as much as a chain of a few fp32 ops is off."""

_LOST = 2.0**-40
"""The same, as a share of the element that was read: where `1 + tanh(x)` cancels, this
share of float64's own digits is lost, and more than half of fp32's."""

_SCALES = (1e-6, 1e-4, 1e-2, 1.0, 1.0, 30.0)
"""Sizes of the rows that chains are tried on.  An epsilon shows in the small ones."""


@dataclass(frozen=True)
class Recognised:
    """The kernel that a chain computes.

    Attributes:
        kernel: the kernel.
        weight, bias: positions among the chain's vectors; None where there is none.
        epsilon: the small number, 0.0 for a kernel without one.
    """

    kernel: Kernel
    weight: int | None = None
    bias: int | None = None
    epsilon: float = 0.0

    def __call__(self, data: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        """The kernel's result on the inputs of the chain."""
        weight = None if self.weight is None else vectors[self.weight]
        bias = None if self.bias is None else vectors[self.bias]
        return self.kernel(data, weight, bias, self.epsilon)


@dataclass(frozen=True)
class _Call:
    """One call of a chain, in words that are the same in every graph.

    Attributes:
        target: the op; None for a cast from fp32 to fp32.
        args, kwargs: the arguments; an operand is a `_Value`.
    """

    target: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class _Value:
    """An operand: its number among the chain's inputs and results, in this order."""

    number: int


def recognised(chain: Chain) -> Recognised | None:
    """The kernel that computes the same as `chain`, if there is one."""
    data = chain.data.meta["val"]
    sizes = (data.shape[-1], data.dim())
    if not chain.is_pointwise and not isinstance(sizes[0], int):
        return None  # no number is known that a size could be divided by
    size = 0 if chain.is_pointwise else sizes[0]
    try:
        calls = tuple(_calls(chain))
        return _recognised(calls, len(chain.vectors), size, 0 if not size else sizes[1])
    except _UnknownError:
        return None


class _UnknownError(Exception):
    """A call of a chain has an argument that cannot be run on other numbers."""


def _calls(chain: Chain) -> Iterator[_Call]:
    numbers = {n: i for i, n in enumerate((chain.data, *chain.vectors, *chain.nodes))}
    for node in chain.nodes:
        args = tuple(_written(a, numbers) for a in node.args)
        kwargs = tuple((k, _written(v, numbers)) for k, v in node.kwargs.items())
        assert isinstance(node.target, compat.OpOverload)
        target = None if is_cast(node) else node.target
        yield _Call(target, args[:1] if target is None else args, kwargs)


def _written(value: Any, numbers: Mapping[fx.Node, int]) -> Any:
    """An argument as it is written in a `_Call`, which is compared and hashed."""
    if isinstance(value, fx.Node):
        if value not in numbers:
            raise _UnknownError
        return _Value(numbers[value])
    if isinstance(value, list | tuple):
        return tuple(_written(each, numbers) for each in value)
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return value
    raise _UnknownError


@lru_cache(maxsize=1024)  # the layers of a network spell a function alike
def _recognised(
    calls: tuple[_Call, ...], vectors: int, size: int, dims: int
) -> Recognised | None:
    with compat.on_real_numbers():
        inputs = _rows(vectors, size, dims) if size else (elements(),)
        try:
            result = _run(calls, inputs)
        except (RuntimeError, TypeError, IndexError):
            return None  # it cannot be run on rows of other shapes, or not in float64
        for candidate in _candidates(calls, vectors, by_rows=bool(size)):
            if agree(result, candidate(inputs[0], inputs[1:]), inputs[0], size):
                return candidate
    return None


def elements() -> Tensor:
    """The numbers that functions of one element are tried on, in float64."""
    large = torch.logspace(-30, 4, 200, dtype=torch.float64, device="cpu")
    fine = torch.linspace(-12, 12, 2001, dtype=torch.float64, device="cpu")
    return torch.cat([fine, large, -large])


def _rows(vectors: int, size: int, dims: int) -> tuple[Tensor, ...]:
    """Rows of all sizes, and vectors, from a generator of their own, in float64.

    The rows have as many dimensions as in the graph, but at least two, each of more
    than one element, so that a sum over a wrong dimension shows.
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(
            shape, generator=generator, dtype=torch.float64, device="cpu"
        )

    scales = torch.tensor(_SCALES, dtype=torch.float64, device="cpu")
    data = drawn(len(_SCALES), *[2] * (dims - 2), size)
    data = data * scales.view(-1, *[1] * (data.dim() - 1))
    data[3] += 4.0  # rows whose mean is not zero
    return (data, *(drawn(size) for _ in range(vectors)))


def _run(calls: Sequence[_Call], inputs: Sequence[Tensor]) -> Tensor:
    values = [*inputs]

    def read(written: Any) -> Any:
        if isinstance(written, _Value):
            return values[written.number]
        if isinstance(written, tuple):
            return [read(each) for each in written]
        return torch.float64 if written == HIGH_DTYPE else written

    for call in calls:
        args = [read(a) for a in call.args]
        if call.target is None:
            values.append(args[0])
        else:
            values.append(call.target(*args, **{k: read(v) for k, v in call.kwargs}))
    return values[-1]


def _candidates(
    calls: Sequence[_Call], vectors: int, *, by_rows: bool
) -> Iterator[Recognised]:
    """The kernels that a chain may be, with every use of its numbers and vectors."""
    written = [a for call in calls for a in call.args if isinstance(a, float)]
    small = dict.fromkeys([e for e in written if 0 < e < 0.1] + [0.0])
    for kernel in KERNELS:
        if kernel.by_rows != by_rows or vectors > len(kernel.vectors):
            continue
        for epsilon in small if "epsilon" in kernel.takes else (0.0,):
            for names in itertools.permutations(kernel.vectors, vectors):
                at = dict(zip(names, range(vectors), strict=True))
                yield Recognised(kernel, at.get("weight"), at.get("bias"), epsilon)


def agree(found: Tensor, expected: Tensor, data: Tensor, size: int = 0) -> bool:
    """Whether numbers are the expected ones, element by element or row by row."""
    if found.shape != expected.shape:
        return False
    scale = expected.abs()
    if size:
        scale = scale.amax(-1, keepdim=True)
    allowed = TOLERANCE * scale + (0 if size else _LOST * data.abs())
    return bool(((found - expected).abs() <= allowed).all())
