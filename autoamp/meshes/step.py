"""Runs one step of one rank on fake tensors, and notes what it does and sends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.counted.flops import flops_of
from autoamp.counted.ops import storage_key
from autoamp.dtypes import LOW_DTYPES, short_name
from autoamp.meshes.links import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from autoamp.place.devices import Device
from autoamp.planning.memory import Allocated, StepMemory, counted_step, own_part

_KINDS = {
    "all_reduce": ALL_REDUCE,
    "allreduce_": ALL_REDUCE,
    "all_gather_into_tensor": ALL_GATHER,
    "_allgather_base_": ALL_GATHER,
    "reduce_scatter_tensor": REDUCE_SCATTER,
    "_reduce_scatter_base_": REDUCE_SCATTER,
    "all_to_all_single": ALL_TO_ALL,
    "alltoall_base_": ALL_TO_ALL,
}
"""The collectives that are counted, by the name of torch's op."""

_FREE = ("empty", "new_empty", "lift_fresh", "detach", "alias", "_local_scalar")
_GATHERS = ("embedding", "index", "gather")


@dataclass(frozen=True, order=True)
class Sent:
    """A collective of a step.

    Attributes:
        phase: "forward" or "backward".
        kind: "all-reduce", ...
        dtype: the dtype of what is sent.
        size: bytes of the whole tensor: the larger of what goes in and comes out.
    """

    phase: str
    kind: str
    dtype: str
    size: int


@dataclass
class Observed:
    """What one forward and one backward do.

    Attributes:
        memory: bytes saved and of low copies.
        held: for each phase the bytes held after each op.
        nanoseconds: for each phase the predicted time of the ops.
        sent: each collective, in order.
        ops: each op with its shapes and dtypes, in order.
    """

    memory: StepMemory = field(default_factory=lambda: StepMemory(0, 0, 0))
    held: dict[str, list[int]] = field(
        default_factory=lambda: {"forward": [], "backward": []}
    )
    nanoseconds: dict[str, float] = field(
        default_factory=lambda: {"forward": 0.0, "backward": 0.0}
    )
    sent: list[Sent] = field(default_factory=list)
    ops: list[str] = field(default_factory=list)


def observed_step(
    forward: Callable[[], Tensor],
    region: contextlib.AbstractContextManager[Any],
    before: tuple[Iterable[Tensor], Iterable[Tensor], Iterable[Tensor]],
    device: Device,
) -> Observed:
    """What a forward and its backward do.

    Args:
        forward: gives the loss.
        region: the region, such as autocast's, that the forward runs in.
        before: weights, other tensors and low copies that exist before the step.
        device: the device whose figures give the times.
    """
    watch = _Watch(*before, device)
    watch.found.memory = counted_step(forward, region, watch, True)
    return watch.found


class _Watch(Allocated):
    """Follows memory, and notes the time of each op and each collective."""

    def __init__(
        self,
        weights: Iterable[Tensor],
        given: Iterable[Tensor],
        copies: Iterable[Tensor],
        device: Device,
    ) -> None:
        super().__init__(weights, given, copies)
        self.found = Observed()
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is NotImplemented or not isinstance(func, torch._ops.OpOverload):
            return result
        space, _, name = func.name().partition("::")
        name = name.partition(".")[0]
        if space == "prim" or (space.startswith("_c10d") and name not in _KINDS):
            return result
        phase = "backward" if compat.inside_backward() else "forward"
        found = self.found
        taken, made = _tensors((args, kwargs)), _tensors(result)
        if space in ("_c10d_functional", "c10d"):
            if name in _KINDS:
                found.sent.append(_sent(phase, _KINDS[name], taken, made))
        else:
            found.nanoseconds[phase] += _time(
                func, args, kwargs or {}, result, self._device
            )
        found.held[phase].append(self.now)
        found.ops.append(f"{phase} {space}::{name} {_shapes(taken)} -> {_shapes(made)}")
        return result


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(values) if isinstance(each, Tensor)]


def _shapes(tensors: Iterable[Tensor]) -> str:
    return " ".join(f"{short_name(t.dtype)}{[*t.shape]}" for t in tensors)


def _sent(phase: str, kind: str, taken: list[Tensor], made: list[Tensor]) -> Sent:
    each = max((*taken, *made), key=lambda tensor: tensor.nbytes)
    return Sent(phase, kind, short_name(each.dtype), each.nbytes)


def _time(func: Any, args: Any, kwargs: Any, result: Any, device: Device) -> float:
    """The predicted time of one op: a launch, and the longer of bytes and flops."""
    name = func.overloadpacket.__name__
    taken, made = _tensors((args, kwargs)), _tensors(result)
    if name.startswith(_FREE) or _is_view(func, taken, made):
        return 0.0
    written = sum(map(_bytes, made))
    is_lookup = name in _GATHERS
    read = written if is_lookup else sum(map(_bytes, taken))
    formula = flops_of(func)
    flops = formula(*args, **kwargs, out_val=result) if formula else 0
    if not flops:
        return device.launch_ns + (read + written) / device.bytes_per_ns
    low = any(each.dtype in LOW_DTYPES.values() for each in taken)
    kind = "conv" if "conv" in name else "matmul" if "mm" in name else "batched"
    rate = device.flops_per_ns(kind, float("inf"), low=low)
    return device.launch_ns + max((read + written) / device.bytes_per_ns, flops / rate)


def _is_view(func: Any, taken: list[Tensor], made: list[Tensor]) -> bool:
    if compat.schema(func).is_mutable:
        return False
    known = {storage_key(own_part(each)) for each in taken}
    return all(storage_key(own_part(each)) in known for each in made)


def _bytes(tensor: Tensor) -> int:
    """The bytes of a tensor in memory; an expanded tensor has those of its source."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
