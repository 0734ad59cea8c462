"""Counts the bytes that a region reads and writes: a rule for every ATen operator.

The general rule: an operator reads every element of its distinct input tensors and
writes every element of its outputs; a result that shares the storage of an input is a
view and costs nothing; a tensor written in place is read and written.  The tables below
hold the exceptions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE, LOW_DTYPES, short_name
from autoamp.passes.check.saved_bytes import storage_key
from autoamp.passes.ops import HIDDEN_WRITES
from autoamp.tools.count import DispatchMode, Phase, phase, tensors_of


class Moved(NamedTuple):
    """Bytes read and bytes written."""

    read: int
    written: int


NOTHING = Moved(0, 0)


def spanned(tensor: Any) -> int:
    """Bytes of the elements that a tensor really has: broadcast dimensions count 1."""
    if not isinstance(tensor, Tensor) or tensor.device.type == "meta":
        return 0
    if tensor.layout != torch.strided:
        return tensor.numel() * tensor.itemsize
    dimensions = zip(tensor.shape, tensor.stride(), strict=True)
    elements = math.prod(size for size, stride in dimensions if stride or not size)
    return elements * tensor.itemsize


def bytes_of(tree: Any) -> int:
    """Bytes of the distinct tensors of a pytree, each as `spanned` counts it."""
    return sum(map(spanned, _distinct(tensors_of(tree))))


@dataclass
class Call:
    """A call that has returned: its arguments by name, and the tensors it wrote.

    `targets` are the arguments that the schema says are written in place; `made` are
    the results that share no storage with any input.
    """

    name: str
    arguments: dict[str, Any]
    targets: list[Tensor]
    made: list[Tensor]

    @property
    def kind(self) -> str:
        """The name without the underscore of the in-place spelling."""
        return self.name.removesuffix("_")

    def argument(self, *names: str) -> Any:
        """The first argument given of those named, or None."""
        found = (self.arguments[n] for n in names if n in self.arguments)
        return next(found, None)

    def without(self, *names: str) -> int:
        """Bytes of all inputs except the named ones."""
        return bytes_of([v for n, v in self.arguments.items() if n not in names])

    @property
    def written(self) -> int:
        """Bytes of everything made or written in place."""
        return bytes_of([self.targets, self.made])


def moved(func: torch._ops.OpOverload, args: Any, kwargs: Any, out: Any) -> Moved:
    """Bytes that the call `func(*args, **kwargs)`, which returned `out`, moved."""
    call = _call(func, args, kwargs, out)
    if call.name in _MOVES_NOTHING or torch.Tag.inplace_view in func.tags:
        return NOTHING
    if not call.targets and not call.made:
        reads = call.name in _READS_ONLY
        return Moved(call.without(), 0) if reads else NOTHING
    if call.kind in _RULES:
        return _RULES[call.kind](call)
    outputs = [a.name for a in compat.schema(func).arguments if a.is_out]
    return Moved(call.without(*outputs, *_unread(call)), call.written)


def _call(func: torch._ops.OpOverload, args: Any, kwargs: Any, out: Any) -> Call:
    names = [a.name for a in compat.schema(func).arguments]
    arguments = dict(zip(names, args, strict=False)) | kwargs
    written = [
        arguments[a.name]
        for a in compat.schema(func).arguments
        if a.alias_info is not None and a.alias_info.is_write and a.name in arguments
    ]
    inputs = {_storage(t) for t in tensors_of(arguments)}
    made = [t for t in tensors_of(out) if _storage(t) not in inputs]
    return Call(func.overloadpacket.__name__, arguments, tensors_of(written), made)


def _storage(tensor: Tensor) -> Any:
    return storage_key(tensor) if tensor.layout == torch.strided else id(tensor)


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    found: dict[Any, Tensor] = {}
    for t in tensors:
        strided = t.layout == torch.strided
        view = (t.storage_offset(), t.shape, t.stride()) if strided else ()
        found.setdefault((_storage(t), t.dtype, *view), t)
    return list(found.values())


# -- operators that do not read all their inputs ---------------------------------------

_MOVES_NOTHING = {
    "_lazy_clone",  # copy-on-write: the memory is shared until it is written to
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_efficientzerotensor",
}
_READS_ONLY = {"equal", "_local_scalar_dense"}

_OVERWRITES = {
    *("copy", "copy_", "_foreach_copy", "_foreach_copy_", "_foreach_zero_"),
    *("fill", "fill_", "zero", "zero_", "normal_", "uniform_", "bernoulli_"),
    *("random_", "exponential_", "geometric_", "cauchy_", "log_normal_"),
}
"""Operators of which `self` is written and its old elements are not read."""

_SCALED_BY_BETA = {"addmm", "baddbmm", "addbmm", "addmv", "addr"}


def _unread(call: Call) -> tuple[str, ...]:
    unread = call.name in _OVERWRITES or call.name.endswith("_like")
    unread |= call.name.startswith("new_")
    unread |= call.kind in _SCALED_BY_BETA and call.argument("beta") == 0
    return ("self",) if unread else ()


# -- operators that read or write a part of a tensor -----------------------------------


def _gathered(call: Call) -> Moved:
    """Rows are read: as many bytes as the result has, and the indices."""
    return Moved(call.without("self", "weight") + call.written, call.written)


def _overlaid(call: Call) -> Moved:
    """A tensor is copied or zeroed, then a part of it is written again."""
    part = bytes_of(call.argument("src", "grad_output", "grad"))
    return Moved(call.without(), call.written + part)


def _summed_rows(call: Call) -> Moved:
    """A lookup's backward makes a table of zeros and adds gradients to its rows."""
    (table,) = call.made
    width = table.shape[-1] * table.itemsize
    rows = call.argument("indices").numel() * width
    return Moved(call.without() + rows, call.written + rows)


def _scattered(call: Call) -> Moved:
    """Elements of `self` are written, or added to; the functional call copies it."""
    target = call.argument("self")
    part = _elements(call) * target.itemsize
    adds = call.kind in _ADDS or bool(call.argument("accumulate", "reduce"))
    read = call.without("self") + part * adds
    if call.targets:
        return Moved(read, part)
    return Moved(read + spanned(target), call.written + part)


def _elements(call: Call) -> int:
    """Elements of `self` that a scatter or an indexed write touches."""
    target, index = call.argument("self"), call.argument("index")
    if index is not None and call.kind.startswith("scatter"):
        return int(index.numel())
    if index is not None:
        return int(index.numel() * target.numel() // target.shape[call.argument("dim")])
    return _indexed_elements(target, call.argument("indices"))


def _indexed_elements(target: Tensor, indices: Iterable[Tensor | None]) -> int:
    """The number of elements of `target[indices]`; a mask picks its true elements."""
    shapes, left, place = [], 1, 0
    for index in indices:
        if index is None:
            left *= target.shape[place]
            place += 1
        elif index.dtype in (torch.bool, torch.uint8):
            shapes.append(torch.Size([int(index.sum())]))
            place += index.dim()
        else:
            shapes.append(index.shape)
            place += 1
    picked = math.prod(torch.broadcast_shapes(*shapes))
    return int(picked * left * math.prod(target.shape[place:]))


def _picked_losses(call: Call) -> Moved:
    """`nll_loss` reads one element of `self` for each target."""
    picked = call.argument("target").numel() * call.argument("self").itemsize
    return Moved(call.without("self") + picked, call.written)


def _loss_gradient(call: Call) -> Moved:
    """`nll_loss`'s backward zeroes the gradient and writes one element a target."""
    (gradient,) = call.made
    part = call.argument("target").numel() * gradient.itemsize
    return Moved(call.without("self"), call.written + part)


_ADDS = {"scatter_add", "scatter_reduce", "index_add", "index_reduce"}

_RULES: dict[str, Callable[[Call], Moved]] = {
    **dict.fromkeys(("embedding", "index_select", "gather", "take"), _gathered),
    **dict.fromkeys(("index", "_unsafe_index"), _gathered),
    **dict.fromkeys(("slice_backward", "select_backward"), _overlaid),
    **dict.fromkeys(("slice_scatter", "select_scatter"), _overlaid),
    **dict.fromkeys(("diagonal_backward", "diagonal_scatter"), _overlaid),
    "embedding_dense_backward": _summed_rows,
    **dict.fromkeys(("index_put", "_index_put_impl", "_unsafe_index_put"), _scattered),
    **dict.fromkeys(("scatter", "index_copy", "index_fill", *_ADDS), _scattered),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _picked_losses),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), _loss_gradient),
}


# -- a region --------------------------------------------------------------------------

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


class TrafficMode(DispatchMode):
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
        return super().is_whole(func) or (not composed and _has_kernel(func))

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


def _has_kernel(op: torch._ops.OpOverload) -> bool:
    """Whether an operator is one kernel on a device here, though torch may compose it.

    The backward of SiLU is such an operator.
    """
    keys = ("CPU", "CUDA") if torch.cuda.is_available() else ("CPU",)
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has(op.name(), key) for key in keys)


def _line(name: str, inputs: Any, out: Any) -> Line:
    if name in _CASTS and name != "_to_copy":  # a copy's first argument is its result
        out, inputs = inputs[0][:2]
    before, after = _dtypes(inputs), _dtypes(out)
    dtypes = after if before in (after, "") else f"{before} to {after}"
    return Line(phase(), name, dtypes)


def _dtypes(tree: Any) -> str:
    floats = {_SHORT.get(t.dtype, "int") for t in tensors_of(tree)}
    return "+".join(sorted(floats - {"int"})) or "".join(floats)
