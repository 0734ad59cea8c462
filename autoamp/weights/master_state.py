"""The fp32 masters in saved optimizer state, and the dtypes of that state's floats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autoamp.errors import CheckpointError

KEY = "autoamp_masters"
"""The entry of an optimizer's saved state: the masters by parameter name."""


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
