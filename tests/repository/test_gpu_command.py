"""`make gpu` without a GPU: its pieces, what it skips, processes that take turns."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from autoamp.compat import device
from benchmarks import (
    gpu,
    gpu_tests,
    report,
    setting,
    training,
    turns,
)
from benchmarks.setting import NO_GPU, Setting
from benchmarks.turns import Job, rows


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_one_line_says_so(tmp_path: Path, capsys) -> None:
    assert gpu.main(["--out", str(tmp_path)]) == gpu.REFUSED == 2
    assert capsys.readouterr() == ("", f"{NO_GPU}\n")
    assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit) as left:
        training.TABLE.main(["--device", "cuda", "--out", str(tmp_path)])
    assert left.value.code == 2
    assert NO_GPU in capsys.readouterr().err


@pytest.mark.parametrize("piece", gpu.pieces(), ids=lambda piece: piece.name)
def test_the_results_are_where_the_benchmark_writes_them(
    piece: gpu.Piece, tmp_path: Path, monkeypatch
) -> None:
    """Each command is one that its module reads, with the setting of the piece."""
    seen: list[Any] = []

    def stop(self: Setting, base: str, *, precise: bool = True) -> str:
        seen.append((self, base, precise))
        raise KeyboardInterrupt

    asked = Setting(quick=True)
    command = piece.command(asked, tmp_path, 100)
    name = piece.results(asked, tmp_path).name
    monkeypatch.setattr(Setting, "stem", stop)
    monkeypatch.setattr("benchmarks.speeds.subprocess.run", ran_well)
    module = __import__(piece.module, fromlist=["main"])
    main = getattr(module, "main", None) or module.TABLE.main
    with pytest.raises(KeyboardInterrupt):
        main(command[3:])
    monkeypatch.undo()
    ((where, base, precise),) = seen
    assert f"{where.stem(base, precise=precise)}.json" == name
    assert where == piece.setting(asked)


def ran_well(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], 0, "a table")


SLEEPS = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(60)
"""


def is_alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def ends(pid: int) -> bool:
    """Whether a process is gone soon: a signal is sent before it has done its work."""
    until = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not is_alive(pid)


def pid_in(file: Path) -> int:
    for _ in range(300):
        if file.exists() and file.read_text():
            return int(file.read_text())
        time.sleep(0.1)
    raise AssertionError("the process has not begun")


def test_a_piece_that_takes_too_long_is_ended_with_its_processes(tmp_path) -> None:
    file = tmp_path / "pid"
    command = [sys.executable, "-c", SLEEPS, str(file)]
    assert gpu.within(6.0, command) is None
    assert ends(pid_in(file))
    assert gpu.within(20.0, [sys.executable, "-c", "raise SystemExit(7)"]) == 7


def test_a_signal_ends_what_was_begun(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    words = [sys.executable, "-c", SLEEPS, str(file)]
    source = f"from benchmarks import gpu; gpu.within(50.0, {words!r})"
    with subprocess.Popen([sys.executable, "-c", source], cwd=report.ROOT) as run:
        child = pid_in(file)
        os.kill(run.pid, signal.SIGTERM)
        assert run.wait(30) == 128 + signal.SIGTERM
    assert ends(child)


TESTED = """
import pytest

@pytest.mark.gpu
def test_good(): ...

@pytest.mark.gpu
def test_bad(): raise RuntimeError("no kernel")

def test_of_no_gpu(): ...
"""


def run_of(folder: Path, *more: str) -> tuple[int, str]:
    """The status, and the outcomes as the table has them."""
    given = [
        "--out",
        str(folder),
        "--marked",
        "gpu",
        "--only",
        str(folder / "test_a.py"),
    ]
    command = [sys.executable, "-m", gpu_tests.MODULE, *given, *more]
    ended = subprocess.run(
        command, cwd=report.ROOT, capture_output=True, text=True, check=False
    )
    return ended.returncode, ended.stdout


@pytest.mark.slow
def test_a_test_that_passed_is_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(TESTED)
    status, said = run_of(tmp_path)
    assert status == 1
    assert "1 failed, 1 passed." in said
    assert "test_bad: failed: RuntimeError: no kernel" in said
    kept = tmp_path / "tests.jsonl"
    kept.write_text(kept.read_text() + '{"name": "cut o')
    (tmp_path / "test_a.py").write_text(
        TESTED.replace('raise RuntimeError("no kernel")', "...")
    )
    status, said = run_of(tmp_path)
    assert status == 0
    assert "1 passed, 2 deselected" in said
    assert "2 passed." in said
    found = json.loads((tmp_path / "tests.json").read_text())
    assert found["whole"]
    assert run_of(tmp_path)[0] == 0
    (tmp_path / "test_a.py").write_text("import nothing_of_that_name")
    status, said = run_of(tmp_path)
    assert status == 1
    assert "not collected: " in said


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_command_on_a_cpu(tmp_path: Path) -> None:
    wanted = ["tests", "training-fp16", "inference-bf16"]
    stems = ["tests", "inference"]
    if torch.bfloat16 in device.cpu_low_precision_units():  # the real CPU: see --cpu
        wanted, stems = [*wanted, "prediction-bf16"], [*stems, "prediction"]
    given = ["--device", "cpu", "--quick", "--out", str(tmp_path), *wanted]
    command = [sys.executable, "-m", "benchmarks.gpu", *given]
    ended = subprocess.run(
        command, cwd=report.ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout
    rows = json.loads((tmp_path / "training-fp16-quick.json").read_text())["models"]
    assert [row["name"] for row in rows] == ["bert", "resnet50"]
    assert not any(row["failures"] for row in rows)
    assert set(rows[0]["ways"]) == {"fp32", "autocast", "autoamp", "float16"}
    for stem in stems:
        text = (tmp_path / f"{stem}-quick.md").read_text()
        assert text.startswith(setting.capability("cpu").split(",")[0])


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


def test_turns_do_not_overlap_and_begin_when_all_are_ready(module: str) -> None:
    every = found(module, ["late-a", "quick-b", "quick-c"], at_once=3, limit=60)
    spans = [row["ways"] for row in every.values()]
    assert [*every] == ["late-a", "quick-b", "quick-c"]
    assert max(s["begun"] for s in spans) <= min(s["turn"] for s in spans)
    for one, other in itertools.pairwise(spans):
        assert one["ended"] <= other["turn"]


@pytest.mark.slow
def test_a_process_that_is_late_has_failed(module: str) -> None:
    begun = time.monotonic()
    every = found(module, ["slow-a", "quick-b", "stuck-c"], at_once=3, limit=20)
    assert time.monotonic() - begun < 40
    assert "not ready" in every["slow-a"]["failures"]["all"]
    assert not every["quick-b"]["failures"]
    assert "its turn took more" in every["stuck-c"]["failures"]["all"]
