"""The files of a snapshot: one folder, written whole or not at all.

`tensors.safetensors` holds, each once in host memory:

* `model.NAME`: the parameters and buffers of the model;
* `optimizer.INDEX.PATH`: the tensors of an optimizer's `state_dict()`;
* `args.PATH`, `kwargs.PATH`: the tensors among the arguments of the model's last call;
* `gradient.INDEX`: where three steps were skipped, the gradients that came in with the
  float results of that call, by the results' order;
* `rng.torch`, `rng.cuda.INDEX`: torch's generators before the call (uint8).

`snapshot.json` holds an object with these fields:

* `format` 1; `time` (seconds since 1970); `autoamp`, `torch`, `python`: the versions;
* `label` and `class` of the model; `in_eval`: the names of its modules in eval mode;
* `rank`, `world`: of this process, and how many there are;
* `cause`: "loss" (a loss that is not finite) or "skips" (three skipped steps in a row);
  `step`: the number of the step among all steps of the model's optimizers, from 1;
* `loss`: `{"value", "nodes": [the last autograd nodes behind it], "line": the line that
  called `backward`, "own": whether the model itself returned it}`, or null;
* `why`: why the last step was skipped, or "";
* `weights`, `optimizer_state`: "saved", or why not; `weights_of`: "before the step" or
  "after the step"; `not_finite`: the names of weights that hold an infinity or NaN;
* `precision`, `options`: of the conversion; `options_left_out`: the names of options
  that JSON cannot hold; `scale`: the loss scale at the call, or null;
* `args`, `kwargs`: as `packed` makes them; `rewritten`: whether a tensor among them was
  written to after the call began; `python_rng`: `random.getstate()` at the writing;
* `optimizers`: `{"class", "params": [NAME], "state": state_dict(), "line": the line
  that called `step`}` of each.
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autoamp import compat
from autoamp.errors import OptionError
from autoamp.messages import printable_line

FORMAT = 1
TEXT, TENSORS = "snapshot.json", "tensors.safetensors"


@dataclass(frozen=True)
class Snapshot:
    """The contents of one folder: `facts` of `snapshot.json`, and tensors by name."""

    path: Path
    facts: dict[str, Any]
    tensors: dict[str, Tensor]

    def beginning(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix`, by the rest of the name."""
        size = len(prefix)
        return {k[size:]: t for k, t in self.tensors.items() if k.startswith(prefix)}


@dataclass(frozen=True)
class Missing:
    """Stands for a value that JSON and safetensors cannot hold."""

    what: str


def checked(value: str | os.PathLike[str]) -> Path:
    """The folder `value` of `record=`, made if it is missing.

    Raises:
        OptionError: it cannot be written to, or safetensors is not installed.
    """
    shown = printable_line(os.fsdecode(value), 300)
    if find_spec("safetensors") is None:
        raise OptionError(
            "record= writes tensors with safetensors, which is missing: "
            "pip install 'autoamp[record]'"
        )
    try:
        path = Path(value).expanduser()  # a RuntimeError where there is no such home
        path.mkdir(parents=True, exist_ok=True)
        # Permission bits let root write everywhere, even in /proc.
        with tempfile.TemporaryFile(dir=path):
            return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise OptionError(
            f"record={shown!r}: {error}; give a folder that can be written"
        ) from None


def write(
    root: Path, name: str, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Path:
    """Writes a snapshot to the folder `root/name`, or `name-2` where there is one.

    Raises:
        OSError: the disk is full, say; nothing is left.
    """
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=root))
    try:
        # One copy of each: safetensors refuses memory that two tensors share.
        copies = {
            k: torch.empty(t.shape, dtype=t.dtype, device="cpu").copy_(t)
            for k, t in tensors.items()
        }
        _safetensors().save_file(copies, partial / TENSORS)
        (partial / TEXT).write_text(json.dumps(facts, allow_nan=False))
        partial.chmod(0o755)
        for number in itertools.count(1):
            target = root / (name if number == 1 else f"{name}-{number}")
            try:
                partial.rename(target)  # fails where the folder is there already
                return target
            except OSError:
                if not target.exists():
                    raise
        raise AssertionError
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def found_in(folder: str | os.PathLike[str]) -> list[Path]:
    """The snapshots in `folder`, which may be one itself; the newest comes first.

    Raises:
        OptionError: there is none.
    """
    top = Path(folder)
    shown = printable_line(os.fsdecode(folder), 300)
    if (top / TEXT).is_file():
        return [top]
    if not top.is_dir():
        raise OptionError(f"{shown} is no folder: give the folder of record=")
    found = [each.parent for each in top.glob(f"[!.]*/{TEXT}")]
    if not found:
        raise OptionError(
            f"{shown} holds no snapshot: record= writes one at the first loss, or the "
            "third step in a row, that is not finite"
        )
    return sorted(found, key=lambda each: (each / TEXT).stat().st_mtime, reverse=True)


def read(path: Path) -> Snapshot:
    """The snapshot in the folder `path`.

    Raises:
        OptionError: a file is damaged, or another version has written it.
    """
    where = printable_line(str(path), 300)
    try:
        facts = json.loads((path / TEXT).read_text())
        written = facts["format"]
        tensors = dict(_safetensors().load_file(path / TENSORS))
    except Exception as error:  # noqa: BLE001 (safetensors has errors of its own)
        what = printable_line(f"{type(error).__name__}: {error}", 200)
        raise OptionError(f"the snapshot {where} cannot be read ({what})") from None
    if written != FORMAT:
        raise OptionError(
            f"the snapshot {where} has format {written!r}, and this autoamp reads "
            f"{FORMAT}: use the autoamp that wrote it"
        )
    return Snapshot(path, facts, tensors)


def _safetensors() -> Any:
    return importlib.import_module("safetensors.torch")


# -- values as JSON beside named tensors -----------------------------------------------


def packed(value: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON; its tensors are added to `tensors` by names that begin `key`.

    None, a bool, an int, a text and a list stand for themselves; every other value is
    an object whose one key, or first key, names the kind of value.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Tensor) and can_be_saved(value):
        tensors[key] = value.detach()
        device, grad = value.device.type, value.requires_grad
        return {"tensor": key, "device": device, "requires_grad": grad}
    if type(value) in (list, tuple):
        parts = [packed(v, f"{key}.{i}", tensors) for i, v in enumerate(value)]
        return parts if type(value) is list else {"tuple": parts}
    if isinstance(value, dict):
        pairs = value.items()
        if all(isinstance(k, str | int) for k in value):
            return {"dict": [[k, packed(v, f"{key}.{k}", tensors)] for k, v in pairs]}
    kind = type(value)
    return {"missing": f"{kind.__module__}.{kind.__qualname__}"}


def can_be_saved(tensor: Tensor) -> bool:
    """Whether safetensors can hold a tensor; a shard is not the whole of it."""
    strided = tensor.layout is torch.strided and not tensor.is_complex()
    return strided and not tensor.is_meta and compat.local_part(tensor) is tensor


def unpacked(told: Any, tensors: Mapping[str, Tensor], home: torch.device) -> Any:
    """The value that `packed` was given, with a `Missing` for what it cannot hold.

    Args:
        home: the device of tensors that were not on a CPU.
    """
    if isinstance(told, list):
        return [unpacked(each, tensors, home) for each in told]
    if not isinstance(told, dict):
        return told
    kind = next(iter(told))
    value = told[kind]
    if kind == "tensor":
        on_cpu = told["device"] == "cpu"
        found = tensors[value].to("cpu" if on_cpu else home, copy=True)
        return found.requires_grad_(told["requires_grad"])
    if kind == "tuple":
        return tuple(unpacked(each, tensors, home) for each in value)
    if kind == "dict":
        return {k: unpacked(each, tensors, home) for k, each in value}
    if kind == "missing":
        return Missing(value)
    return float(value) if kind == "float" else getattr(torch, value)
