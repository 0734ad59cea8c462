"""Tensors made of Python's numbers on the meta device, in Dynamo's captures.

`torch.tensor([], device="meta")` gives a real tensor under a fake mode, where it gives
a fake tensor on any other device (torch 2.13).  The next op then refuses the operands,
and Dynamo leaves the function to Python.  The key-value cache of transformers begins
so, at every layer of a model on the meta device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor


def tensor_on_meta(*args: Any, **kwargs: Any) -> torch.Tensor:
    """`torch.tensor` on the meta device, made on the CPU and moved from there."""
    return torch.tensor(*args, **{**kwargs, "device": "cpu"}).to("meta")


def as_tensor_on_meta(*args: Any, **kwargs: Any) -> torch.Tensor:
    """`torch.as_tensor` of numbers on the meta device, made on the CPU and moved."""
    data_and_dtype = args[:2]
    made = torch.as_tensor(*data_and_dtype, **{**kwargs, "device": "cpu"})
    return made.to("meta")


def new_tensor_on_meta(like: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`like.new_tensor` on the meta device, made on the CPU and moved from there."""
    return like.new_tensor(*args, **{**kwargs, "device": "cpu"}).to("meta")


_INSTEAD: dict[Any, Callable[..., torch.Tensor]] = {
    torch.tensor: tensor_on_meta,
    torch.as_tensor: as_tensor_on_meta,
    "new_tensor": new_tensor_on_meta,
}


@contextlib.contextmanager
def fakes_on_meta() -> Iterator[None]:
    """A region where these calls give fake tensors, and stand so in the graph.

    The region changes a function of Dynamo's for all threads, so it is for
    compilations, around each of which Dynamo holds its lock.
    """
    utils = torch._dynamo.utils
    run_node = utils.run_node

    def run(tracer: Any, node: fx.Node, args: Any, kwargs: Any, *more: Any) -> Any:
        result = run_node(tracer, node, args, kwargs, *more)
        instead = _INSTEAD.get(node.target)
        if instead is None or not _is_real_on_meta(result):
            return result
        node.op, node.target = "call_function", instead
        return run_node(tracer, node, args, kwargs, *more)

    with mock.patch.object(utils, "run_node", run):
        yield


def _is_real_on_meta(value: Any) -> bool:
    real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
    return real and bool(value.is_meta)
