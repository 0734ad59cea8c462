"""Notes the calls of torch that plain Python code makes, outside of any graph."""

from __future__ import annotations

import linecache
import re
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.overflow.location import OUTSIDE, Location
from autoamp.overflow.trail import Step, Trail, floats_in, largest_in

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent.parent)


class Listening(TorchFunctionMode):
    """A region in which each call of a function of torch becomes a step of a trail."""

    def __init__(self, trail: Trail) -> None:
        super().__init__()
        self.trail = trail

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = [a for a in pytree.tree_leaves((args, kwargs)) if floats_in(a)]
        operands = [self._maker(value) for value in given]
        result = func(*args, **(kwargs or {}))
        # Some calls return no tensor, such as `tensor.backward()`.
        tensors = [t for t in pytree.tree_leaves(result) if floats_in(t)]
        if tensors and not any(t is value for t in tensors for value in given):
            location = Location(OUTSIDE, op=_name(func), source=line_outside())
            step = Step(
                None, largest_in(tensors), tensors[0].dtype, operands, location=location
            )
            self.trail.add(step, tensors)
            self.trail.claim(step, tensors)
        return result

    def _maker(self, value: torch.Tensor) -> Step:
        known = self.trail.maker(value)
        if known is not None:
            return known
        self.trail.begins(value)
        location = Location(OUTSIDE, name="a tensor of the loss function")
        step = Step(None, largest_in([value]), value.dtype, location=location)
        return self.trail.add(step, [value])


def outside_location(value: torch.Tensor) -> Location | None:
    """The Python line that made `value`, where autograd has recorded one."""
    calls = compat.written_in(value.grad_fn) if value.grad_fn is not None else []
    for call in reversed(calls):
        where, _, code = call.strip().partition("\n")
        file, _, rest = where.removeprefix('File "').partition('", line ')
        if rest and not file.startswith((_TORCH, _OURS)):
            line = rest.partition(",")[0]
            op = re.sub(r"Backward\d*$", "", value.grad_fn.name())  # type: ignore[union-attr]
            code = code.strip().partition("\n")[0]
            return Location(OUTSIDE, op=op, source=f"{file}:{line}: {code}")
    return None


def _name(func: Callable[..., Any]) -> str:
    """`torch.Tensor.pow`, or the bare name of a function that torch does not list."""
    return str(resolve_name(func) or getattr(func, "__name__", func))


def line_outside(frame: types.FrameType | None = None) -> str:
    """`train.py:12: loss = ...`: the innermost line outside of torch and autoamp.

    Args:
        frame: where to begin; by default the caller.
    """
    frame = frame or sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, _OURS)):
            code = linecache.getline(file, frame.f_lineno).strip()
            return f"{file}:{frame.f_lineno}: {code}"
        frame = frame.f_back
    return ""
