"""Counts the calls of a region as the dispatcher sees them: casts and flops.

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
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE, LOW_DTYPES
from autoamp.passes.check.saved_bytes import storage_key
from autoamp.tools.count_flops import flops_of

Phase = Literal["forward", "backward"]


class DispatchMode(compat.CountingDispatch):
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


def phase() -> Phase:
    """The phase that is running."""
    return "backward" if compat.inside_backward() else "forward"


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of a pytree, in its order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


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


class CountingMode(DispatchMode):
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
            phase(),
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
