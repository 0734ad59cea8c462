"""Saves and loads loss scales and fp32 masters with an optimizer's state.

The scales travel as one more entry of the first parameter group, because such an entry
survives in an optimizer that has no boundary: an optimizer whose state is loaded before
its first step, and a plain one, in a run without autoamp, which carries the entry along
unread.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from autoamp.errors import CheckpointError
from autoamp.training.master_state import without_masters
from autoamp.training.scale import (
    DynamicLossScale,
    LossScale,
    NoLossScale,
    StaticLossScale,
)
from autoamp.training.step.boundary import OptimizerBoundary

KEY = "autoamp"
_FIELDS = {"loss_scales"}


def carry(boundary: OptimizerBoundary) -> None:
    """Makes the optimizer's `state_dict` and `load_state_dict` carry our entries."""
    optimizer = boundary.optimizer
    loaded: list[list[Any]] = []
    whole: list[dict[str, Any]] = []

    def save(_: Optimizer, state: dict[str, Any]) -> None:
        scales = [s.state_dict() for s in boundary.scale_of_each] + boundary.pending
        if scales and state["param_groups"]:
            state["param_groups"][0][KEY] = {"loss_scales": scales}
        if boundary.masters is not None:
            boundary.masters.save(state)

    def before_load(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        loaded.clear()
        whole[:] = [state]
        if boundary.masters is not None:
            boundary.masters.check(state)
        groups = [dict(group) for group in state["param_groups"]]
        if groups and KEY in groups[0]:
            scales = _checked(groups[0].pop(KEY))
            for scale, saved in zip(boundary.scale_of_each, scales, strict=False):
                scale.check(saved)
            loaded.append(scales)
        return {**state, "param_groups": groups, "state": without_masters(state)}

    def after_load(_: Optimizer) -> None:
        for scales in loaded:
            boundary.load(scales)
        if boundary.masters is not None:
            boundary.masters.load(whole[0])
        loaded.clear()
        whole.clear()

    boundary.hooks = [
        optimizer.register_state_dict_post_hook(save),
        optimizer.register_load_state_dict_pre_hook(before_load),
        optimizer.register_load_state_dict_post_hook(after_load),
    ]
    # The state may have been loaded before the optimizer was met.
    for group in optimizer.param_groups[:1]:
        if KEY in group:
            boundary.load(_checked(group.pop(KEY)))


def check_loaded(optimizer: Optimizer) -> None:
    """Raises where `carry` could not use the state that the optimizer was loaded with.

    Raises:
        AutoampError: as for `load_state_dict`.
    """
    for group in optimizer.param_groups[:1]:
        if KEY in group:
            _checked(group[KEY])


def _checked(saved: Any) -> list[Any]:
    fields = set(saved) if isinstance(saved, dict) else set()
    if fields != _FIELDS or not isinstance(saved["loss_scales"], list):
        raise CheckpointError(
            f"the {KEY!r} entry of the saved optimizer state holds "
            f"{sorted(map(str, fields)) or type(saved).__name__}, not a list "
            "'loss_scales'; it was made by another version, or damaged. Remove "
            f"state['param_groups'][0][{KEY!r}] to begin with a new loss scale"
        )
    samples: dict[str, LossScale] = {
        type(s).__name__: s
        for s in (DynamicLossScale(), StaticLossScale(1.0), NoLossScale())
    }
    scales = list(saved["loss_scales"])
    for scale in scales:
        kind = scale.get("kind") if isinstance(scale, dict) else None
        samples.get(str(kind), samples["DynamicLossScale"]).check(scale)
    return scales
