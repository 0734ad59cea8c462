"""Tells which kernel a chain computes: its form is a row's of the table.

The calls of a chain are written in a normal form (`normal_forms.py`), and so is each
way in which libraries write a kernel (`table.py`): equal forms are the same calls, but
for the order of factors and terms.  The epsilon of a norm is a number that the chain
adds, and the kernel is given that number.

Libraries write activations as custom autograd Functions to keep less for the backward
(BLOOM's GELU, memory-saving Swish and Mish).  Dynamo captures such a Function as one
call with two graphs.  The forward has to be a kernel, and the backward the gradient
times the kernel's derivative, as libraries write it: a backward that normalises, limits
or averages the gradient is another function.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from torch import Tensor, fx

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE
from autoamp.passes.kernels.match import Chain, is_cast, name_of, sizes_of
from autoamp.passes.kernels.normal_forms import Form, form_of, letter
from autoamp.passes.kernels.table import KERNELS, Kernel
from autoamp.passes.ops import bodies_of


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


def recognised(chain: Chain) -> Recognised | None:
    """The kernel that computes the same as `chain`, if there is one."""
    read = (chain.data, *chain.vectors)
    values: dict[fx.Node, Any] = {node: letter(i) for i, node in enumerate(read)}
    data = chain.data.meta["val"]
    added: set[Any] = {0.0}
    try:
        for node in chain.nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            name = name_of(node).removeprefix("aten::")
            # A cast from fp32 to fp32 changes nothing.
            is_same = is_cast(node)
            values[node] = (
                args[0] if is_same else form_of(name, data.dim(), args, kwargs)
            )
            added.update(args if name == "add" else ())
    except (KeyError, TypeError, ArithmeticError):
        return None
    for number in added:
        if isinstance(number, int | float) and number >= 0:
            rows = _rows(len(chain.vectors), float(number))
            found = rows.get(values[chain.result].key)
            # The sizes that a norm is given are numbers.
            if found and (not found.kernel.takes or isinstance(data.shape[-1], int)):
                return found
    return None


@lru_cache(maxsize=64)
def _rows(vectors: int, epsilon: float) -> Mapping[Hashable, Recognised]:
    """The forms of all kernels of the data 0 and of the vectors 1 and 2."""
    found: dict[Hashable, Recognised] = {}
    for kernel in KERNELS:
        if vectors > len(kernel.vectors):
            continue
        # Which vector is the weight, and which the bias, the form tells.
        for names in itertools.permutations(kernel.vectors, vectors):
            at = dict(zip(names, range(vectors), strict=True))
            small = [epsilon] if "epsilon" in kernel.takes else []
            row = Recognised(kernel, at.get("weight"), at.get("bias"), *small)
            for spelling in kernel.spellings:
                form = spelling(letter(0), *small)
                form = form * letter(1 + at["weight"]) if "weight" in at else form
                form = form + letter(1 + at["bias"]) if "bias" in at else form
                found[form.key] = row
    return found


def functions_in(
    graph: fx.Graph,
) -> Iterator[tuple[Chain, Callable[[], Recognised | None]]]:
    """The custom Functions of one tensor, each with a function to find its kernel."""
    for node in graph.nodes:
        if _is_function_of_one_tensor(node):
            forward, backward = bodies_of(node)
            calls = sum(n.op.startswith("call") for n in forward.graph.nodes)
            (result,) = node.users
            chain = Chain((node, result), node.args[2], (), calls)
            yield chain, partial(function_recognised, forward, backward)


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


def function_recognised(
    forward: fx.GraphModule, backward: fx.GraphModule
) -> Recognised | None:
    """The kernel whose result a forward computes, and whose gradient a backward."""
    data, gradient = letter(0), letter("gradient")
    try:
        (result, *others), saved = _body_read(forward, [data])
        (back,) = _body_read(backward, [gradient, *[None] * len(others), *saved])
        found = _rows(0, 0.0).get(result.key)
        if found is None or found.kernel.slope is None:
            return None
        is_slope = back.key == (gradient * found.kernel.slope(data)).key
    except (AttributeError, TypeError, ValueError, ArithmeticError):
        return None  # the Function returns other values than a kernel's
    return found if is_slope else None


def _body_read(body: fx.GraphModule, inputs: Sequence[Form | None]) -> Any:
    """The result of a graph of Dynamo's, as forms of its inputs."""
    values: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for node in body.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given, None)
        elif node.op == "output":
            return fx.map_arg(node.args[0], values.get)
        elif node.target is not compat.SET_GRAD:
            if not node.op.startswith("call") or node.op == "call_module":
                raise TypeError(node.op)
            name = getattr(node.target, "__name__", node.target)
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.get)
            values[node] = form_of(name, 0, args, kwargs)
    raise TypeError("a graph without a result")
