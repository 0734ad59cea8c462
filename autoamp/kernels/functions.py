"""Finds custom autograd Functions that compute what torch has a kernel for.

Libraries write activations as custom Functions to keep less for the backward (BLOOM's
GELU, memory-saving Swish and Mish).  Dynamo captures such a Function as one call with
two graphs, its forward and its backward.  Both are run on the numbers that chains are
tried on: a kernel has to agree with the forward, and its derivative with the backward.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE
from autoamp.kernels.chains import Chain, sizes_of
from autoamp.kernels.recognise import Recognised, agree, elements
from autoamp.kernels.table import KERNELS
from autoamp.ops import bodies_of
from autoamp.rules import family


def functions_in(
    graph: fx.Graph,
) -> Iterator[tuple[Chain, Callable[[], Recognised | None]]]:
    """The custom Functions of one tensor, each with what tells the kernel for it."""
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
    smooth = len(bodies) == 2 and all(map(_is_smooth, bodies))
    return sizes_of(read) == sizes_of(made[0]) and one_result and smooth


def _is_smooth(body: fx.GraphModule) -> bool:
    """Whether a graph of Dynamo's calls nothing but smooth functions of elements."""
    names = {op.removeprefix("aten::") for op in family("in_chains")} | {"truediv"}
    for node in body.graph.nodes:
        if node.op.startswith("call") and node.target is not compat.SET_GRAD:
            name = getattr(node.target, "__name__", node.target)
            if node.op == "call_module" or name not in names:
                return False
    return True


def _recognised(forward: fx.GraphModule, backward: fx.GraphModule) -> Recognised | None:
    with compat.on_real_numbers():
        data = elements()
        try:
            (result, *others), saved = forward(data)
            unread = [torch.zeros_like(other) for other in others]
            (slope,) = backward(torch.ones_like(data), *unread, *saved)
        except (RuntimeError, TypeError, ValueError):
            return None  # the Function does not return what it is taken to return
        for kernel in KERNELS:
            if not kernel.by_rows and _is_kernel(kernel, data, result, slope):
                return Recognised(kernel)
    return None


def _is_kernel(kernel: Any, data: Tensor, result: Tensor, slope: Tensor) -> bool:
    given = data.clone().requires_grad_()
    with torch.enable_grad():
        expected = kernel(given)
        (expected_slope,) = torch.autograd.grad(expected.sum(), given)
    same = agree(result, expected.detach(), data)
    return same and agree(slope, expected_slope, data)
