"""Processes that prepare side by side, and are timed one at a time."""

from __future__ import annotations

import itertools
import json
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, step_times, turns
from benchmarks.setting import Setting
from benchmarks.timing import repeated
from benchmarks.turns import Job, rows

MODULE = """
import argparse, json, os, sys, time
from benchmarks import turns

parser = argparse.ArgumentParser()
parser.add_argument("--one")
given = parser.parse_args()
kind, _, name = given.one.partition("-")
if kind == "broken":
    sys.exit(3)
time.sleep({"slow": 60, "late": 0.5}.get(kind, 0))
print("said while it prepares")
begun = time.time()
assert turns.wait() and turns.is_beside_others()
if kind == "stuck":
    time.sleep(60)
if kind == "dies":
    sys.exit(4)
turn = time.time()
time.sleep(0.2)
found = {"begun": begun, "turn": turn, "ended": time.time()}
print(json.dumps({"name": given.one, "ways": found, "failures": {}}))
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "taking_turns.py").write_text(textwrap.dedent(MODULE))
    paths = [str(tmp_path), str(turns.ROOT)]
    monkeypatch.setenv("PYTHONPATH", ":".join(paths))
    return "taking_turns"


def found(module: str, names: list[str], at_once: int, limit: float) -> dict[str, Any]:
    jobs = [Job(module, name) for name in names]
    return {job.name: row for job, row in rows(jobs, at_once=at_once, limit=limit)}


@pytest.mark.thorough
def test_turns_do_not_overlap_and_begin_when_all_are_ready(module: str) -> None:
    every = found(module, ["late-a", "quick-b", "quick-c"], at_once=3, limit=60)
    spans = [row["ways"] for row in every.values()]
    assert [*every] == ["late-a", "quick-b", "quick-c"]
    assert max(s["begun"] for s in spans) <= min(s["turn"] for s in spans)
    for one, other in itertools.pairwise(spans):
        assert one["ended"] <= other["turn"]


@pytest.mark.slow
def test_so_many_at_once(module: str) -> None:
    every = found(module, ["quick-a", "quick-b", "quick-c"], at_once=2, limit=60)
    spans = [row["ways"] for row in every.values()]
    assert spans[2]["begun"] > spans[1]["ended"]


@pytest.mark.thorough
def test_a_process_that_fails_takes_no_other_with_it(module: str) -> None:
    names = ["broken-a", "quick-b", "dies-c"]
    every = found(module, names, at_once=3, limit=60)
    assert every["broken-a"]["failures"] == {"all": "exit 3"}
    assert every["dies-c"]["failures"] == {"all": "exit 4"}
    assert not every["quick-b"]["failures"]


@pytest.mark.slow
def test_a_process_that_is_late_has_failed(module: str) -> None:
    begun = time.monotonic()
    every = found(module, ["slow-a", "quick-b", "stuck-c"], at_once=3, limit=20)
    assert time.monotonic() - begun < 40
    assert "not ready" in every["slow-a"]["failures"]["all"]
    assert not every["quick-b"]["failures"]
    assert "its turn took more" in every["stuck-c"]["failures"]["all"]


def test_alone_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(turns.WAITS, raising=False)
    assert not turns.wait()
    made = []

    def short_of_memory() -> int:
        made.append(1)
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        turns.prepared_beside_others(short_of_memory)
    assert len(made) == 1


def test_memory_that_others_hold_is_waited_for(monkeypatch) -> None:
    monkeypatch.setenv(turns.WAITS, "1")
    monkeypatch.setattr(turns, "PAUSES_S", (0.0, 0.0))
    tries = []

    def prepared() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise torch.OutOfMemoryError
        return "made"

    assert turns.prepared_beside_others(prepared) == "made"


def test_tables_of_models_are_filled_side_by_side(tmp_path: Path, monkeypatch) -> None:
    """Models that are there are left out; a row that failed leaves its piece failed."""
    asked = Setting(quick=True)
    pieces = gpu.chosen(["training-bf16", "prediction-bf16"])
    done = pieces[0].results(asked, tmp_path)
    done.write_text(json.dumps({"models": [row("bert")]}))
    seen: list[str] = []

    def measured(jobs: list[Job], **_: Any) -> Any:
        for job in jobs:
            seen.append(f"{job.module} {job.name}")
            failed = job.module.endswith("prediction")
            yield job, row(job.name, "it broke" if failed else "")

    monkeypatch.setattr(gpu.turns, "rows", measured)
    ended = gpu.side_by_side(pieces, asked, tmp_path, 60.0, 4)
    assert seen == [
        "benchmarks.training resnet50",
        "benchmarks.prediction bert",
        "benchmarks.prediction resnet50",
    ]
    assert ended == {"training-bf16": gpu.FINISHED, "prediction-bf16": gpu.FAILED}
    kept = json.loads(done.read_text())["models"]
    assert [each["name"] for each in kept] == ["bert", "resnet50"]


def row(name: str, failure: str = "") -> dict[str, Any]:
    """A row of the table of training steps, or one that failed, of any table."""
    ways = {way: {"seconds": [0.5]} for way in ("fp32", "autocast", "autoamp")}
    failures = {"all": failure} if failure else {}
    return {"name": name, "commit": "abc", "ways": {} if failure else ways} | {
        "failures": failures
    }


def test_steps_of_a_round() -> None:
    taken: list[int] = []
    repeated(lambda: taken.append(1), 3)
    assert len(taken) == 3
    assert step_times.steps_a_round(Setting()) == 1
    assert step_times.steps_a_round(Setting("cuda")) > 1
