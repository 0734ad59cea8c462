"""`AUTOAMP_REPORT_DIR`: what is written, by whom, and where it cannot be."""

from __future__ import annotations

import ast
import json
import os
import resource
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.logs import warned
from tests.processes import run_script
from tests.says import says
from tests.small_models import BF16

pytestmark = pytest.mark.usefixtures("off_again")

WIDTH = 8
ONE_GRAPH = {"graph-0-before.py", "graph-0-after.py", "report.json", "report.txt"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.second = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, WIDTH)


def folders(root: Path) -> list[Path]:
    return sorted(root.iterdir())


def whole(folder: Path) -> dict[str, Any]:
    """The report in a folder all of whose files are whole."""
    names = {path.name for path in folder.iterdir()}
    assert names >= ONE_GRAPH
    assert not [name for name in names if name.startswith(".")], "a draft was left"
    for path in folder.glob("*.py"):
        ast.parse(path.read_text())
    assert (folder / "report.txt").read_text().endswith("\n")
    return json.loads((folder / "report.json").read_text())


# -- what is written -------------------------------------------------------------------


def test_graphs_before_and_after_and_the_report(tmp_path, x: Tensor) -> None:
    root = tmp_path / "not" / "there" / "yet"
    autoamp.enable(report_dir=root, **BF16)
    model = Net()
    model(x)
    (folder,) = folders(root)
    assert folder.name.startswith("Net-")
    assert f"-{os.getpid()}-" in folder.name
    assert {path.name for path in folder.iterdir()} == ONE_GRAPH
    before = (folder / "graph-0-before.py").read_text()
    after = (folder / "graph-0-after.py").read_text()
    assert "linear" in before
    assert "bfloat16" not in before
    assert "bfloat16" in after
    assert whole(folder) == json.loads(autoamp.report(model).to_json())
    # Another graph of the same model, and another model.
    model.eval()
    with torch.no_grad():
        model(x)
    more = {"graph-1-before.py", "graph-1-after.py"}
    assert {path.name for path in folder.iterdir()} == ONE_GRAPH | more
    Net()(x)
    first, second = folders(root)
    assert whole(first).keys() == whole(second).keys()


def test_final_counts_when_the_mode_ends(tmp_path, x: Tensor) -> None:
    autoamp.enable(report_dir=tmp_path, **BF16)
    model = Net()
    for _ in range(5):
        model(x)
    (folder,) = folders(tmp_path)
    written = whole(folder)
    expected = json.loads(autoamp.report(model).to_json())
    assert written != expected
    autoamp.disable()
    assert whole(folder) == expected


@pytest.mark.parametrize(
    "name",
    ["../../up", "[bold red]x[/]", "N" * 400, "\x1b[31m", "网", "."],
    ids=lambda name: ascii(name)[:12],
)
def test_class_names_that_are_no_file_names(
    name: str, tmp_path, x: Tensor, caplog
) -> None:
    root = tmp_path / "reports"
    autoamp.enable(report_dir=root, **BF16)
    model = type(name, (Net,), {})()
    model(x)
    assert warned(caplog) == []
    assert folders(tmp_path) == [root]
    (folder,) = folders(root)
    assert len(folder.name) < 200
    assert folder.name.isascii()
    whole(folder)


def test_an_earlier_run_with_the_same_id_is_not_written_over(
    tmp_path, x: Tensor, monkeypatch
) -> None:
    """In a container every run may be process 7 of host `worker`."""
    for _ in range(2):
        monkeypatch.setattr("autoamp.auto.report_dir._number", iter(range(9)))
        autoamp.enable(report_dir=tmp_path, **BF16)
        Net()(x)
        autoamp.disable()
    assert len(folders(tmp_path)) == 2
    for folder in folders(tmp_path):
        assert {path.name for path in folder.iterdir()} == ONE_GRAPH


def test_many_threads_of_one_model(tmp_path, caplog) -> None:
    autoamp.enable(report_dir=tmp_path, **BF16)
    model, together = Net(), threading.Barrier(6)
    model(torch.randn(3, WIDTH))
    recorder, engine = autoamp.auto.switch._mode.recorder, model._autoamp.engine

    def write() -> None:
        together.wait()
        for _ in range(5):
            recorder.write(engine)

    threads = [threading.Thread(target=write) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert warned(caplog) == []
    (folder,) = folders(tmp_path)
    whole(folder)


# -- where it cannot be written --------------------------------------------------------


@pytest.mark.parametrize("lost", ["folder", "root", "replaced"])
def test_directory_that_vanishes(lost: str, tmp_path, x: Tensor, caplog) -> None:
    root = tmp_path / "reports"
    autoamp.enable(report_dir=root, **BF16)
    model = Net()
    expected = model(x)
    shutil.rmtree(folders(root)[0] if lost == "folder" else root)
    if lost == "replaced":
        root.touch()
    with torch.no_grad():  # another graph
        assert torch.equal(model(x), expected)
    (line,) = warned(caplog)
    says(line, "Net", root)
    autoamp.disable()
    assert not autoamp.is_converted(model)


def test_full_disk(tmp_path, x: Tensor, caplog) -> None:
    """Past the largest file a process may write, as past the end of a disk."""
    autoamp.enable(report_dir=tmp_path, **BF16)
    model = Net()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        found = model(x)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert found.shape == (3, 4)
    (line,) = warned(caplog)
    says(line, "Net", "File too large")
    (folder,) = folders(tmp_path)
    assert [*folder.iterdir()] == [], "half a file"
    with torch.no_grad():  # another graph, and there is room again
        model(x)
    whole(folder)


# -- processes -------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, torch
from torch import nn

class Net(nn.Sequential):
    pass

model = Net(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
calls = int(sys.argv[1])
for call in range(calls):
    with torch.set_grad_enabled(call % 2 == 0):
        model(torch.randn(3, 8))
if calls == 1:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def reporting_to(root: Path) -> dict[str, str]:
    return {
        "AUTOAMP_ENABLE": "1",
        "AUTOAMP_PRECISION": "bf16",
        "AUTOAMP_DO_NO_HARM": "0",
        "AUTOAMP_REPORT_DIR": str(root),
    }


def test_killed_process_leaves_what_it_captured(tmp_path) -> None:
    done = run_script(SCRIPT, "1", **reporting_to(tmp_path))
    assert done.returncode == -signal.SIGKILL
    (folder,) = folders(tmp_path)
    assert {path.name for path in folder.iterdir()} == ONE_GRAPH
    whole(folder)


def test_the_final_counts_are_written_at_exit(tmp_path) -> None:
    for calls in (6, 4):
        done = run_script(SCRIPT, str(calls), **reporting_to(tmp_path))
        assert done.returncode == 0, done.stderr
    assert sorted(whole(folder)["runs"] for folder in folders(tmp_path)) == [4, 6]


# -- models reached in other ways, and models that are freed ---------------------------


class Reached(Net):
    def step(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


FREED = """
import gc, os, sys, weakref
import torch
import autoamp
from tests.auto.test_report_dir import BF16, Reached, WIDTH
root, name = sys.argv[1:]
autoamp.enable(report_dir=root, **BF16)
model = Reached()
for _ in range(12):
    (model if name == "forward" else model.step)(torch.ones(3, WIDTH))
expected = autoamp.report(model).to_json()
freed = weakref.ref(model)
del model
gc.collect()
assert freed() is None
print(expected, flush=True)
os._exit(0)  # nothing is written at exit
"""


@pytest.mark.parametrize("name", ["forward", "step"])
def test_a_model_that_is_freed_leaves_its_final_report(name: str, tmp_path) -> None:
    done = run_script(FREED, str(tmp_path), name)
    assert done.returncode == 0, done.stderr
    (folder,) = (f for f in folders(tmp_path) if f.name.startswith("Reached-"))
    assert whole(folder) == json.loads(done.stdout)
