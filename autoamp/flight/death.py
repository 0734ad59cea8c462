"""What is saved when a training dies: everything that a replay of the step needs.

A death is a folder `deaths/step-00000123` of a rank's folder, whose files are complete
(the folder gets its name last):

* `death.json`, the object below;
* `state.safetensors`: the model's parameters and buffers as `model.NAME`, fp32 masters
  as `master.NAME`, the optimizers' state as `optimizer.INDEX.NAME.KEY`.  Values are
  those before the optimizer's step; buffers are those after the forward;
* `batch.safetensors`: the tensors of the calls' arguments, and `rng.CALL.torch`,
  `rng.CALL.cuda.INDEX`: the generators before each call (uint8);
* `caller.safetensors`: tensors in locals of the functions that called.

`death.json` has the fields of the ring's header (see `recorder.py`) and:

* `cause`: "loss" (a loss that is not finite) or "skips" (three skipped steps in a row);
  `step`: the number of the step, as in the ring; `died`: seconds since 1970;
* `loss`, if that is the cause: `{"value", "shape", "dtype", "history": [names of
  autograd nodes behind it]}`; `late`: how many steps later it was read, on a GPU, in
  which case the batch is the one of the later step;
* `skips`, if that is the cause: `{"why"}`;
* `calls`: the model's training calls of the step, in order, the last ones where they
  are large: `{"args", "kwargs": values (see `values.py`), "training": bool, "scale":
  the loss scale or None, "python_rng": `random.getstate()` in lists, "python_rng_of":
  "call" or "death"}`.  A call's index is `CALL` above.  Python's generator is as it was
  before the call; where not each step has a record, it is as it was at the death, which
  is the same unless the step draws from it;
* `caller`: the functions on the stack, innermost first: `{"function", "file", "line",
  "locals": {NAME: value}}`, with the locals that hold tensors;
* `optimizers`: `{"class", "groups": [{"params": [NAME], "options": {NAME: value}}],
  "state": {NAME: {KEY: value}}}`.  A parameter of another model is `other.INDEX`;
* `not_finite`: names of parameters, buffers and masters that hold an infinity or NaN;
* `state`: "saved", or why only the tensors of `not_finite` were saved;
* `left_out`: `{KEY: reason}` of tensors that safetensors cannot hold;
* `checkpoint`: None: autoamp does not know which file the script loaded or saved last.
"""

from __future__ import annotations

import os
import random
import re
import sysconfig
import time
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoamp import compat
from autoamp.flight import folder
from autoamp.flight.ring import encoded
from autoamp.flight.values import Packed, class_of, tensors_in
from autoamp.training.step.boundary import BOUNDARIES

LIMIT = "AUTOAMP_RECORD_LIMIT"
_USUAL_LIMIT = 2 << 30
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_MOST_FRAMES = 32
_MOST_LOCALS = 200

_NOBODYS = tuple(
    str(each) for each in (Path(torch.__file__).parent, Path(__file__).parents[1])
)
"""Folders of code whose locals are nobody's batch: torch and autoamp."""

_PYTHONS = sysconfig.get_paths()["stdlib"]


def frames_of(frame: types.FrameType | None) -> list[dict[str, Any]]:
    """The functions that have called, with those locals that hold tensors."""
    found: list[dict[str, Any]] = []
    for each in compat.frames_from(frame):
        file = each.f_code.co_filename
        if is_nobodys(file) or len(found) >= _MOST_FRAMES:
            continue
        items = [*each.f_locals.items()][:_MOST_LOCALS]
        kept = {k: v for k, v in items if _holds_tensors(v)}
        found.append(
            {
                "function": each.f_code.co_name,
                "file": file,
                "line": each.f_lineno,
                "locals": kept,
            }
        )
    return found


def is_nobodys(file: str) -> bool:
    """Whether a file is torch's, autoamp's or Python's own."""
    own = file.startswith(_PYTHONS) and "-packages" not in file
    return own or file.startswith(_NOBODYS)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, nn.Module | torch.optim.Optimizer):
        return False
    return next(tensors_in(value), None) is not None


def save(
    home: Path,
    model: nn.Module,
    facts: dict[str, Any],
    calls: Sequence[Any],
    frames: Iterable[dict[str, Any]],
) -> Path:
    """Saves a death; returns its folder.

    Args:
        facts: the fields of `death.json` that the recorder knows.
        calls: the `Call`s of the step.
        frames: what `frames_of` gave.

    Raises:
        OSError: the disk is full, say.
    """
    weights = _weights(model)
    names = {id(tensor): name for name, tensor in weights.items()}
    batch, state = Packed("t", names), Packed("s", names)
    caller = Packed("c", names, batch)
    told = {**facts, "died": round(time.time(), 3), "checkpoint": None}
    told["calls"] = [_call(batch, i, each) for i, each in enumerate(calls)]
    told["caller"] = [_frame(caller, each) for each in frames]
    told["optimizers"], masters, size = _optimizers(state, model, names)
    every = {f"model.{name}": t for name, t in weights.items()} | masters
    told["not_finite"] = [name for name, t in every.items() if not _is_finite(t)]
    size += sum(tensor.nbytes for tensor in every.values())
    limit = _limit(os.environ.get(LIMIT, ""))
    told["state"] = "saved"
    if size > limit:
        told["state"] = f"{size} bytes are above {LIMIT}={limit}"
        state.tensors, state.left_out = {}, {}
    for name, tensor in every.items():
        if size <= limit or name in told["not_finite"]:
            state.add(name, tensor)
    told["left_out"] = {**state.left_out, **batch.left_out, **caller.left_out}
    packed = zip(folder.TENSORS, (state, batch, caller), strict=True)
    with folder.new_death(home, facts["step"]) as (place, target):
        for name, each in packed:
            folder.write_tensors(place / f"{name}.safetensors", each.tensors)
        folder.write(place / folder.DEATH, encoded(told))
    return target


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a model by name; a tied one has its first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _call(batch: Packed, index: int, call: Any) -> dict[str, Any]:
    on_cpu, *on_gpus = call.drawn
    batch.add(f"rng.{index}.torch", on_cpu)
    for at, each in enumerate(on_gpus):
        batch.add(f"rng.{index}.cuda.{at}", each)
    return {
        "args": batch.pack(call.args),
        "kwargs": batch.pack(call.kwargs),
        "training": call.training,
        "scale": None if call.scale is None else float(call.scale),
        "python_rng": call.python or random.getstate(),
        "python_rng_of": "call" if call.python else "death",
    }


def _frame(caller: Packed, frame: dict[str, Any]) -> dict[str, Any]:
    found = {name: caller.pack(each) for name, each in frame["locals"].items()}
    return {**frame, "locals": found}


def _optimizers(
    state: Packed, model: nn.Module, names: dict[int, str]
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], int]:
    """The optimizers of a model as JSON, the masters by name, and the bytes of state.

    A state too large is not copied: its size tells the caller.
    """
    found: list[dict[str, Any]] = []
    masters: dict[str, torch.Tensor] = {}
    size = 0
    limit = _limit(os.environ.get(LIMIT, ""))
    for index, (optimizer, of) in enumerate(_optimizers_of(model)):
        known = {**names, **{id(m): names.get(id(p), "") for p, m in of.items()}}
        masters |= {
            f"master.{names[id(p)]}": m for p, m in of.items() if id(p) in names
        }
        params = [p for group in optimizer.param_groups for p in group["params"]]
        others = {id(p): f"other.{i}" for i, p in enumerate(params)}
        size += sum(t.nbytes for s in optimizer.state.values() for t in tensors_in(s))
        groups = [
            {
                "params": [known.get(id(p)) or others[id(p)] for p in group["params"]],
                "options": {
                    k: state.pack(v) for k, v in group.items() if k != "params"
                },
            }
            for group in optimizer.param_groups
        ]
        states = {}
        for param, values in optimizer.state.items() if size <= limit else ():
            name = known.get(id(param)) or others.get(id(param), "other")
            states[name] = {
                str(key): _state(state, f"optimizer.{index}.{name}.{key}", each)
                for key, each in values.items()
            }
        found.append({"class": class_of(optimizer), "groups": groups, "state": states})
    return found, masters, size


def _state(state: Packed, key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, torch.Tensor):
        return state.pack(value)
    state.add(key, value)
    return {"tensor": key, "requires_grad": False, "device": str(value.device)}


def _optimizers_of(
    model: nn.Module,
) -> list[tuple[torch.optim.Optimizer, dict[torch.Tensor, torch.Tensor]]]:
    """The optimizers that hold weights of a model, each with its masters."""
    ids = {id(p) for p in model.parameters()}
    known = [
        (b.optimizer, {} if b.masters is None else b.masters.of)
        for b in list(BOUNDARIES)
        if any(id(p) in ids for p in b.params)
    ]
    if known:
        return known
    every, _ = compat.optimizers_and_scalers()  # before the first step
    return [
        (each, {})
        for each in every
        if any(id(p) in ids for g in each.param_groups for p in g["params"])
    ]


def _is_finite(tensor: torch.Tensor) -> bool:
    largest = compat.largest_magnitude([tensor])
    return largest is None or bool(largest.isfinite())


def _limit(text: str) -> int:
    """The bytes that `AUTOAMP_RECORD_LIMIT` names: 500000000, 500M, 2G."""
    found = re.fullmatch(r"(\d{1,15})([KMG]?)B?", text.strip().upper())
    return int(found[1]) * _UNITS[found[2]] if found else _USUAL_LIMIT
