"""Bytes that the kernels of a call read and write, counted at the dispatcher.

The count depends only on shapes and dtypes, and so is the same on every machine.  For a
fused kernel (attention, a norm, gelu) only inputs and outputs count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from autoamp import compat
from autoamp.counted.flops import flops_of
from autoamp.counted.traffic_rules import NOTHING, moved, tensors_of
from autoamp.dtypes import HIGH_DTYPE, LOW_DTYPES, short_name
from autoamp.ops import HIDDEN_WRITES

Phase = Literal["forward", "backward"]

_SHORT = {d: short_name(d) for d in (HIGH_DTYPE, *LOW_DTYPES.values())}
_SHORT[torch.float64] = "fp64"
_CASTS = {"_to_copy", "copy_", "copy", "_foreach_copy_", "_foreach_copy"}


class Line(NamedTuple):
    """A group of calls that are counted together: same operator, dtypes and phase."""

    phase: Phase
    op: str
    dtypes: str


@dataclass
class Traffic:
    """The bytes that one call moved, by line; calls that move nothing are left out."""

    calls: Counter[Line] = field(default_factory=Counter)
    read: Counter[Line] = field(default_factory=Counter)
    written: Counter[Line] = field(default_factory=Counter)

    def bytes(self, phase: Phase | None = None) -> int:
        """The bytes read and written, of one phase or, by default, of both."""
        return sum(self.by_line(phase).values())

    def by_line(self, phase: Phase | None = None) -> Counter[Line]:
        """Bytes read and written of each line."""
        both = self.read + self.written
        return Counter({k: n for k, n in both.items() if phase in (None, k.phase)})


class TrafficMode(compat.CountingDispatch):
    """Counts the bytes of a region in `traffic`; Dynamo still captures under it."""

    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)  # a higher-order operator: its body comes here
        if flops_of(func) is None and not _has_kernel(func):
            # Under inference_mode composite operators arrive whole.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        out = func(*args, **kwargs)
        count = moved(func, args, kwargs, out)
        if count != NOTHING:
            line = _line(func.overloadpacket.__name__, (args, kwargs), out)
            self.traffic.calls[line] += 1
            self.traffic.read[line] += count.read
            self.traffic.written[line] += count.written
        return out


def _has_kernel(func: torch._ops.OpOverload) -> bool:
    """Whether a composite operator has one kernel here.

    A batch norm does not count: it calls another operator, whose schema declares the
    writes to the statistics.
    """
    composed = f"aten::{func.overloadpacket.__name__}" in HIDDEN_WRITES
    return not composed and compat.has_kernel(func)


def count_traffic(fn: Callable[[], Any]) -> Traffic:
    """The bytes that `fn()` moves, including its backward passes; `fn` runs once."""
    mode = TrafficMode()
    with mode:
        fn()
    return mode.traffic


def _line(name: str, inputs: Any, out: Any) -> Line:
    in_backward = compat.inside_backward()
    if name in _CASTS and name != "_to_copy":  # a copy's first argument is its result
        out, inputs = inputs[0][:2]
    before, after = _dtypes(inputs), _dtypes(out)
    dtypes = after if before in (after, "") else f"{before} to {after}"
    return Line("backward" if in_backward else "forward", name, dtypes)


def _dtypes(tree: Any) -> str:
    floats = {_SHORT.get(t.dtype, "int") for t in tensors_of(tree)}
    return "+".join(sorted(floats - {"int"})) or "".join(floats)


def is_cast(line: Line) -> bool:
    """Whether the calls of a line change a float dtype and do nothing else."""
    return line.op in _CASTS and " to " in line.dtypes and "int" not in line.dtypes
