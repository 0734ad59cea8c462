"""Times beside autocast's: shares, tables, plots, and inductor's own counts."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch
from torch import nn

import autoamp
from benchmarks import compiled, step_times, training
from benchmarks.bytes_step import WAYS
from benchmarks.ratios import Row
from tests.models.case import Case
from tests.small_models import mlp


def row(name: str, **seconds: list[float]) -> Row:
    ways = {way: {"seconds": taken} for way, taken in seconds.items()}
    return {"name": name, "commit": "c0ffee", "ways": ways, "failures": {}}


TWO = [
    row("a", fp32=[4.0, 9.0, 2.0], autocast=[2.0, 3.0, 2.0], autoamp=[1.0, 3.0, 1.0]),
    row("b", fp32=[1.0], autocast=[1.0], autoamp=[2.0], bfloat16=[0.5]),
]


def test_a_share_is_the_median_of_the_ratios_of_each_round() -> None:
    assert step_times.shares(TWO[0]) == {"fp32": 2.0, "autocast": 1.0, "autoamp": 0.5}
    assert step_times.shares(row("c", fp32=[1.0])) == {}


def test_the_table_has_geometric_means_of_what_there_is() -> None:
    lines = step_times.table([*TWO, row("c", fp32=[1.0])], WAYS).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert cells[0] == ["model", "autocast, ms", "fp32", "autoamp", "bfloat16"]
    assert cells[2] == ["a", "2000", "2.00", "0.50", "failed"]
    assert cells[4] == ["c", "failed", "failed", "failed", "failed"]
    assert cells[5] == ["geometric mean", "", "1.41", "1.00", "0.50"]


def test_what_is_written_has_every_figure_and_every_failure(tmp_path: Path) -> None:
    failed = {**TWO[0], "failures": {"bfloat16": "RuntimeError: no kernel"}}
    text = training.write([failed, TWO[1]], tmp_path)
    assert text == (tmp_path / "training.md").read_text()
    assert "- a, bfloat16: RuntimeError: no kernel" in text
    assert json.loads((tmp_path / "training.json").read_text())["models"][1] == TWO[1]
    drawn = ET.fromstring((tmp_path / "training.svg").read_text())
    titles = [e.text for e in drawn.iter() if e.tag.endswith("title")]
    assert len(titles) == 3 + 4
    assert "b, bfloat16: 0.500" in titles


def test_a_way_that_raises_leaves_the_others() -> None:
    steps: list[str] = []

    def make(way: str) -> step_times.Step:
        if way == "slow":
            raise RuntimeError("no kernel\nand more")
        return lambda: steps.append(way)

    ways = ("autocast", "slow", "autoamp")
    found = step_times.measured("m", {w: lambda w=w: make(w) for w in ways})
    assert found["failures"] == {"slow": "RuntimeError: no kernel"}
    assert {w: len(each["seconds"]) for w, each in found["ways"].items()} == {
        "autocast": step_times.ROUNDS,
        "autoamp": step_times.ROUNDS,
    }
    assert len(steps) == 2 * (step_times.ROUNDS + step_times.WARM_UP)


def test_a_step_is_every_batch_and_one_step_of_the_optimizer() -> None:
    model = nn.Linear(2, 1, bias=False)
    seen: list[Any] = []
    model.register_forward_hook(lambda *_: seen.append(model.weight.grad))
    case = Case("m", lambda: model, lambda _: ((torch.ones(1, 2),), {}), torch.sum)
    nn.init.zeros_(model.weight)
    step_times.step_of(case, (model, nullcontext, case.inputs(0)), 3)()
    assert [g is None for g in seen] == [True, False, False]
    assert torch.allclose(model.weight, torch.tensor(-3e-6))
    assert model.weight.grad is None


@pytest.mark.slow
def test_inductor_counts_what_it_compiles() -> None:
    x = torch.ones(100, 100)
    with compiled.inductors_count() as count:
        torch.compile(lambda t: (t + 1).relu().sum(0))(x)
    assert count == {"bytes": 4 * (100 * 100 + 100), "kernels": 1}
    with compiled.inductors_count() as count:
        pass
    assert count == {"bytes": 0, "kernels": 0}


@pytest.mark.slow
def test_a_refresh_reads_fp32_and_writes_16_bits() -> None:
    model = mlp()
    assert compiled.refreshed_bytes(model) == 0
    autoamp.convert(model, precision="bf16", do_no_harm=False)
    model(torch.randn(4, 8)).sum().backward()
    weights = sum(p.numel() for p in model.parameters())
    assert compiled.refreshed_bytes(model) == 6 * weights
