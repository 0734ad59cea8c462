"""`autoamp export`, and `autoamp diff` on the files that it writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import autoamp_cli

FACTORIES = """
import torch
from torch import nn

def example():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    return net.eval(), (torch.randn(4, 64),)

class Scaled(nn.Linear):
    def forward(self, x, *, scale):
        return super().forward(x) * scale

def scaled():
    return Scaled(64, 64).eval(), (torch.randn(4, 64),), {"scale": torch.randn(4, 1)}

class Branches(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y if y.sum() > 0 else -y

def branches():
    return Branches(8, 8), (torch.ones(2, 8),)
"""

FORCED = ("--precision", "fp16", "--no-do-no-harm")

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    (tmp_path / "exported_models.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def invoke(*args: str) -> Result:
        return CliRunner().invoke(autoamp_cli.main, args)

    yield invoke
    sys.modules.pop("exported_models", None)


@pytest.mark.thorough
def test_files_of_two_targets_and_a_report_have_one_plan(run: Run) -> None:
    of = "exported_models:example"
    told = run("export", of, "--out", "a.pt2", *FORCED)
    assert told.exit_code == 0, told.output
    assert "a.pt2: " in told.output
    assert "3 of 3 float ops in fp16" in told.output
    told = run("export", of, "--target", "onnx", "--out", "a.onnx", *FORCED)
    assert told.exit_code == 0, told.output
    assert run("explain", of, "--json", "a.json", *FORCED).exit_code == 0
    told = run("diff", "a.pt2", "a.onnx", "a.json")
    assert told.exit_code == 0, told.output
    assert told.output.count("No difference in 3 ops") == 2
    each = json.loads(run("diff", "a.json", "a.pt2", "a.onnx", "--json").output)
    assert [one["new"] for one in each] == ["a.pt2", "a.onnx"]
    run("export", of, "--out", "b.pt2", "--precision", "bf16", "--no-do-no-harm")
    told = run("diff", "a.pt2", "b.pt2")
    assert told.exit_code == 1
    assert "bf16" in told.output


def test_any_sizes(run: Run) -> None:
    told = run(
        *("export", "exported_models:scaled", "--out", "a.pt2", "--dynamic", *FORCED)
    )
    assert told.exit_code == 0, told.output
    module = torch.export.load("a.pt2").module()
    x, scale = torch.randn(7, 64), torch.randn(7, 1)
    assert module(x, scale=scale).shape == (7, 64)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("example", "--out", "a.onnx"), "ends in .pt2"),
        (("example", "--out", "no/a.pt2"), "a folder that exists"),
        (("example", "--out", "a.pt2", "--target", "x"), "the targets are pt2"),
        (("branches", "--out", "a.pt2"), "return y if y.sum() > 0 else -y"),
        (("example",), "Missing option '--out'"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    run: Run, tmp_path: Path, args: tuple[str, ...], message: str
) -> None:
    name, *rest = args
    told = run("export", f"exported_models:{name}", *rest)
    assert told.exit_code == 2
    assert message in told.output
    assert not [*tmp_path.glob("*.pt2"), *tmp_path.glob("*.onnx")]


def test_diff_of_a_file_without_a_plan(run: Run) -> None:
    plain = torch.export.export(torch.nn.Linear(8, 8), (torch.ones(2, 8),))
    torch.export.save(plain, "a.pt2")
    told = run("diff", "a.pt2", "a.pt2")
    assert told.exit_code == 2
    assert "holds no plan of autoamp" in told.output
