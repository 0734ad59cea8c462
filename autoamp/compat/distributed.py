"""Ranks and their groups, DistributedDataParallel, and the shards of FSDP2."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import fx

from autoamp.compat.tensors import (
    children_here,
    modules_of,
    parameters_here,
    version_kept,
)


def has_ranks() -> bool:
    """Whether this process is a rank, perhaps the only one."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def are_several() -> bool:
    """Whether this process is one of several ranks."""
    return has_ranks() and torch.distributed.get_world_size() > 1


def shard_groups(params: Iterable[torch.Tensor]) -> list[Any]:
    """The process groups over which FSDP has sharded `params`; mostly none.

    The original parameters of FSDP1 tell no group, so all ranks are taken to be it.
    """
    if not has_ranks():
        return []
    meshes, flat = {}, False
    for p in params:
        mesh = getattr(p, "device_mesh", None)
        if mesh is not None:
            meshes[id(mesh)] = mesh
        flat = flat or is_flattened(p)
    groups = [g for mesh in meshes.values() for g in mesh.get_all_groups()]
    return [*groups, torch.distributed.group.WORLD] if flat else groups


def is_flattened(param: torch.Tensor) -> bool:
    """Whether FSDP1 has put a parameter's memory into that of a flat parameter."""
    return bool(getattr(param, "_fsdp_flattened", False))


def stage_groups(models: Iterable[torch.nn.Module]) -> list[Any]:
    """The groups of ranks that hold stages of pipelines, if a stage runs a model.

    The search looks at all objects of the process, which takes tens of milliseconds.
    """
    pipelining = sys.modules.get("torch.distributed.pipelining.stage")
    if pipelining is None:
        return []
    base = pipelining._PipelineStageBase
    wanted = set(map(id, models))
    stages: list[Any] = [o for o in gc.get_objects() if issubclass(type(o), base)]
    mine = [s for s in stages if not wanted.isdisjoint(map(id, modules_of(s.submod)))]
    return [stage.group or torch.distributed.group.WORLD for stage in mine]


def default_store() -> Any:
    """The store through which the ranks have met."""
    return torch.distributed.distributed_c10d._get_default_store()


def reached_on(group: Any, device: torch.device) -> torch.device:
    """`device`, or another one where collectives of `group` take no such tensors."""
    backends: str = torch.distributed.get_backend_config(group)
    named = [each.partition(":")[0] for each in backends.split(",")]
    return device if device.type in named else torch.device(named[0])


def is_distributed(value: Any) -> bool:
    """Whether a value is a DTensor, of which this rank holds a part or a copy."""
    if type(value) is torch.Tensor:  # each gradient of each step is asked
        return False
    return isinstance(value, torch.Tensor) and hasattr(value, "device_mesh")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's own memory of a DTensor, or `tensor` itself."""
    value: Any = tensor
    return cast(torch.Tensor, value.to_local()) if is_distributed(tensor) else tensor


_mode: list[Any] = [True]


def active_ddp() -> Any:
    """The DistributedDataParallel whose forward is running; None without one."""
    return torch.nn.parallel.DistributedDataParallel._active_ddp_module


def writes_buffers(ddp: Any) -> bool:
    """Whether `ddp` gives its model rank 0's buffers before each forward."""
    return ddp is not None and bool(getattr(ddp, "broadcast_buffers", True))


def is_joining(ddp: Any) -> bool:
    """Whether `ddp` is inside `join()`, where ranks that have no more inputs are done.

    Such a rank shadows the collectives of DDP and no others.
    """
    return bool(getattr(getattr(ddp, "_join_config", None), "enable", False))


def leaves_out(ddp: Any) -> bool:
    """Whether there are gradients in the model of `ddp` that it does not reduce."""
    return bool(getattr(ddp, "parameters_to_ignore", ()))


def has_communication_hook(ddp: Any) -> bool:
    """Whether code besides a plain all-reduce makes the gradients that `ddp` gives."""
    return bool(ddp._comm_hooks or ddp._get_ddp_logging_data().get("comm_hook"))


def forget_feedback(ddp: Any) -> None:
    """Clears numbers that are not finite from the state of PowerSGD in `ddp`."""
    for _, state in ddp._comm_hooks:
        errors = getattr(state, "error_dict", None)
        if not isinstance(errors, dict):
            continue
        # The error of each step's compression is added to the next step's gradients:
        # after one overflow they would be NaN for ever.
        for error in errors.values():
            if not error.isfinite().all():
                error.zero_()
        # A step begins with the last step's factors, which are equal on all ranks, so
        # that all ranks clear them or none does.
        factors = [getattr(state, f"{name}_memory_dict", {}) for name in "pq"]
        if any(not each.isfinite().all() for d in factors for each in d.values()):
            for each in factors:
                each.clear()


def reduced_by_ddp(model: torch.nn.Module) -> list[torch.Tensor]:
    """The parameters of `model` whose gradients DistributedDataParallel reduces.

    DistributedDataParallel reduces in buckets of the parameters' own dtype, and takes
    no gradients of another dtype.
    """
    ddp = torch.nn.parallel.DistributedDataParallel
    reducers = [m for m in modules_of(model) if isinstance(m, ddp)]
    return [p for reducer in reducers for p in reducer.parameters()]


_WRAPPERS = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)


def inside_wrappers(model: Any) -> Any:
    """The module that `DistributedDataParallel` or `DataParallel` calls, or `model`.

    The wrappers' own `forward` cannot be converted: Dynamo steps aside from it.
    """
    while isinstance(model, _WRAPPERS):
        model = model.module
    return model


_INSIDE = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}
"""Torch's wrappers of modules, each to the name of the module that it wraps."""


def own_names(
    model: torch.nn.Module, prefix: str = ""
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters in `model` by their names without those of torch's wrappers.

    A parameter in several places has several names.
    """
    kind = type(model)
    while kind.__module__.startswith("torch.") and kind.__name__ in _INSIDE:
        inner = children_here(model).get(_INSIDE[kind.__name__])
        if inner is None:
            break
        model, kind = inner, type(inner)
    for name, param in parameters_here(model).items():
        if param is not None:
            yield prefix + name, param
    for name, child in children_here(model).items():
        if child is not None:
            yield from own_names(child, f"{prefix}{name}.")


def saved_by_tools() -> bool:
    """Whether `torch.distributed.checkpoint` asks for the state that is saved now."""
    tools = "torch.distributed.checkpoint"
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(_DEEPEST if tools in sys.modules else 0):
        if frame is None:
            break
        if str(frame.f_globals.get("__name__")).startswith(tools):
            return True
        frame = frame.f_back
    return False


_DEEPEST = 8
"""How many frames are searched for the tools that save an optimizer's state."""


def without_buckets(backend: Any) -> Any:
    """The backend that `DDPOptimizer` hands pieces of a graph to, or `backend`."""
    return getattr(getattr(backend, "__self__", None), "backend_compile_fn", backend)


def note_ddp_mode(mode: Any) -> None:
    """Notes the user's own setting of `torch._dynamo.config.optimize_ddp`."""
    _mode[:] = [mode]


def splits_for_ddp() -> bool:
    """Whether the user leaves it to torch to cut compiled graphs at DDP's buckets."""
    return _mode[0] in (True, "ddp_optimizer")


def in_buckets(
    backend: Callable[..., Any], gm: fx.GraphModule, given: Sequence[Any], ddp: Any
) -> Callable[..., Any]:
    """`gm` compiled by `backend` in as many pieces as `ddp` has buckets of gradients.

    A compiled backward gives all gradients at its end.  In pieces, the first gradients
    are reduced while others are yet to be computed.
    """
    # Called here, on the graph that the passes have made: as Dynamo calls it,
    # `DDPOptimizer` would cut the graph before a pass sees it, with fp32 at each cut.
    from torch._dynamo.backends.distributed import DDPOptimizer

    inputs = gm.graph.find_nodes(op="placeholder")
    for node, value in zip(inputs, given, strict=True):
        node.meta["example_value"] = value
        node._dynamo_source = getattr(node, "_dynamo_source", None)
    more: Any = gm
    distributed: Any = torch.distributed
    more._param_name_to_source = getattr(gm, "_param_name_to_source", {})
    cap = ddp.bucket_bytes_cap
    # DDP's first bucket is small, so that the first reduction begins early.
    first = min(cap, distributed._DEFAULT_FIRST_BUCKET_BYTES)
    return cast(
        Callable[..., Any], DDPOptimizer(cap, backend, first).compile_fn(gm, [*given])
    )


_FSDP = "torch.distributed.fsdp"


def uses_fsdp() -> bool:
    """Whether FSDP has been imported, without which no model is sharded."""
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

    A dtype that the user gives is left alone.
    """
    return (
        # Freed after the forward, the whole parameter is read by the module's own
        # forward and backward alone.
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
            # A backward reads the values of its forward, low or wide.
            if not in_backward():
                self.reads_low = in_call()
            self.all_gather_outputs = [self.in_low if self.reads_low else self.in_wide]
            (data,) = kind.all_gather_inputs.__get__(self)
            return [data.to(low) if self.reads_low else data]

        def init_unsharded_param(self) -> None:
            (source,) = self.all_gather_outputs
            other = self.in_wide if source is self.in_low else self.in_low
            other.untyped_storage().resize_(other.numel() * other.itemsize)
            # The forward may have saved the whole parameter: its version stays.
            with torch.no_grad(), version_kept(other):
                other.copy_(source)

    (record.in_wide,) = record.all_gather_outputs
    record.in_low = torch.empty_like(record.in_wide, dtype=low)
    # Memory comes with the first gather; until then there is none to hold.
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
