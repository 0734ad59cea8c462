"""Tells which kernel a chain computes: proved by algebra, and checked by numbers.

The result of a chain is written as a quotient of sums, by rules that hold for all real
numbers (`algebra.py`).  The chain is a kernel if the kernel's own quotient
(`table.py`) is equal to it, multiplied out.  So one row of the table covers every way
in which a function is written: `x.pow(3)`, `x * x * x`, constants cut off after ten
digits, factors in any order.  `exp(x - c)` over its sum is softmax for every `c`; with
a small number added to the sum it is no softmax.  The epsilon of a norm is the number
that is left under the root, and the kernel is given that number.

Libraries write activations as custom autograd Functions to keep less for the backward
(BLOOM's GELU, memory-saving Swish and Mish).  Dynamo captures such a Function as one
call with two graphs.  The forward has to be proved to be a kernel, and the backward to
be its derivative times the gradient: a backward that normalises, limits or averages the
gradient is another function.

The proof is then tried: a second opinion that knows no algebra.  Chain and kernel
run in float64 on ordinary numbers and on hostile ones: zeros, denormals, rows of 1e-30
and 1e30, rows far from zero, infinities, NaN; and in fp32, where the kernel may lose no
digits that the chain keeps.  Wherever the chain gives a finite number, the kernel has
to give the same, and NaN where a NaN that was read made the chain give NaN.  Where the
chain overflows nothing is asked of the kernel: a row of which an infinity makes a part
NaN has lost its sum, and the rest of it means nothing.  Where proof or trial says no,
or does not know, the chain stays as it is written.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, fx

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE
from autoamp.passes.kernels.algebra import Algebra, Form, UnknownError, form_of
from autoamp.passes.kernels.match import Chain, is_cast, sizes_of
from autoamp.passes.kernels.meaning import Meaning, meaning, row_sum, slope
from autoamp.passes.kernels.table import KERNELS, Kernel
from autoamp.passes.ops import base_name, bodies_of

TOLERANCE = 2.0**-22
"""The largest difference, as a share of the largest number of a row, or of the element:
two units in the last place of fp32, as much as a chain of a few fp32 ops is off.  The
constants of a chain are read to fp32's precision, and no results are nearer."""

LOST = 2.0**-40
"""The same, as a share of numbers that may have cancelled: where `1 + tanh(x)` does,
this share of float64's own digits is lost, and more than half of fp32's."""

_SCALES = (1e-6, 1e-4, 1e-2, 1.0, 1.0, 30.0, 0.0, 1e-310, 1e-40, 1e-30, 1e30)
"""Sizes of the rows that chains are tried on.  An epsilon shows in the small ones, and
also where it was left out."""

_COARSE = 2.0**-12
"""The same for numbers computed in fp32, by ops that add up a row in any order."""

_SHIFTS = (20.0, -20.0, 80.0, -80.0, 3e4, -3e4)
"""Means of rows that differ by a tenth of it: `mean(x * x) - mean(x)**2` then keeps
14 of float64's 16 digits."""

_ORDINARY = (1e-6, 40.0)
"""Where a chain has to give finite numbers, lest nothing be asked of a kernel."""

_ODD = (float("inf"), -float("inf"), float("nan"))


def elements() -> Tensor:
    """The numbers that functions of one element are tried on, in float64."""
    large = torch.logspace(-30, 4, 200, dtype=torch.float64, device="cpu")
    fine = torch.linspace(-12, 12, 2001, dtype=torch.float64, device="cpu")
    some = [0.0, -0.0, 1e-310, -1e-310, 1e-40, -1e-40, *_SHIFTS, *_ODD]
    odd = torch.tensor(some, dtype=torch.float64, device="cpu")
    return torch.cat([fine, large, -large, odd])


def rows(vectors: int, size: int, dims: int) -> tuple[Tensor, ...]:
    """Rows of all sizes, and vectors, from a generator of their own, in float64.

    The rows have as many dimensions as in the graph, but at least two, each of more
    than one element, so that a sum over a wrong dimension shows.
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(
            shape, generator=generator, dtype=torch.float64, device="cpu"
        )

    sizes = [*_SCALES, *(abs(shift) / 10 for shift in _SHIFTS), *[1.0] * len(_ODD)]
    scales = torch.tensor(sizes, dtype=torch.float64, device="cpu")
    data = drawn(len(sizes), *[2] * (dims - 2), size)
    data = data * scales.view(-1, *[1] * (data.dim() - 1))
    data[3] += 4.0  # rows whose mean is not zero
    for i, shift in enumerate(_SHIFTS, start=len(_SCALES)):
        data[i] += shift
    for i, odd in enumerate(_ODD, start=len(_SCALES) + len(_SHIFTS)):
        data[i, ..., 0] = odd
    return (data, *(drawn(size) for _ in range(vectors)))


def agree(
    found: Tensor,
    expected: Tensor,
    data: Tensor,
    size: int = 0,
    cancelled: Tensor | None = None,
) -> bool:
    """Whether a chain's numbers are a kernel's, element by element or row by row.

    Args:
        found, expected: the results of the chain and of the kernel.
        data: the tensor that both have read.
        size: the number of elements of a row; 0 for functions of each element.
        cancelled: numbers as large as those that may have cancelled; `data` by default,
            and none for rows.
    """
    if found.shape != expected.shape:
        return False
    # Where the chain overflows, a kernel that does not is no worse.
    asked, has_nan, sizes = found.isfinite(), data.isnan(), data.abs()
    allowed = TOLERANCE * torch.where(asked, expected.abs(), 0.0)
    if size:
        # One NaN in a row spoils its sum, and the other elements mean nothing.
        asked = asked & ~found.isnan().any(-1, True)
        allowed = allowed.amax(-1, keepdim=True)
        has_nan, sizes = has_nan.any(-1, True), sizes.amax(-1, keepdim=True)
    else:
        lost = data if cancelled is None else cancelled
        allowed = allowed + LOST * lost.abs().nan_to_num(0.0, 0.0)
    least, most = _ORDINARY
    is_ordinary = (sizes >= least) & (sizes <= most)
    if not (asked | ~is_ordinary).all():
        return False
    near = (found - expected).abs() <= allowed
    spread = found.isnan() & has_nan
    return bool((near | ~asked).all()) and bool((expected.isnan() | ~spread).all())


def is_as_true(
    found: Tensor, chain: Tensor, exact: Tensor, data: Tensor, size: int = 0
) -> bool:
    """Whether a kernel's numbers in fp32 are true wherever the chain's are.

    Args:
        found, chain: the results of the kernel and of the chain in fp32.
        exact: the chain's result in float64 on the same data.
        data, size: as for `agree`.
    """
    sizes = torch.where(exact.isfinite(), exact.abs(), 0.0)
    sizes = sizes.amax(-1, keepdim=True) if size else sizes.maximum(data.abs())
    allowed = _COARSE * sizes.nan_to_num(0.0, 0.0)
    is_true = (chain - exact).abs() <= allowed
    if size:  # zeros of a row that overflowed are near some of its elements
        is_true = is_true.all(-1, keepdim=True).expand_as(exact)
    return bool(((found - exact).abs() <= 2 * allowed)[is_true].all())


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
        # The proof holds for real numbers; overflow, cancellation and NaN are not among
        # them.
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
    # In fp32 as well: a kernel may compute the same function and lose its digits, as a
    # variance by `mean(x * x) - mean(x) ** 2` does.
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
    """The result of a chain, as a function of its inputs."""
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
            # Which vector is the weight, and which the bias, only the proof tells.
            for names in itertools.permutations(kernel.vectors, vectors):
                at = dict(zip(names, range(vectors), strict=True))
                places = at.get("weight"), at.get("bias")
                yield Recognised(kernel, *places, float(epsilon)), epsilon


def _epsilons(algebra: Algebra, data: Form) -> Iterator[Fraction]:
    """The numbers added, under the roots of a chain, to the mean of the squares."""
    if not algebra.size:
        return
    # An epsilon is the number beside the squares, whatever factor the root has.
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
        # A chain that names fp32 runs in float64 all the same when it is tried so.
        return inputs[0].dtype if written == HIGH_DTYPE else written

    for call in calls:
        args = [read(a) for a in call.args]
        if call.target is None:
            values.append(args[0])
        else:
            values.append(call.target(*args, **{k: read(v) for k, v in call.kwargs}))
    return values[-1]


_GRADIENT_SCALES = (1.0, 1e3)
"""Sizes of the gradients that a backward is tried on: one that is not linear shows."""

_WIDTH = 40
"""Elements of a row: a backward that mixes those of one row, or of several, shows."""


def functions_in(
    graph: fx.Graph,
) -> Iterator[tuple[Chain, Callable[[], Recognised | None]]]:
    """The custom Functions of one tensor, each with a function to find its kernel."""
    found: dict[str, Recognised | None] = {}

    def kernel(forward: fx.GraphModule, backward: fx.GraphModule) -> Recognised | None:
        text = f"{forward.code}\n{backward.code}"  # the layers of a network are alike
        if text not in found:
            found[text] = _function_recognised(forward, backward)
        return found[text]

    for node in graph.nodes:
        if _is_function_of_one_tensor(node):
            forward, backward = bodies_of(node)
            calls = sum(n.op.startswith("call") for n in forward.graph.nodes)
            (result,) = node.users
            chain = Chain((node, result), node.args[2], (), calls)
            yield chain, partial(kernel, forward, backward)


def _is_function_of_one_tensor(node: fx.Node) -> bool:
    if node.target is not compat.CUSTOM_FUNCTION or len(node.args) != 3:
        return False
    data, made = node.args[2], node.meta.get("val")
    if not (isinstance(data, fx.Node) and isinstance(made, tuple) and made):
        return False
    read = data.meta.get("val")
    if not (isinstance(read, Tensor) and isinstance(made[0], Tensor)):
        return False
    if not read.dtype == made[0].dtype == HIGH_DTYPE:
        return False
    read_back = [(u.target, *u.args[1:]) for u in node.users]
    one_result = read_back == [(operator.getitem, 0)]  # an older torch lists others too
    bodies = bodies_of(node)
    if len(bodies) != 2 or compat.under_custom_fwd(bodies[0]):
        return False  # the author has a say in the Function's precision
    return sizes_of(read) == sizes_of(made[0]) and one_result


def _function_recognised(
    forward: fx.GraphModule, backward: fx.GraphModule
) -> Recognised | None:
    try:
        found = _function_proved(forward, backward)
        is_kernel = found is not None and _function_is_tried(found, forward, backward)
    except (UnknownError, RuntimeError, TypeError, ValueError):
        return None  # the Function returns other values than a kernel's
    return Recognised(found) if found is not None and is_kernel else None


def _function_proved(
    forward: fx.GraphModule, backward: fx.GraphModule
) -> Kernel | None:
    """The kernel whose result a forward computes, and whose gradient a backward."""
    algebra = Algebra(0)
    data, gradient = algebra.letter("x"), algebra.letter("g")
    (result, *others), saved = _body_read(forward, algebra, [Meaning(data)])
    unread = [Meaning(algebra.number(0)) for _ in others]
    (back,) = _body_read(backward, algebra, [Meaning(gradient), *unread, *saved])
    for kernel in KERNELS:
        if not kernel.by_rows and result.form.is_equal(kernel.form(data)):
            # Memory-saving Functions write their backward by hand, and one that clips
            # or averages the gradient is no derivative.
            expected = gradient * slope(kernel.form(data), data)
            return kernel if back.form.is_equal(expected) else None
    return None


def _body_read(
    body: fx.GraphModule, algebra: Algebra, inputs: Sequence[Meaning]
) -> Any:
    """The result of a graph of Dynamo's, in algebra, as a function of its inputs."""
    values: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for node in body.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given, None)
        elif node.op == "output":
            return fx.map_arg(node.args[0], values.get)
        elif node.target is not compat.SET_GRAD:
            if not node.op.startswith("call") or node.op == "call_module":
                raise UnknownError
            name = getattr(node.target, "__name__", node.target)
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.get)
            values[node] = meaning(name, algebra, 0, args, kwargs)
    raise UnknownError


def _function_is_tried(
    kernel: Kernel, forward: fx.GraphModule, backward: fx.GraphModule
) -> bool:
    """Whether the numbers agree too, of tensors of two dimensions as in use."""
    with compat.on_real_numbers():
        data = elements()
        data = torch.cat([data, data[: -len(data) % _WIDTH]]).view(-1, _WIDTH)
        generator = torch.Generator("cpu").manual_seed(0)
        drawn = torch.empty_like(data).normal_(generator=generator)
        (result, *others), saved = forward(data)
        given = data.clone().requires_grad_()
        with torch.enable_grad():
            expected = kernel(given)
        if not agree(result, expected.detach(), data):
            return False
        for scale in _GRADIENT_SCALES:
            gradient = drawn * scale
            unread = [torch.zeros_like(other) for other in others]
            (found,) = backward(gradient, *unread, *saved)
            (slopes,) = torch.autograd.grad(expected, given, gradient, True)
            # Terms as large as the gradient times the data may have cancelled in the
            # backward.
            lost = gradient * (1 + data.abs())
            if not agree(found, slopes, data, cancelled=lost):
                return False
    return True
