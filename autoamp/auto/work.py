"""Counts the work of a call: the rows that weights multiply, and the modules called."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

Call = Callable[..., Any]

_READ = 10
"""How many rows take as long to multiply by a weight as the weight takes to be read."""


class Work:
    """The work of one call: its `flops`, and the modules that it has called."""

    def __init__(self) -> None:
        self.flops = self.calls = 0
        self._called: set[int] = set()

    def note(self, module: nn.Module, result: Any) -> None:
        """Counts a module that has been called: each of its weights, times its rows."""
        self.calls += 1
        self._called.add(id(module))
        while isinstance(result, tuple | list) and result:
            result = result[0]
        if not isinstance(result, torch.Tensor) or not result.dim():
            return
        size = result.numel()
        if type(size) is not int:  # a size of `torch.export`, which must stay unasked
            return
        for weight in self._multiplied(module):
            rows, columns = weight.shape[0], weight.numel() // max(weight.shape[0], 1)
            if columns > 1 and rows > 1:  # else a bias, or positions
                # A recurrent layer has several rows of weights for one of its results.
                width = rows if rows in result.shape else result.shape[-1]
                self.flops += 2 * weight.numel() * (size // max(width, 1) + _READ)

    def _multiplied(self, module: nn.Module) -> Iterator[nn.Parameter]:
        """The matrices of a module, and of modules in it that were not called.

        A module may hand the weights of others to a kernel.  Tables are only read.
        """
        if isinstance(module, nn.Embedding | nn.EmbeddingBag | nn.LayerNorm):
            return
        # A module may be half made, and `parameters()` takes longer.
        for weight in (module.__dict__.get("_parameters") or {}).values():
            if weight is not None and not is_lazy(weight) and weight.dim() > 1:
                yield weight
        for child in (module.__dict__.get("_modules") or {}).values():
            if child is not None and id(child) not in self._called:
                yield from self._multiplied(child)


class _Inside(threading.local):
    """The call that this thread is in of a module that owns weights.

    Attributes:
        work: None outside any call; a `Work` where the call is counted; else False.
    """

    work: Work | bool | None = None


INSIDE = _Inside()


def opaque(original: Call, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A call in which no module is looked at."""
    INSIDE.work = False
    try:
        return original(module, *args, **kwargs)
    finally:
        INSIDE.work = None


def passed_on(original: Call, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A call inside a module's call, counted where that call is."""
    result = original(module, *args, **kwargs)
    work = INSIDE.work
    if isinstance(work, Work) and not isinstance(module, ParametrizationList):
        work.note(module, result)
    return result
