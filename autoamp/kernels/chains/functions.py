"""Finds custom autograd Functions for which torch has a kernel.

Libraries write activations as custom Functions to keep less for the backward (BLOOM's
GELU, memory-saving Swish and Mish).  Dynamo captures such a Function as one call with
two graphs, its forward and its backward.  The forward has to be proved to be a kernel,
and the backward to be its derivative times the gradient: a backward that normalises,
limits or averages the gradient is another function.  Both are then tried on numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE
from autoamp.kernels.chains.chain import Chain
from autoamp.kernels.chains.recognise import Recognised
from autoamp.kernels.chains.trials import agree, elements
from autoamp.kernels.shared.calls import sizes_of
from autoamp.kernels.shared.proof.algebra import Algebra, UnknownError
from autoamp.kernels.shared.proof.elementary import slope
from autoamp.kernels.shared.proof.meaning import Meaning, meaning
from autoamp.kernels.table import KERNELS, Kernel
from autoamp.ops import bodies_of

_SCALES = (1.0, 1e3)
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
            found[text] = _recognised(forward, backward)
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


def _recognised(forward: fx.GraphModule, backward: fx.GraphModule) -> Recognised | None:
    try:
        found = _proved(forward, backward)
        is_kernel = found is not None and _is_tried(found, forward, backward)
    except (UnknownError, RuntimeError, TypeError, ValueError):
        return None  # the Function returns other values than a kernel's
    return Recognised(found) if found is not None and is_kernel else None


def _proved(forward: fx.GraphModule, backward: fx.GraphModule) -> Kernel | None:
    """The kernel whose result a forward computes, and whose gradient a backward."""
    algebra = Algebra(0)
    data, gradient = algebra.letter("x"), algebra.letter("g")
    (result, *others), saved = _read(forward, algebra, [Meaning(data)])
    unread = [Meaning(algebra.number(0)) for _ in others]
    (back,) = _read(backward, algebra, [Meaning(gradient), *unread, *saved])
    for kernel in KERNELS:
        if not kernel.by_rows and result.form.is_equal(kernel.form(data)):
            expected = gradient * slope(kernel.form(data), data)
            return kernel if back.form.is_equal(expected) else None
    return None


def _read(body: fx.GraphModule, algebra: Algebra, inputs: Sequence[Meaning]) -> Any:
    """What a graph of Dynamo's computes of its inputs, in algebra."""
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


def _is_tried(
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
        for scale in _SCALES:
            gradient = drawn * scale
            unread = [torch.zeros_like(other) for other in others]
            (found,) = backward(gradient, *unread, *saved)
            (slopes,) = torch.autograd.grad(expected, given, gradient, True)
            lost = gradient * (1 + data.abs())
            if not agree(found, slopes, data, cancelled=lost):
                return False
    return True
