"""FSDP2: the parameters that it shards, and the dtype that it gathers them in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from autoamp.compat.tensors import modules_of, version_kept

_FSDP = "torch.distributed.fsdp"


def uses_fsdp() -> bool:
    """Whether anybody has imported FSDP, without which no model is sharded."""
    return _FSDP in sys.modules


def sharded_parameters(model: torch.nn.Module) -> list[tuple[Any, Any]]:
    """FSDP2's groups and records of the parameters of `model`, one pair each.

    A record gives one parameter its two faces: the shard that an optimizer steps, and
    the whole that a graph reads.  The order is the same on all ranks.
    """
    kind = getattr(sys.modules.get(_FSDP), "FSDPModule", ())
    states = [m._get_fsdp_state() for m in modules_of(model) if isinstance(m, kind)]
    found = []
    for state in states:
        one = [getattr(state, "_fsdp_param_group", None)]  # torch 2.11
        for group in getattr(state, "_fsdp_param_groups", one):
            found += [(group, each) for each in (group.fsdp_params if group else ())]
    return found


def whole_parameter(record: Any) -> torch.Tensor | None:
    """The whole parameter of a record, ever the same tensor; None before it is made."""
    return getattr(record, "_unsharded_param", None)


def may_gather_low(group: Any, record: Any) -> bool:
    """Whether `gather_low` may be called now for a parameter that is gathered wide.

    The whole parameter must be freed after the forward, so that nobody but the module's
    own forward and backward reads it.  A dtype that the user gives is left alone.
    """
    return (
        bool(group._reshard_after_forward)
        and not group._use_post_forward_mesh
        and group._all_gather_result is None
        and record.sharded_state.name == "SHARDED"
        and record.param_dtype is None
        and record.orig_dtype == torch.float32
        and not record.is_dtensor
        and not hasattr(record._sharded_local_tensor, "fsdp_pre_all_gather")
        and len(record.all_gather_outputs) == 1
        and not record.all_gather_outputs[0].is_inference()
        and not record._unsharded_inner_tensors
    )


def gather_low(
    record: Any,
    low: torch.dtype,
    in_call: Callable[[], bool],
    in_backward: Callable[[], bool],
) -> None:
    """Has the shards of a parameter gathered in `low`, and widened where they are.

    The whole parameter keeps its dtype and its memory, and holds rounded numbers.  The
    low numbers beside it are freed and made anew together with it.

    Args:
        in_call: whether a converted model runs forward, which reads no other numbers.
            Elsewhere, as in the user's `FSDPModule.unshard()`, fp32 is gathered.
        in_backward: whether a backward runs, which reads the values of its forward.
    """
    kind = type(record)

    class LowGathered(kind):  # type: ignore[misc, valid-type]
        """The record of a parameter whose shards are gathered in a low dtype."""

        @property
        def all_gather_inputs(self) -> list[torch.Tensor]:
            if not in_backward():
                self.reads_low = in_call()
            self.all_gather_outputs = [self.in_low if self.reads_low else self.in_wide]
            (data,) = kind.all_gather_inputs.__get__(self)
            return [data.to(low) if self.reads_low else data]

        def init_unsharded_param(self) -> None:
            (source,) = self.all_gather_outputs
            other = self.in_wide if source is self.in_low else self.in_low
            other.untyped_storage().resize_(other.numel() * other.itemsize)
            with torch.no_grad(), version_kept(other):
                other.copy_(source)

    (record.in_wide,) = record.all_gather_outputs
    record.in_low = torch.empty_like(record.in_wide, dtype=low)
    record.in_low.untyped_storage().resize_(0)
    record._unsharded_inner_tensors = [record.in_wide, record.in_low]  # freed with it
    record.reads_low = False
    record.__class__ = LowGathered


def gather_wide(record: Any) -> None:
    """Undoes `gather_low`."""
    record.__class__ = type(record).__mro__[1]
    record.all_gather_outputs, record._unsharded_inner_tensors = [record.in_wide], []


def gathered(record: Any) -> torch.Tensor:
    """The whole parameter in the low dtype that `gather_low` was told of."""
    low: torch.Tensor = record.in_low
    return low.as_strided(record._orig_size, record._contiguous_orig_stride)
