"""Counts the calls of a region as the dispatcher sees them: casts, flops, bytes moved.

The counts are made in the same way for fp32, `torch.autocast` and rewritten graphs.
Casts inside a kernel that inductor has generated are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE, LOW_DTYPES, short_name
from autoamp.passes.check.saved import storage_key
from autoamp.passes.ops import HIDDEN_WRITES
from autoamp.tools.count_flops import flops_of
from autoamp.tools.count_traffic import NOTHING, moved, tensors_of

Phase = Literal["forward", "backward"]


class _Mode(compat.CountingDispatch):
    """A mode that notes each call of an ATen operator; Dynamo still captures in it."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, compat.OpOverload):
            return func(*args, **kwargs)  # a higher-order operator: its body comes here
        if not self.is_whole(func):
            # Under inference_mode composite operators arrive whole.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        out = func(*args, **kwargs)
        self.note(func, args, kwargs, out)
        return out

    def is_whole(self, func: compat.OpOverload) -> bool:
        """Whether an operator counts as one call, even if torch composes it."""
        return flops_of(func) is not None

    def note(self, func: compat.OpOverload, args: Any, kwargs: Any, out: Any) -> None:
        """Counts the call `func(*args, **kwargs)`, which has returned `out`."""
        raise NotImplementedError


def _phase() -> Phase:
    return "backward" if compat.inside_backward() else "forward"


# -- casts and flops -------------------------------------------------------------------


class Cast(NamedTuple):
    """A kind of cast, by phase, by source, and by direction."""

    phase: Phase
    source: Literal["weight", "value"]
    direction: Literal["down", "up"]


@dataclass
class Counts:
    """The casts and flops of one call.

    `refreshed` counts tensors that `copy_` or `_foreach_copy_` has written from a
    parameter into another float dtype: low copies of weights that are kept between
    calls.  `refreshes` counts the ops that did so: one multi-tensor copy refreshes
    many tensors.
    """

    casts: Counter[Cast] = field(default_factory=Counter)
    cast_bytes: int = 0
    refreshed: int = 0
    refreshes: int = 0
    flops: Counter[torch.dtype] = field(default_factory=Counter)

    def cast_count(self, **wanted: str) -> int:
        """The casts whose fields are as given, without refreshes of weight copies."""
        return sum(
            count
            for cast, count in self.casts.items()
            if wanted.items() <= cast._asdict().items()
        )

    @property
    def total_casts(self) -> int:
        """Casts of forward and backward; a multi-tensor refresh counts as one cast."""
        return self.casts.total() + self.refreshes

    @property
    def forward_casts(self) -> int:
        """Casts of the forward; a multi-tensor refresh counts as one cast."""
        return self.cast_count(phase="forward") + self.refreshes

    @property
    def low_flops(self) -> int:
        """Flops of matmul, convolution and attention run in fp16 or bf16."""
        return sum(n for dtype, n in self.flops.items() if dtype in LOW_DTYPES.values())

    @property
    def high_flops(self) -> int:
        """The other flops of matmul, convolution and attention."""
        return self.flops.total() - self.low_flops

    @property
    def low_share(self) -> float:
        """`low_flops` as a share of all flops, 0 to 1; 0.0 if there are no flops."""
        return self.low_flops / max(1, self.flops.total())


class CountingMode(_Mode):
    """Counts the casts and flops of a region in `counts`.

    Args:
        parameters: tensors whose casts, and casts of whose views, count as casts of
            weights.
    """

    def __init__(self, parameters: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.counts = Counts()
        self._parameters = {storage_key(p) for p in parameters}

    def note(self, func: compat.OpOverload, args: Any, kwargs: Any, out: Any) -> None:
        """Counts a call."""
        flops = flops_of(func)
        if flops is not None:
            floats = (
                t for t in tensors_of(args) if t.is_floating_point() or t.is_complex()
            )
            dtype = next((t.dtype for t in floats), HIGH_DTYPE)
            self.counts.flops[dtype] += flops(*args, **kwargs, out_val=out)
        name = func.overloadpacket.__name__
        if name in ("_to_copy", "convert_element_type"):
            self._cast(args[0], out)
        elif name in ("copy_", "copy"):
            self._copies([args[0]], [args[1]])
        elif name in ("_foreach_copy_", "_foreach_copy"):
            self._copies(args[0], args[1])

    def _copies(self, targets: Iterable[Tensor], sources: Iterable[Any]) -> None:
        before = self.counts.refreshed
        for target, source in zip(targets, sources, strict=True):
            if isinstance(source, Tensor):
                self._cast(source, target, is_copy=True)
        self.counts.refreshes += self.counts.refreshed > before

    def _cast(self, source: Tensor, target: Tensor, *, is_copy: bool = False) -> None:
        both_float = source.is_floating_point() and target.is_floating_point()
        if not both_float or source.dtype == target.dtype:
            return
        self.counts.cast_bytes += source.nbytes + target.nbytes
        of_weight = storage_key(source) in self._parameters
        if is_copy and of_weight:
            self.counts.refreshed += 1
            return
        cast = Cast(
            _phase(),
            "weight" if of_weight else "value",
            "down" if target.itemsize < source.itemsize else "up",
        )
        self.counts.casts[cast] += 1


def count_ops(fn: Callable[[], Any], parameters: Iterable[Tensor] = ()) -> Counts:
    """The casts and flops of `fn()`, including its backward passes; `fn` runs once."""
    mode = CountingMode(parameters)
    with mode:
        fn()
    return mode.counts


# -- bytes -----------------------------------------------------------------------------

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


class TrafficMode(_Mode):
    """Counts the bytes of a region in `traffic`, the same on every machine.

    They depend only on shapes and dtypes.  For a fused kernel (attention, a norm, gelu)
    only inputs and outputs count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic()

    def is_whole(self, func: compat.OpOverload) -> bool:
        """Whether an operator counts as one call: also one with a kernel here.

        A batch norm does not: it calls another operator, whose schema declares the
        writes to the statistics.
        """
        composed = f"aten::{func.overloadpacket.__name__}" in HIDDEN_WRITES
        return super().is_whole(func) or (not composed and compat.has_kernel(func))

    def note(self, func: compat.OpOverload, args: Any, kwargs: Any, out: Any) -> None:
        """Counts a call."""
        count = moved(func, args, kwargs, out)
        if count != NOTHING:
            line = _line(func.overloadpacket.__name__, (args, kwargs), out)
            self.traffic.calls[line] += 1
            self.traffic.read[line] += count.read
            self.traffic.written[line] += count.written


def count_traffic(fn: Callable[[], Any]) -> Traffic:
    """The bytes that `fn()` moves, including its backward passes; `fn` runs once."""
    mode = TrafficMode()
    with mode:
        fn()
    return mode.traffic


def is_cast(line: Line) -> bool:
    """Whether the calls of a line change a float dtype and do nothing else."""
    return line.op in _CASTS and " to " in line.dtypes and "int" not in line.dtypes


def _line(name: str, inputs: Any, out: Any) -> Line:
    if name in _CASTS and name != "_to_copy":  # a copy's first argument is its result
        out, inputs = inputs[0][:2]
    before, after = _dtypes(inputs), _dtypes(out)
    dtypes = after if before in (after, "") else f"{before} to {after}"
    return Line(_phase(), name, dtypes)


def _dtypes(tree: Any) -> str:
    floats = {_SHORT.get(t.dtype, "int") for t in tensors_of(tree)}
    return "+".join(sorted(floats - {"int"})) or "".join(floats)
