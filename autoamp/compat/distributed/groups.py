"""Ranks and their process groups: this rank, and the ranks that it reduces with."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Iterable
from typing import Any, cast

import torch

from autoamp.compat.tensors import modules_of


def own_rank() -> int | None:
    """The number of this process among several; None where it is the only one.

    torchrun tells it before the script has made a process group.
    """
    if are_several():
        return torch.distributed.get_rank()
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return int(os.environ.get("RANK", "0")) if several else None


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
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return []
    meshes, flat = {}, False
    for p in params:
        mesh = getattr(p, "device_mesh", None)
        if mesh is not None:
            meshes[id(mesh)] = mesh
        flat = flat or getattr(p, "_fsdp_flattened", False)
    groups = [g for mesh in meshes.values() for g in mesh.get_all_groups()]
    return [*groups, distributed.group.WORLD] if flat else groups


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


def is_distributed_type(kind: type) -> bool:
    """Whether a type is that of DTensors."""
    return issubclass(kind, torch.Tensor) and hasattr(kind, "device_mesh")


def begin_fake_group(rank: int, size: int) -> bool:
    """Makes this process rank `rank` of `size` that do not exist; False if it cannot.

    Collectives of the group do nothing, and give tensors of the right shape.
    """
    try:
        # The import registers the backend.
        made = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    except ImportError:
        return False
    kind = getattr(made, "FakeStore", torch.distributed.HashStore)  # type: ignore[attr-defined]
    torch.distributed.init_process_group(
        "fake", store=kind(), rank=rank, world_size=size
    )
    return True
