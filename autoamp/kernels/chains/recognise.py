"""Tells which kernel a chain computes: proved by algebra, and checked by numbers.

What a chain computes is written as a quotient of sums, by rules that hold for all real
numbers (`shared/proof/`).  The chain is a kernel if the kernel's own quotient
(`kernels/table.py`) is equal to it, multiplied out.  So one row of the table covers
every way in which a function is written: `x.pow(3)`, `x * x * x`, constants cut off
after ten digits, factors in any order.  `exp(x - c)` over its sum is softmax for every
`c`; with a small number added to the sum it is no softmax.  The epsilon of a norm is
the number that is left under the root, and the kernel is given that number.

A proved chain is then tried: chain and kernel run in float64 on the same numbers, and
in fp32, where the kernel may lose no digits that the chain keeps (`trials.py`).
Where proof or trial says no, or does not know, the chain stays as it is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE
from autoamp.kernels.chains.chain import Chain
from autoamp.kernels.chains.trials import agree, elements, is_as_true, rows
from autoamp.kernels.shared.calls import is_cast
from autoamp.kernels.shared.proof.algebra import Algebra, Form, UnknownError, form_of
from autoamp.kernels.shared.proof.elementary import row_sum
from autoamp.kernels.shared.proof.meaning import Meaning, meaning
from autoamp.kernels.table import KERNELS, Kernel
from autoamp.op_names import base_name


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
    except UnknownError:
        return None
    return _recognised(calls, len(chain.vectors), size, sizes[1] if size else 0)


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
            raise UnknownError
        return _Value(numbers[value])
    if isinstance(value, list | tuple):
        return tuple(_written(each, numbers) for each in value)
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return value
    raise UnknownError


@lru_cache(maxsize=1024)  # the layers of a network spell a function alike
def _recognised(
    calls: tuple[_Call, ...], vectors: int, size: int, dims: int
) -> Recognised | None:
    try:
        found = next(_proved(calls, vectors, size, dims), None)
    except UnknownError:
        found = None
    if found is None:
        return None
    with compat.on_real_numbers():
        inputs = rows(vectors, size, dims) if size else (elements(),)
        try:
            return found if _is_tried(found, calls, inputs, size) else None
        except (RuntimeError, TypeError, IndexError):
            return None  # it cannot be run on rows of other shapes, or not in float64


def _is_tried(
    found: Recognised, calls: Sequence[_Call], inputs: Sequence[Tensor], size: int
) -> bool:
    """Whether the numbers of a chain and of the kernel it was proved to be agree."""
    result = _run(calls, inputs)
    if not agree(result, found(inputs[0], inputs[1:]), inputs[0], size):
        return False
    low = [each.to(HIGH_DTYPE) for each in inputs]
    exact = _run(calls, [each.double() for each in low])
    return is_as_true(found(low[0], low[1:]), _run(calls, low), exact, low[0], size)


def _proved(
    calls: Sequence[_Call], vectors: int, size: int, dims: int
) -> Iterator[Recognised]:
    """The kernels that compute the same as a chain for all numbers."""
    algebra = Algebra(size)
    letters = [algebra.letter(name) for name in ("x", "v", "u")[: vectors + 1]]
    result = _read(algebra, calls, [Meaning(letter) for letter in letters], dims)
    if not result.is_whole:
        return
    for found, epsilon in _candidates(algebra, letters):
        weight = None if found.weight is None else letters[1 + found.weight]
        bias = None if found.bias is None else letters[1 + found.bias]
        form = found.kernel.form(letters[0], weight, bias, epsilon)
        if result.form.is_equal(form):
            yield found


def _read(
    algebra: Algebra, calls: Sequence[_Call], inputs: Sequence[Meaning], dims: int
) -> Meaning:
    """What a chain computes of its inputs."""
    values = [*inputs]

    def read(written: Any) -> Any:
        return values[written.number] if isinstance(written, _Value) else written

    for call in calls:
        args = [read(a) for a in call.args]
        if call.target is None:
            values.append(args[0])
            continue
        assert isinstance(call.target, compat.OpOverload)
        name = base_name(call.target).removeprefix("aten::")
        kwargs = {k: read(v) for k, v in call.kwargs}
        values.append(meaning(name, algebra, dims, args, kwargs))
    return values[-1]


def _candidates(
    algebra: Algebra, letters: Sequence[Form]
) -> Iterator[tuple[Recognised, Fraction]]:
    """The kernels that a chain may be, with every use of its vectors and epsilons."""
    vectors, small = len(letters) - 1, [*_epsilons(algebra, letters[0])]
    for kernel in KERNELS:
        if kernel.by_rows != bool(algebra.size) or vectors > len(kernel.vectors):
            continue
        for epsilon in small if "epsilon" in kernel.takes else (Fraction(0),):
            for names in itertools.permutations(kernel.vectors, vectors):
                at = dict(zip(names, range(vectors), strict=True))
                places = at.get("weight"), at.get("bias")
                yield Recognised(kernel, *places, float(epsilon)), epsilon


def _epsilons(algebra: Algebra, data: Form) -> Iterator[Fraction]:
    """What is added, under the roots of a chain, to the mean of the squares."""
    if not algebra.size:
        return
    (squares,) = row_sum(data * data).above
    found = set()
    for atom in list(algebra.atoms):
        if atom.kind == "root":
            base = form_of(algebra, atom.of).above
            if base.get(squares, 0) > 0:
                found.add(base.get((), Fraction(0)) / base[squares] / algebra.size)
    yield from sorted(each for each in found if each >= 0)


def _run(calls: Sequence[_Call], inputs: Sequence[Tensor]) -> Tensor:
    values = [*inputs]

    def read(written: Any) -> Any:
        if isinstance(written, _Value):
            return values[written.number]
        if isinstance(written, tuple):
            return [read(each) for each in written]
        return inputs[0].dtype if written == HIGH_DTYPE else written

    for call in calls:
        args = [read(a) for a in call.args]
        if call.target is None:
            values.append(args[0])
        else:
            values.append(call.target(*args, **{k: read(v) for k, v in call.kwargs}))
    return values[-1]
