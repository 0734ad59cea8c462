"""Masters in an optimizer's saved state.

The state has each master three times, in one memory: by the parameter's name, for
people and for models in fp32; beside the parameter's state, for the tools of
`torch.distributed.checkpoint`, which keep nothing else, and save, shard and name such
an entry as they do a moment; and in the first parameter group, which torch carries
along uncast where the state is loaded before there are masters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from autoamp import compat
from autoamp.errors import CheckpointError
from autoamp.training.masters import KEY_BESIDE, KEY_CARRIED, Masters, in_dtype

KEY = "autoamp_masters"
"""The entry of an optimizer's saved state: the masters by parameter name."""


def save(masters: Masters, state: dict[str, Any]) -> None:
    """Puts the masters into the optimizer's `state`."""
    values = {p: value.detach() for p, value in masters.values().items()}
    state[KEY] = masters.named(values)
    for index, param in _saved_as(masters, state):
        if param in values:
            own = {KEY_BESIDE: values[param]}
            state["state"][index] = state["state"].get(index, {}) | own
    if values and state["param_groups"] and not compat.saved_by_tools():
        state["param_groups"][0][KEY_CARRIED] = _carried(masters, values)


def reduced(masters: Masters, protocol: Any) -> Any:
    """What a pickle or a deep copy of the optimizer is made of, as by `__reduce_ex__`.

    The masters are carried along until there are masters of the copy.
    """
    kind: Any = type(masters.optimizer)
    made = kind.__reduce_ex__(masters.optimizer, protocol)
    held = made[2] if len(made) > 2 and isinstance(made[2], dict) else {}
    if not (masters.params and held.get("param_groups") and "state" in held):
        return made
    first, *rest = held["param_groups"]
    carried = _carried(masters, masters.values())
    state = defaultdict(dict, held["state"])
    for param in masters.params:
        if param in state:
            state[param] = in_dtype(state[param], param.dtype)
    groups = [{**first, KEY_CARRIED: carried}, *rest]
    return (*made[:2], {**held, "param_groups": groups, "state": state}, *made[3:])


def _carried(
    masters: Masters, values: Mapping[torch.Tensor, torch.Tensor]
) -> dict[int, dict[Any, torch.Tensor]]:
    """The masters, with the state in fp32, by the parameters' positions.

    Of sharded parameters nothing: their state is saved by tools of their own.

    Args:
        values: the master of each parameter.
    """
    found = {}
    for index, param in enumerate(masters.in_order()):
        sharded = compat.is_distributed(param) or compat.is_flattened(param)
        if param not in values or sharded:
            continue
        state = masters.optimizer.state.get(param)
        found[index] = {KEY_BESIDE: values[param].detach()} | {
            key: value
            for key, value in (state.items() if isinstance(state, dict) else ())
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            if key != "step"
        }
    return found


def check(masters: Masters, saved: Any) -> None:
    """Raises CheckpointError where the masters in `saved` state do not fit."""
    given = saved.get(KEY)
    if given is None:
        return
    if not isinstance(given, dict):
        raise CheckpointError(
            f"{KEY!r} of the saved optimizer state is a {type(given).__name__}, not a "
            "dictionary of tensors by parameter name"
        )
    masters.settle()
    masters.refresh()
    named = masters.named({p: p for p in masters.params})
    problems = []
    # Where no name is known, another wrapper may have had the model.
    other = given.keys().isdisjoint(named) and _beside(masters, saved) is not None
    if given.keys() != named.keys() and not other:
        problems += [f"missing {name}" for name in named if name not in given]
        problems += [f"extra {name}" for name in given if name not in named]
    for name, value in given.items():
        if not _is_dense_float(value):
            problems.append(f"{name} is no dense float tensor")
        elif name in named and value.shape != named[name].shape:
            shapes = tuple(value.shape), tuple(named[name].shape)
            problems.append(f"{name} is {shapes[0]}, here it is {shapes[1]}")
    if problems:
        raise CheckpointError(
            f"the fp32 masters in the saved optimizer state ({KEY!r}) do not fit: "
            f"{'; '.join(problems)}. Nothing was loaded. Load it into the optimizer of "
            "the model it was saved with"
        )


def load(masters: Masters, saved: Any) -> None:
    """Takes over the masters of `saved` state, and its optimizer state in fp32.

    Torch has just cast the optimizer state to the parameters' half dtype.
    """
    # The masters are whole until the next step: the weights that they are rounded to
    # may be loaded after them.
    masters.make_whole()
    given, named = saved.get(KEY), masters.named(masters.of)
    pairs = None
    if given is None or given.keys() != named.keys():
        pairs = _beside(masters, saved)
    elif given:
        pairs = [(named[name], value) for name, value in given.items()]
    with torch.no_grad():
        for master, value in pairs or ():
            master.data.copy_(value)
    for index, param in _saved_as(masters, saved):
        state, now = saved["state"].get(index), masters.optimizer.state.get(param)
        if param in masters.of and state is not None and now is not None:
            masters.optimizer.state[param] = _restored(now, state)


def _beside(
    masters: Masters, saved: Any
) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """Each master with the saved one at the parameter's position; None if they misfit.

    The names differ where a model is wrapped otherwise, or has other names by now:
    torch's own optimizers know their parameters by position alone.
    """
    of = {p: p for p in masters.params} | masters.of
    found = []
    if sum(len(g["params"]) for g in saved["param_groups"]) != len(masters.in_order()):
        return None
    for index, param in _saved_as(masters, saved):
        value = saved["state"].get(index, {}).get(KEY_BESIDE)
        if param in of and value is not None:
            if value.shape != param.shape:
                return None
            found.append((of[param], value))
    return found if len(found) == len(of) else None


def _saved_as(
    masters: Masters, saved: Mapping[str, Any]
) -> list[tuple[Any, torch.Tensor]]:
    """Each parameter with the index of its state in `saved`."""
    ids = [i for group in saved["param_groups"] for i in group["params"]]
    return [*zip(ids, masters.in_order(), strict=True)]


def _is_dense_float(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.layout == torch.strided
        and value.device.type != "meta"
    )


def _restored(now: Any, saved: Any, key: Any = None) -> Any:
    """State as it is `now`, its float tensors replaced by the `saved` ones in fp32."""
    if isinstance(now, dict) and isinstance(saved, dict):
        return {k: _restored(v, saved.get(k), k) for k, v in now.items()}
    if isinstance(now, (list, tuple)) and isinstance(saved, (list, tuple)):
        return type(now)(map(_restored, now, saved))
    if isinstance(saved, torch.Tensor) and saved.is_floating_point() and key != "step":
        return saved.to(now.device, torch.float32)
    return now


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
