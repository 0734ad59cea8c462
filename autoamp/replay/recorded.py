"""Reads a death of the flight recorder, all of it, before anything is run."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoamp.errors import OptionError
from autoamp.flight import folder, ring
from autoamp.options import OPTION_NAMES
from autoamp.printable import printable_line

Tensors = Mapping[str, Any]

OURS_TO_SET = frozenset({"record", "backend", "heal"})
"""Options that a replay chooses itself."""


_LITERALS = "([{'\"-.0123456789"
_WORD = re.compile(r"[^<>()]{1,500}")


class Live:
    """A value that was not saved: the one that is there at the replay stays."""


LIVE = Live()


@dataclass(frozen=True)
class Saved:
    """A tensor that was saved."""

    tensor: Any
    requires_grad: bool = False


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer of the model, by its name."""

    name: str


@dataclass(frozen=True)
class Fields:
    """The parts of an object whose class is not made again."""

    parts: dict[Any, Any]


@dataclass
class Frame:
    """A function that had called: its locals that held tensors."""

    function: str
    file: str
    line: int
    locals: dict[str, Any]


@dataclass
class Call:
    """One call of the model in the deadly step."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    training: bool
    scale: float | None
    python_rng: Any
    torch_rng: Any
    cuda_rng: list[Any]


@dataclass
class Optimizer:
    """An optimizer of the model.

    Attributes:
        of: the options of the group of each parameter, by the parameter's name.
        state: the state of each parameter, by its name.
    """

    kind: str
    of: dict[str, dict[str, Any]]
    state: dict[str, dict[str, Any]]


@dataclass
class Recorded:
    """One death.

    Attributes:
        path: the death's folder.
        rank, world, step, cause: as in `death.json`.
        facts: `death.json`.
        steps: the records of steps in the ring, those of the death's step and before.
        weights, masters: the tensors that were saved, by name.
    """

    path: Path
    rank: int
    world: int
    step: int
    cause: str
    facts: dict[str, Any]
    steps: list[dict[str, Any]]
    weights: dict[str, Any]
    masters: dict[str, Any]
    calls: list[Call]
    frames: list[Frame]
    optimizers: list[Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    unread_options: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The class name of the model."""
        return str(self.facts["label"])

    @property
    def died_of(self) -> str:
        """`the loss was inf`, or `three steps were skipped in a row`."""
        if self.cause == "loss":
            loss = self.facts.get("loss")
            value = loss.get("value") if isinstance(loss, dict) else "not finite"
            return f"the loss was {printable_line(str(value), 40)}"
        return "three steps in a row were skipped"

    @property
    def history(self) -> list[str]:
        """The names of the autograd nodes behind the loss."""
        loss = self.facts.get("loss")
        found = loss.get("history") if isinstance(loss, dict) else None
        return [str(each) for each in found] if isinstance(found, list) else []


def chosen(
    root: str | os.PathLike[str], rank: int | None, step: int | None
) -> tuple[Path, ring.Records]:
    """The folder of the death to replay, and its ring.

    It is the first death of the newest run that has any, of the rank that died first.

    Raises:
        OptionError: there is none, or a file is not the recorder's.
    """
    shown = printable_line(os.fsdecode(root), 300)
    found, last = [], 0
    for home in folder.homes(root):
        records = ring.read(home / folder.RING)
        number = _int(records.header.get("rank"))
        last = max([last, *(_int(r.get("step")) for r in records.records)])
        if rank is not None and number != rank:
            continue
        for death in folder.deaths(home):
            facts = folder.read_death(death)
            if step is not None and facts.get("step") != step:
                continue
            started = _number(records.header.get("started"))
            key = (_int(facts.get("step")), _number(facts.get("died")), number)
            found.append((home.parent, started, key, death, records))
    if not found:
        of = "" if rank is None else f" of rank {rank}"
        at = "" if step is None else f" at step {step}"
        raise OptionError(
            f"{shown} holds no death{of}{at}: the last step that it has is {last}"
        )
    newest = max(found, key=lambda each: each[1])[0]
    mine = [each for each in found if each[0] == newest]
    *_, death, records = min(mine, key=lambda each: each[2])
    return death, records


def read(death: Path, records: ring.Records) -> Recorded:
    """What a death holds.

    Raises:
        OptionError: a file is damaged.
    """
    facts = folder.read_death(death)
    files = {name: folder.read_tensors(death, name) for name in folder.TENSORS}
    try:
        return _read(death, facts, records, files)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        what = printable_line(f"{type(error).__name__}: {error}", 200)
        raise OptionError(f"{death / folder.DEATH} is damaged ({what})") from None


def _read(
    death: Path,
    facts: dict[str, Any],
    records: ring.Records,
    files: Mapping[str, Tensors],
) -> Recorded:
    state, batch, caller = (files[name] for name in folder.TENSORS)
    step, cause = facts["step"], facts["cause"]
    if not isinstance(step, int) or cause not in ("loss", "skips"):
        raise ValueError("step or cause")
    for name, kind in (("label", str), ("class", str), ("parameters", dict)):
        if not isinstance(facts[name], kind):
            raise ValueError(name)
    calls = [_call(each, i, batch) for i, each in enumerate(facts["calls"])]
    if not calls:
        raise ValueError("no call")
    options, unread = _options(facts.get("options", {}))
    return Recorded(
        path=death,
        rank=_int(facts.get("rank")),
        world=_int(facts.get("world", 1)),
        step=step,
        cause=cause,
        facts=facts,
        steps=[
            r
            for r in records.records
            if r.get("kind") == "step" and _int(r.get("step")) <= step
        ],
        weights=_beginning("model.", state),
        masters=_beginning("master.", state),
        calls=calls,
        frames=[_frame(each, caller, batch) for each in facts["caller"]],
        optimizers=[_optimizer(each, state) for each in facts["optimizers"]],
        options=options,
        unread_options=unread,
    )


def _beginning(prefix: str, tensors: Tensors) -> dict[str, Any]:
    return {
        k.removeprefix(prefix): t
        for k, t in tensors.items()
        if k[: len(prefix)] == prefix
    }


def _call(told: dict[str, Any], index: int, batch: Tensors) -> Call:
    args, kwargs = (unpacked(told[name], batch, batch) for name in ("args", "kwargs"))
    if not isinstance(args, tuple) or not isinstance(kwargs, dict):
        raise ValueError("the arguments of a call")
    cuda, at = [], 0
    while (key := f"rng.{index}.cuda.{at}") in batch:
        cuda.append(batch[key])
        at += 1
    scale = told.get("scale")
    return Call(
        args,
        {str(k): v for k, v in kwargs.items()},
        bool(told.get("training", True)),
        float(scale) if isinstance(scale, int | float) else None,
        told.get("python_rng"),
        batch.get(f"rng.{index}.torch"),
        cuda,
    )


def _frame(told: dict[str, Any], caller: Tensors, batch: Tensors) -> Frame:
    found = {str(k): unpacked(v, caller, batch) for k, v in told["locals"].items()}
    return Frame(str(told["function"]), str(told["file"]), _int(told["line"]), found)


def _optimizer(told: dict[str, Any], state: Tensors) -> Optimizer:
    of = {}
    for group in told["groups"]:
        options = {k: unpacked(v, state, {}) for k, v in group["options"].items()}
        of.update({str(name): options for name in group["params"]})
    states = {
        str(name): {str(k): unpacked(v, state, {}) for k, v in values.items()}
        for name, values in told["state"].items()
    }
    return Optimizer(str(told["class"]).rpartition(".")[2], of, states)


def unpacked(told: Any, own: Tensors, batch: Tensors) -> Any:
    """The value that `flight/values.py` has packed.

    Args:
        own: the tensors of the value's own file.
        batch: those of `batch.safetensors`.
    """
    kind = next(iter(told))
    value = told[kind]

    def inside(each: Any) -> Any:
        return unpacked(each, own, batch)

    readers: dict[str, Callable[[], Any]] = {
        "tensor": lambda: _saved(own, value, told),
        "batch": lambda: _saved(batch, value, told),
        "weight": lambda: Weight(str(value)),
        "value": lambda: value,
        "float": lambda: float(value),
        "list": lambda: [inside(each) for each in value],
        "tuple": lambda: tuple(inside(each) for each in value),
        "dict": lambda: {k: inside(each) for k, each in value},
        "object": lambda: Fields({k: inside(each) for k, each in told["fields"]}),
        "opaque": lambda: LIVE,
    }
    return readers[kind]()


def _saved(tensors: Tensors, key: str, told: dict[str, Any]) -> Any:
    tensor = tensors.get(key)  # None: safetensors could not hold it
    return LIVE if tensor is None else Saved(tensor, told.get("requires_grad") is True)


def _options(told: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The options of the conversion, and the names of those that are no literals."""
    found: dict[str, Any] = {}
    unread = []
    for name, value in told.items():
        if name in OURS_TO_SET or name not in OPTION_NAMES:
            continue
        try:
            is_text = isinstance(value, str) and value[:1] in _LITERALS
            found[name] = ast.literal_eval(value) if is_text else value
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            unread.append(name)
        if isinstance(found.get(name), str) and not _WORD.fullmatch(found[name]):
            unread.append(name)  # how an object shows itself
            del found[name]
    return found, unread


def _int(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
