"""The table of bytes: its ratios, its failures, and going on where a run was ended."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from benchmarks import bytes_table
from benchmarks.bars import bytes_svg
from benchmarks.bytes_step import WAYS
from benchmarks.ratios import mean, ratio


def row(name: str, **steps: int) -> dict[str, Any]:
    """A row in which a way's forward is half its step, and what it saves a tenth."""
    ways = {
        way: {"step": step, "forward": step // 2, "saved": step // 10}
        for way, step in steps.items()
    }
    return {"name": name, "commit": "c0ffee", "ways": ways, "failures": {}}


TWO = [
    row("a", fp32=8_000_000, autocast=4_000_000, autoamp=2_000_000, bfloat16=1),
    row("b", fp32=8_000_000, autocast=1_000_000, autoamp=8_000_000, bfloat16=1),
]


def test_ratios_and_their_geometric_mean() -> None:
    assert [ratio(r, "step") for r in TWO] == [0.5, 8.0]
    assert mean(TWO, "step") == pytest.approx(2.0)
    assert mean([], "step") is None
    cells = [line.split("|") for line in bytes_table.table(TWO).splitlines()]
    first, last = ([c.strip() for c in cells[i]][1:-1] for i in (2, -1))
    halves, twos = ["0.500"] * 3, ["2.000"] * 3
    assert first == ["a", "8", "4", "2", "1e-06", *halves, "-", "-"]
    assert last == ["geometric mean", "", "", "", "", *twos, "", ""]


def test_the_bound_stands_beside_the_bytes_of_a_step() -> None:
    counted = row("a", fp32=8, autocast=4, autoamp=3_000_000, bfloat16=1)
    counted["ways"]["autoamp"]["bound"] = 2_000_000
    first = bytes_table.table([counted]).splitlines()[2]
    assert [c.strip() for c in first.split("|")][-3:-1] == ["2", "1.500"]


def test_a_way_that_failed_has_no_ratio() -> None:
    half = row("half", fp32=8, autoamp=4)
    assert ratio(half, "step") is None
    assert mean([*TWO, half], "step") == pytest.approx(2.0)
    assert "failed" in bytes_table.table([half])


def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    taken: list[str] = []

    def take(name: str) -> dict[str, Any]:
        taken.append(name)
        if name == "dies" and len(taken) > 2:
            raise KeyboardInterrupt
        return row(name, **dict.fromkeys(WAYS, 4))

    with pytest.raises(KeyboardInterrupt):
        bytes_table.fill(["a", "b", "dies"], tmp_path, take=take)
    kept = json.loads((tmp_path / "bytes.json").read_text())["models"]
    assert [r["name"] for r in kept] == ["a", "b"]
    taken.clear()
    bytes_table.fill(["a", "b", "dies"], tmp_path, take=take)
    assert taken == ["dies"]
    bytes_table.fill(["b"], tmp_path, take=take, again=True)
    assert taken == ["dies", "b"]
    assert "zoo" not in (tmp_path / "bytes.svg").read_text()


def test_a_failure_is_in_the_table_and_is_measured_anew(tmp_path: Path) -> None:
    taken: list[str] = []

    def take(name: str) -> dict[str, Any]:
        taken.append(name)
        got = row(name, fp32=8, autocast=4, autoamp=4)
        if len(taken) == 1:
            got["failures"] = {"bfloat16": "RuntimeError: no kernel"}
        return got

    text = bytes_table.fill(["a", "zoo/b"], tmp_path, take=take)
    assert taken == ["a", "zoo/b"]
    assert "- a, bfloat16: RuntimeError: no kernel" in text
    assert text == (tmp_path / "bytes.md").read_text()
    text = bytes_table.fill(["a", "zoo/b"], tmp_path, take=take)
    assert taken == ["a", "zoo/b", "a"]
    assert "Not counted" not in text


def test_one_way_that_raises_leaves_the_others(monkeypatch) -> None:
    class Count:
        def as_json(self) -> dict[str, int]:
            return {"step": 1}

    def count(case: object, way: str) -> Count:
        if way == "autocast":
            raise RuntimeError("no kernel\nand more")
        return Count()

    monkeypatch.setattr(bytes_table, "count_step", count)
    got = bytes_table.measured("gpt2")
    assert list(got["ways"]) == ["fp32", "autoamp", "bfloat16"]
    assert got["failures"] == {"autocast": "RuntimeError: no kernel"}


def test_a_process_that_ends_badly_gives_a_row(monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    got = bytes_table.in_a_process("gpt2")
    assert got["ways"] == {}
    assert got["failures"] == {"all": "exit 1: no message"}


def test_the_plot_has_a_bar_for_every_figure() -> None:
    zoo = [row("zoo/c", autocast=4, autoamp=3), row("zoo/d", fp32=4)]
    drawn = ET.fromstring(bytes_svg(TWO, zoo))
    titles = [e.text for e in drawn.iter() if e.tag.endswith("title")]
    assert len(titles) == len(TWO) * len(WAYS) + 1
    assert "a, autoamp: 0.250" in titles
    assert "zoo/c: 0.750" in titles
