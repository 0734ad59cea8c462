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

from autoamp.compat.dynamo.frames import methods_modules
from autoamp.compat.tensors import modules_of, parameters_here


@contextlib.contextmanager
def wide_gradients_hidden(frame: Any) -> Iterator[None]:
    """A region in which these gradients of a frame's module are not on the parameters.

    At its end they are back, with any gradients that other threads have added since.
    """
    hidden: dict[int, tuple[Tensor, Tensor]] = {  # a tied parameter counts once
        id(parameter): (parameter, parameter.grad)
        for model in methods_modules(frame)
        for module in modules_of(model)  # the class may override `parameters()`
        for parameter in parameters_here(module).values()
        if parameter is not None
        and (parameter.is_leaf or parameter.retains_grad)  # torch warns of any other
        and parameter.grad is not None
        and parameter.grad.dtype != parameter.dtype
        and _can_be_put_back(parameter, parameter.grad)
    }
    for parameter, _ in hidden.values():
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in hidden.values():
            more = parameter.grad
            parameter.grad = gradient if more is None else gradient + more


def _can_be_put_back(parameter: Tensor, gradient: Tensor) -> bool:
    """Whether torch lets a gradient of this dtype be set; None allows any dtype."""
    return parameter.grad_dtype in (None, gradient.dtype)
