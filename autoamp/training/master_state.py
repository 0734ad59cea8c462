"""The fp32 masters in saved optimizer state, and the dtypes of that state's floats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from autoamp.errors import CheckpointError

KEY = "autoamp_masters"
"""The entry of an optimizer's saved state: the masters by parameter name."""

KEY_BESIDE = "autoamp_master"
"""The entry of one parameter's saved state, for tools that keep no other entries."""


def check_masters(saved: Any, named: Mapping[str, torch.Tensor]) -> None:
    """Raises CheckpointError where masters `saved` do not fit the masters `named`."""
    if not isinstance(saved, dict):
        raise CheckpointError(
            f"{KEY!r} of the saved optimizer state is a {type(saved).__name__}, not a "
            "dictionary of tensors by parameter name"
        )
    problems = [f"missing {name}" for name in named if name not in saved]
    problems += [f"extra {name}" for name in saved if name not in named]
    for name, value in saved.items():
        if not _is_dense_float(value):
            problems.append(f"{name} is no dense float tensor")
        elif name in named and value.shape != named[name].shape:
            shapes = tuple(value.shape), tuple(named[name].shape)
            problems.append(f"{name} is {shapes[0]}, here it is {shapes[1]}")
    if problems:
        raise CheckpointError(
            f"the fp32 masters in the saved optimizer state ({KEY!r}) do not fit: "
            f"{'; '.join(problems)}. Nothing was loaded. Load it into the optimizer of "
            f"the model it was saved with, or remove state[{KEY!r}] to begin with the "
            "half-precision weights"
        )


def _is_dense_float(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.layout == torch.strided
        and value.device.type != "meta"
    )


def in_dtype(state: Any, dtype: torch.dtype, key: Any = None) -> Any:
    """An optimizer's state for one parameter with its float tensors in `dtype`.

    The count of steps keeps its dtype, as in `Optimizer.load_state_dict`.
    """
    if isinstance(state, dict):
        return {k: in_dtype(v, dtype, k) for k, v in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(in_dtype(v, dtype) for v in state)
    if isinstance(state, torch.Tensor) and state.is_floating_point() and key != "step":
        return state.to(dtype)
    return state


def restored(now: Any, saved: Any, key: Any = None) -> Any:
    """State as it is `now`, its float tensors replaced by the `saved` ones in fp32."""
    if isinstance(now, dict) and isinstance(saved, dict):
        return {k: restored(v, saved.get(k), k) for k, v in now.items()}
    if isinstance(now, (list, tuple)) and isinstance(saved, (list, tuple)):
        return type(now)(map(restored, now, saved))
    if isinstance(saved, torch.Tensor) and saved.is_floating_point() and key != "step":
        return saved.to(now.device, torch.float32)
    return now


def beside(
    saved: Mapping[str, Any], params: Iterable[torch.Tensor]
) -> list[tuple[Any, torch.Tensor]]:
    """Each parameter's state in `saved`, or None, with the parameter."""
    ids = [i for group in saved["param_groups"] for i in group["params"]]
    return [(saved["state"].get(i), p) for i, p in zip(ids, params, strict=True)]


def put_beside(
    saved: dict[str, Any],
    params: Iterable[torch.Tensor],
    masters: Mapping[torch.Tensor, torch.Tensor],
) -> None:
    """Puts each master beside its parameter's state in `saved`, too.

    The tools of `torch.distributed.checkpoint` keep nothing else: they save, shard and
    name such an entry as they do a moment.
    """
    ids = [i for group in saved["param_groups"] for i in group["params"]]
    for index, param in zip(ids, params, strict=True):
        if param in masters:
            own = {KEY_BESIDE: masters[param].detach()}
            saved["state"][index] = saved["state"].get(index, {}) | own


def take_over(
    saved: Mapping[str, Any],
    named: Mapping[str, torch.Tensor],
    params: Iterable[torch.Tensor],
    masters: Mapping[torch.Tensor, torch.Tensor],
) -> None:
    """Writes the masters in `saved` into `masters`: those by name, or those beside."""
    by_name = saved.get(KEY)
    with torch.no_grad():
        for name, value in (by_name or {}).items():
            named[name].data.copy_(value)
        for state, param in beside(saved, params) if by_name is None else ():
            if param in masters and state is not None and KEY_BESIDE in state:
                masters[param].data.copy_(state[KEY_BESIDE])


def without_masters(saved: Mapping[str, Any]) -> dict[Any, Any]:
    """The state of each parameter in `saved`, without the masters beside it."""
    found = {}
    for key, state in saved["state"].items():
        rest = state
        if isinstance(state, dict) and KEY_BESIDE in state:
            rest = {k: v for k, v in state.items() if k != KEY_BESIDE}
        if rest or not state:
            found[key] = rest
    return found
