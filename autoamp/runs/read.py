"""Reads the recorded steps of a training: a ring for each rank, all fields checked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoamp.dtypes import (
    HIGH_DTYPE,
    LOW_DTYPES,
    needs_loss_scale,
    parse_low_dtype,
    rounding,
    short_name,
)
from autoamp.errors import OptionError
from autoamp.flight import folder, ring
from autoamp.printable import printable_line

NUMBERS = ("loss", "gradient", "result")
"""The numbers of a step that round, in the order in which they are named."""

_NOT_FINITE = ("inf", "-inf", "nan")


@dataclass(frozen=True)
class Step:
    """What a ring has of one step.

    Attributes:
        number: from 1.
        numbers: those of `NUMBERS` that were noted.
        ops: the largest and the mean magnitude of ops, in the order of the forward.
        facts: the other fields: texts, whole numbers and bools, and the loss scale.
    """

    number: int
    numbers: Mapping[str, float]
    ops: Mapping[str, tuple[float, float]]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Recording:
    """The ring of one rank.

    Attributes:
        path: the file.
        torn: how many records a kill has torn.
    """

    path: Path
    rank: int
    header: Mapping[str, Any]
    steps: Mapping[int, Step]
    torn: int

    @property
    def label(self) -> str:
        """The name of the model's class."""
        return printable_line(str(self.header.get("label", "a model")), 100)

    @property
    def precision(self) -> str:
        """The compute dtype, or the coarsest that it may have been.

        `precision="auto"` chooses by the device, which a ring does not name; a loss
        scale is there where the dtype needs one, unless the user has asked for one.
        """
        options = self.header.get("options")
        given = options if isinstance(options, Mapping) else {}
        if given.get("keep") == "('*',)":
            return short_name(HIGH_DTYPE)
        named = parse_low_dtype(given.get("precision"))
        if named is None:
            scaled = any("scale" in step.facts for step in self.steps.values())
            sure = scaled and "loss_scale" not in given
            left = [d for d in LOW_DTYPES.values() if needs_loss_scale(d) or not sure]
            named = max(left, key=rounding)
        return short_name(named)


def read(root: str | os.PathLike[str]) -> dict[int, Recording]:
    """The recordings of the one run in a folder, by rank.

    Raises:
        OptionError: there is no run in it, or there are several, or a ring is damaged.
    """
    homes = folder.homes(root)
    runs = sorted({home.parent for home in homes})
    if len(runs) > 1:
        names = ", ".join(printable_line(str(each), 300) for each in runs[-5:])
        raise OptionError(
            f"{_shown(root)} holds {len(runs)} runs; give one of them: "
            f"{'... ' if len(runs) > 5 else ''}{names}"
        )
    found: dict[int, Recording] = {}
    for home in homes:
        recording = _recording(ring.read(home / folder.RING))
        if recording.rank in found:
            raise OptionError(f"{_shown(root)} has two rings of rank {recording.rank}")
        found[recording.rank] = recording
    return found


def _recording(records: ring.Records) -> Recording:
    rank = _whole(records.header.get("rank"), 0)
    if rank is None or not isinstance(records.header.get("parameters"), dict):
        raise OptionError(
            f"{_shown(records.path)}: its header is no recorder's; give a folder of "
            "the flight recorder"
        )
    steps = {}
    for record in records.records:
        if record.get("kind") == "step":
            number = _whole(record.get("step"), 1)
            if number is None:
                raise OptionError(
                    f"{_shown(records.path)}: record {record['number']} has no number "
                    "of a step; give a folder of the flight recorder"
                )
            steps[number] = _step(number, record)
    return Recording(records.path, rank, records.header, steps, records.torn)


def _step(number: int, record: dict[str, Any]) -> Step:
    """A step; fields of other types than a recorder's are left out."""
    noted = {name: _number(record.get(name)) for name in NUMBERS}
    ops = record.get("ops")
    magnitudes = {}
    for name, pair in (ops if isinstance(ops, dict) else {}).items():
        both = [_number(n) for n in pair] if isinstance(pair, list) else []
        if len(both) == 2 and both[0] is not None and both[1] is not None:
            magnitudes[name] = (both[0], both[1])
    facts = {
        name: record[name]
        for name, kinds in (
            *(("batch", str), ("rng", str), ("why", str), ("optimizer", str)),
            *(("taken", bool), ("calls", int), ("losses", int)),
        )
        if isinstance(record.get(name), kinds)
    }
    scale = _number(record.get("scale"))
    return Step(
        number,
        {name: value for name, value in noted.items() if value is not None},
        magnitudes,
        facts if scale is None else {**facts, "scale": scale},
    )


def _number(value: Any) -> float | None:
    if isinstance(value, str) and value in _NOT_FINITE:
        return float(value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _whole(value: Any, least: int) -> int | None:
    """The whole number, which is a size or a count; None for anything else."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if least <= value < 1 << 63 else None


def _shown(path: str | os.PathLike[str]) -> str:
    return printable_line(os.fsdecode(path), 300)
