"""Puts what was recorded into a live training: weights, random state, batch."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import random
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autoamp import compat
from autoamp.flight.values import parts_of
from autoamp.replay.recorded import (
    Call,
    Fields,
    Frame,
    Live,
    Recorded,
    Saved,
    Weight,
)
from autoamp.training.step.boundary import BOUNDARIES


@torch.no_grad()
def place_weights(model: nn.Module, recorded: Recorded) -> list[str]:
    """Writes weights, buffers and masters in place; says what could not be placed."""
    notes = []
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in recorded.weights.items():
        if name not in named or not _write(named[name], value):
            notes.append(f"{name} was not placed: it has another shape or dtype")
    if recorded.facts.get("state") != "saved":
        notes.append(
            "the weights were not saved, which is said in death.json: those of the "
            "script's first step are used"
        )
    of = {
        id(p): m for b in list(BOUNDARIES) if b.masters for p, m in b.masters.of.items()
    }
    for name, value in recorded.masters.items():
        master = of.get(id(named.get(name)))
        if master is not None:
            _write(master, value)
    return notes


def _write(target: Tensor, value: Tensor) -> bool:
    part = compat.local_part(target.detach())
    if part.shape != value.shape or part.dtype != value.dtype:
        return False
    part.copy_(value)
    return True


def place_generators(call: Call) -> list[str]:
    """Has the random generators draw what they drew in the recorded call."""
    try:
        if call.torch_rng is not None:
            torch.set_rng_state(call.torch_rng)
        if call.cuda_rng and len(call.cuda_rng) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(call.cuda_rng)
        if call.python_rng:
            version, numbers, last = call.python_rng
            random.setstate((version, tuple(numbers), last))
    except (RuntimeError, TypeError, ValueError) as error:
        return [f"the random generators were not placed: {error}"]
    return []


def arguments(call: Call, args: Any, kwargs: Any, model: nn.Module) -> Any:
    """The recorded arguments; parts that were not saved are the live ones."""
    home = next((p.device for p in model.parameters()), torch.device("cpu"))
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def made(told: Any, live: Any) -> Any:
        if isinstance(told, Saved):
            device = live.device if isinstance(live, Tensor) else home
            return told.tensor.to(device, copy=True).requires_grad_(told.requires_grad)
        if isinstance(told, Weight):
            return weights.get(told.name, live)
        if isinstance(told, Live):
            return live
        if isinstance(told, list | tuple):
            fits = isinstance(live, list | tuple) and len(live) == len(told)
            beside = live if fits else [None] * len(told)
            return type(told)(made(t, v) for t, v in zip(told, beside, strict=True))
        if isinstance(told, dict):
            beside = live if isinstance(live, Mapping) else {}
            return {k: made(t, beside.get(k)) for k, t in told.items()}
        if isinstance(told, Fields):
            parts = parts_of(live) or {}
            return _object(
                live, {k: made(t, parts.get(k)) for k, t in told.parts.items()}
            )
        return told

    return made(call.args, args), made(call.kwargs, kwargs)


def _object(live: Any, parts: dict[Any, Any]) -> Any:
    if dataclasses.is_dataclass(live) and not isinstance(live, type):
        found = copy.copy(live)
        for name, value in parts.items():
            object.__setattr__(found, name, value)
        return found
    if isinstance(live, tuple):
        return type(live)(*parts.values())
    try:
        found = copy.copy(live)
        for name, value in parts.items():
            found[name] = value
    except (TypeError, KeyError):
        return parts
    return found


@torch.no_grad()
def place_locals(frames: list[Frame], model: nn.Module, frame: Any) -> dict[int, str]:
    """Fills the tensors in the callers' locals; gives the names of those, by `id`."""
    ours = {id(t) for t in (*model.parameters(), *model.buffers())}
    names: dict[int, str] = {}
    waiting = [*frames]
    for each in compat.frames_from(frame):
        found = next((f for f in waiting if _is(f, each)), None)
        if found is None:
            continue
        waiting = waiting[waiting.index(found) + 1 :]
        for name, told in found.locals.items():
            values = each.f_locals
            if name in values and not _filled(told, values[name], ours):
                _bind(each, name, told.tensor.clone())
            if name in values:
                for path, tensor in tensors_by_path(each.f_locals[name], name):
                    names.setdefault(id(tensor), path)
    return names


def _is(recorded: Frame, live: types.FrameType) -> bool:
    code = live.f_code
    same = Path(code.co_filename).name == Path(recorded.file).name
    return same and code.co_name == recorded.function


def _filled(told: Any, live: Any, ours: set[int]) -> bool:
    """Writes over `live`; False where the variable needs another tensor."""
    if isinstance(told, Saved) and isinstance(live, Tensor):
        if live.grad_fn is not None or id(live) in ours:
            return True  # made by the script from what is placed already
        try:
            return _write(live, told.tensor)
        except RuntimeError:  # such as memory that several numbers share
            return False
    if isinstance(told, list | tuple) and isinstance(live, list | tuple):
        for mine, theirs in zip(told, live, strict=False):
            _filled(mine, theirs, ours)
    told = told.parts if isinstance(told, Fields) else told
    parts = parts_of(live)
    if isinstance(told, dict) and parts is not None:
        for key, value in told.items():
            _filled(value, parts.get(key), ours)
    return True


def tensors_by_path(
    value: Any, path: str, depth: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """The tensors in a value, each with how Python would write its place."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, list | tuple) and depth < 4 and len(value) <= 256:
        for at, each in enumerate(value):
            yield from tensors_by_path(each, f"{path}[{at}]", depth + 1)
    elif depth < 4 and (parts := parts_of(value)) is not None and len(parts) <= 256:
        for key, each in parts.items():
            yield from tensors_by_path(each, f"{path}[{key!r}]", depth + 1)


def _bind(frame: types.FrameType, name: str, value: Tensor) -> None:
    """Has a variable of a function that is running name another tensor."""
    variables = frame.f_locals  # each look at the attribute reads the frame anew
    variables[name] = value
    if sys.version_info < (3, 13) and variables is not frame.f_globals:
        write = ctypes.pythonapi.PyFrame_LocalsToFast
        write(ctypes.py_object(frame), ctypes.c_int(0))
