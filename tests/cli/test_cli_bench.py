"""The command `autoamp bench`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner

from autoamp_cli import main
from autoamp_cli.words import WAYS

MODELS = """
import torch
from torch import nn

def small():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU()), (torch.ones(4, 8),)

def raises():
    raise ValueError("no such file")

def takes(size):
    return small()

def no_module():
    return "model", (torch.ones(4, 8),)

def does_not_fit():
    return nn.Linear(8, 8), (torch.ones(4, 9),)

class Stops(nn.Module):
    calls = 0
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
    def forward(self, x):
        Stops.calls += 1
        if Stops.calls > Stops.most:
            raise KeyboardInterrupt
        return self.layer(x)

def stops():
    Stops.calls, Stops.most = 0, 20  # each of two ways is set up by 8 calls
    return Stops(), (torch.ones(4, 8),)

def stops_early():
    Stops.calls, Stops.most = 0, 3
    return Stops(), (torch.ones(4, 8),)

def too_large():
    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
        def forward(self, x):
            raise torch.OutOfMemoryError("out of memory: tried to allocate 9 PiB")
    return Large(), (torch.ones(4, 8),)
"""
QUICK = ("--ways", "half", "--rounds", "2", "--steps", "2")


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch) -> None:
    (tmp_path / "bench_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("bench_models", None)


def bench(name: str, *options: str):
    return CliRunner().invoke(main, ["bench", f"bench_models:{name}", *options])


def test_prints_the_table_and_writes_every_file(tmp_path) -> None:
    paths = "--json", "b.json", "--markdown", "b.md", "--plot", "b.svg"
    done = bench("small", *QUICK, *paths)
    assert done.exit_code == 0, done.output
    assert "autoamp bench: Sequential, training, bf16" in done.stdout
    document = json.loads((tmp_path / "b.json").read_text())
    assert document["schema"] == 1
    assert [row["way"] for row in document["rows"]] == ["fp32", ".bfloat16()"]
    assert "| fp32 |" in (tmp_path / "b.md").read_text()
    assert (tmp_path / "b.svg").read_text().startswith("<svg")
    assert not [*tmp_path.glob("*.part")]


def test_json_to_stdout_is_all_of_stdout() -> None:
    done = bench("small", *QUICK, "--infer", "--json", "-")
    assert json.loads(done.stdout)["work"] == "inference"


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("raises", (), "raised ValueError: no such file"),
        ("takes", (), "missing 1 required positional argument"),
        ("no_module", (), "as model, which must be a torch.nn.Module"),
        ("does_not_fit", (), "the model raised RuntimeError: mat1 and mat2"),
        ("too_large", ("--sweep", "2,4"), "in fp32 at batch 2"),
        ("small", ("--sweep", "0"), "write numbers above 0"),
        ("small", ("--ways", "best"), "is none of fp32, tf32"),
        ("small", ("--memory", "lots"), "write 8GiB"),
        ("small", ("--infer", "--generate", "3"), "exclude each other"),
        ("small", ("--json", "a", "--plot", "a"), "go to the same place"),
    ],
)
def test_bad_input_is_told_in_a_line(name, options, said, tmp_path) -> None:
    before = sorted(tmp_path.iterdir())
    done = bench(name, *QUICK, *options)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
    assert done.stdout == ""
    left = [path for path in sorted(tmp_path.iterdir()) if path.name != "__pycache__"]
    assert left == before


def test_an_unwritable_output_is_refused_before_anything_runs(tmp_path) -> None:
    done = bench("raises", "--json", "nowhere/b.json")
    assert done.exit_code == 2
    assert "nowhere/b.json cannot be written: there is no folder" in done.stderr


def test_ctrl_c_prints_what_was_measured_and_writes_nothing(tmp_path) -> None:
    done = bench("stops", "--ways", "half", "--rounds", "9", "--json", "b.json")
    assert done.exit_code == 130
    assert "Interrupted: the figures measured so far are above" in done.stderr
    assert ".bfloat16()" in done.stdout
    assert not (tmp_path / "b.json").exists()


def test_ctrl_c_before_the_first_time_says_that_there_is_none() -> None:
    done = bench("stops_early", "--ways", "half")
    assert done.exit_code == 130
    assert done.stdout == ""
    assert "Interrupted before a step was timed" in done.stderr


def test_the_help_names_the_ways_there_are() -> None:
    from autoamp.benchmark.ways import KINDS

    assert WAYS == KINDS
