"""DistributedDataParallel: its hooks, its buckets, and how it cuts compiled graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx

from autoamp.compat.tensors import modules_of

_mode: list[Any] = [True]


def active_ddp() -> Any:
    """The DistributedDataParallel whose forward is running; None without one."""
    return torch.nn.parallel.DistributedDataParallel._active_ddp_module


def is_joining(ddp: Any) -> bool:
    """Whether `ddp` is inside `join()`, where ranks that have no more inputs are done.

    Such a rank shadows the collectives of DDP and no others.
    """
    return bool(getattr(getattr(ddp, "_join_config", None), "enable", False))


def has_communication_hook(ddp: Any) -> bool:
    """Whether code besides a plain all-reduce makes the gradients that `ddp` gives."""
    return bool(ddp._comm_hooks or ddp._get_ddp_logging_data().get("comm_hook"))


def forget_feedback(ddp: Any) -> None:
    """Clears gradients that are not finite from a communication hook of `ddp`.

    PowerSGD adds the error of each step's compression to the next step's gradients,
    and begins with the last step's factors: after one overflow all of these would be
    NaN for ever.  The factors are equal on all ranks, and so is the decision.
    """
    for _, state in ddp._comm_hooks:
        errors = getattr(state, "error_dict", None)
        if not isinstance(errors, dict):
            continue
        for error in errors.values():
            if not error.isfinite().all():
                error.zero_()
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
    are reduced while others are yet to be computed (torch's own `DDPOptimizer`, which
    cannot be used as it is: it would cut the graph before our pass sees the graph).
    """
    from torch._dynamo.backends.distributed import DDPOptimizer

    inputs = gm.graph.find_nodes(op="placeholder")
    for node, value in zip(inputs, given, strict=True):
        node.meta["example_value"] = value
        node._dynamo_source = getattr(node, "_dynamo_source", None)
    more: Any = gm
    distributed: Any = torch.distributed
    more._param_name_to_source = getattr(gm, "_param_name_to_source", {})
    cap = ddp.bucket_bytes_cap
    first = min(cap, distributed._DEFAULT_FIRST_BUCKET_BYTES)
    return cast(
        Callable[..., Any], DDPOptimizer(cap, backend, first).compile_fn(gm, [*given])
    )
