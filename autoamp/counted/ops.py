"""Counts the casts and flops that a call really runs, forward and backward.

The counts are made at the dispatcher, in the same way for fp32, `torch.autocast` and
rewritten graphs.  Casts inside a kernel that inductor has generated are not counted.
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
from autoamp.counted.flops import flops_of
from autoamp.dtypes import LOW_DTYPES


class Cast(NamedTuple):
    """A kind of cast, by phase, by source, and by direction."""

    phase: Literal["forward", "backward"]
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

    def cast_count(
        self,
        *,
        phase: str | None = None,
        source: str | None = None,
        direction: str | None = None,
    ) -> int:
        """The casts with these properties, without refreshes of weight copies."""
        wanted = (phase, source, direction)
        return sum(
            count
            for cast, count in self.casts.items()
            if all(w is None or w == c for w, c in zip(wanted, cast, strict=True))
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


class CountingMode(compat.CountingDispatch):
    """Counts the ops of a region in `counts`; Dynamo still captures in the region."""

    def __init__(self, parameters: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.counts = Counts()
        self._parameters = {storage_key(p) for p in parameters}

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
        flops = flops_of(func)
        if flops is None:
            # Under inference_mode composite operators arrive whole.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        out = func(*args, **kwargs)
        if flops is not None:
            dtype = _compute_dtype(args)
            self.counts.flops[dtype] += flops(*args, **kwargs, out_val=out)
        name = func.overloadpacket.__name__
        if name in ("_to_copy", "convert_element_type"):
            self._cast(args[0], out)
        elif name in ("copy_", "copy"):
            self._copies([args[0]], [args[1]])
        elif name in ("_foreach_copy_", "_foreach_copy"):
            self._copies(args[0], args[1])
        return out

    def _copies(self, targets: Iterable[Tensor], sources: Iterable[Any]) -> None:
        before = self.counts.refreshed
        for target, source in zip(targets, sources, strict=True):
            self._copy(target, source)
        self.counts.refreshes += self.counts.refreshed > before

    def _copy(self, target: Tensor, source: Any) -> None:
        if not isinstance(source, Tensor) or not _changes_float_dtype(source, target):
            return
        if storage_key(source) in self._parameters:
            self.counts.refreshed += 1
            self.counts.cast_bytes += source.nbytes + target.nbytes
        else:
            self._cast(source, target)

    def _cast(self, source: Tensor, target: Tensor) -> None:
        if not _changes_float_dtype(source, target):
            return
        in_backward = compat.inside_backward()
        cast = Cast(
            "backward" if in_backward else "forward",
            "weight" if storage_key(source) in self._parameters else "value",
            "down" if target.itemsize < source.itemsize else "up",
        )
        self.counts.casts[cast] += 1
        self.counts.cast_bytes += source.nbytes + target.nbytes


def count_ops(fn: Callable[[], Any], parameters: Iterable[Tensor] = ()) -> Counts:
    """The casts and flops of `fn()`, including its backward passes.

    Args:
        fn: the call to count, which is made once.
        parameters: tensors whose casts, and casts of whose views, count as casts of
            weights.
    """
    mode = CountingMode(parameters)
    with mode:
        fn()
    return mode.counts


def storage_key(tensor: Tensor) -> tuple[str, int]:
    """A key of the storage of a living tensor; views of the storage share the key.

    The key is not the address, because a read of the address makes a copy-on-write
    storage real.
    """
    return str(tensor.device), compat.storage_id(tensor)


def _changes_float_dtype(source: Tensor, target: Tensor) -> bool:
    both_float = source.is_floating_point() and target.is_floating_point()
    return both_float and source.dtype != target.dtype


def _compute_dtype(args: tuple[Any, ...]) -> torch.dtype:
    for leaf in pytree.tree_leaves(args):
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            return leaf.dtype
    return torch.float32
