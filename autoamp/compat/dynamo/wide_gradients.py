"""Gradients wider than their parameters, in Dynamo's captures.

The gradient of a half-precision parameter that has an fp32 master is fp32.  Dynamo
refuses to trace a tensor whose gradient has another dtype ("dtype mismatch between
tensor and its gradient", torch 2.13).  A model would then be left to Python at a
capture between a backward and `zero_grad()`: of a second micro batch of another size,
or of a validation.  A graph reads no gradient of its parameters, so that it does not
matter to the capture whether there is one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from autoamp.compat.dynamo.frames import modules_of


@contextlib.contextmanager
def wide_gradients_hidden(frame: Any) -> Iterator[None]:
    """A region in which these gradients of a frame's module are not on the parameters.

    At its end they are back, with any gradients that other threads have added since.
    """
    hidden: list[tuple[Tensor, Tensor]] = [
        (parameter, parameter.grad)
        for module in modules_of(frame)
        for parameter in module.parameters()
        if parameter.grad is not None and parameter.grad.dtype != parameter.dtype
    ]
    for parameter, _ in hidden:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in hidden:
            more = parameter.grad
            parameter.grad = gradient if more is None else gradient + more
