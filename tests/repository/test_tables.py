"""Benchmarks measure what they say, and their pages are made of their figures.

The figures themselves are not judged here.
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import (
    compiled,
    curves,
    emitted,
    first_chart,
    first_table,
    processes,
    report,
    step_times,
    training,
)
from benchmarks.curves import Digits
from benchmarks.models import CONVOLVE, MICRO, PAPER, WRITTEN
from benchmarks.setting import Setting
from benchmarks.step_times import interleaved, ratios
from benchmarks.ways import prepared
from tests.metrics import (
    compare_with_autocast,
    output_and_grad_errors,
    relative_error,
    training_step,
)
from tests.models import BY_NAME
from tests.says import says

PAGES = {
    "calibrate-nvidia-h100-80gb-hbm3": "speeds",
    "curves": "curves",
    "short_scripts": "short_scripts",
    "zoo": "zoo",
}
"""Pages of tables that are measured at one go, and their modules."""

H100 = "nvidia-h100-80gb-hbm3"
PAGES_OF_MODELS = {
    "compiled": ("compiled", Setting()),
    "memory": ("memory", Setting()),
    "memory-bf16-fake-cuda": ("memory", Setting("cuda", fake=True)),
    "prediction": ("prediction", Setting()),
    "training": ("training", Setting()),
    f"training-bf16-{H100}": ("training", Setting("cuda")),
    f"training-fp16-{H100}": ("training", Setting("cuda", "fp16")),
}
ELSEWHERE = {"mutation", "trust", "bytes", "inference"}
"""Pages of the mutants, of the conformance tests, and two of older columns."""


def recorded(name: str) -> tuple[dict[str, Any], str]:
    stem = report.RESULTS / name
    figures = json.loads(stem.with_suffix(".json").read_text())
    return figures, stem.with_suffix(".md").read_text()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_made_of_its_figures(name: str) -> None:
    figures, page = recorded(name)
    assert importlib.import_module(f"benchmarks.{PAGES[name]}").text(figures) == page


@pytest.mark.parametrize("name", PAGES_OF_MODELS)
def test_a_page_and_its_plot_are_made_of_its_rows(name: str) -> None:
    module, setting = PAGES_OF_MODELS[name]
    figures, page = recorded(name)
    table = importlib.import_module(f"benchmarks.{module}").TABLE
    rows, machine = figures["models"], figures.get("capability", "")
    assert table.text(rows, setting, machine) == page


def test_every_other_page_names_the_program_and_the_commit_that_made_it() -> None:
    others = {path.stem for path in report.RESULTS.glob("*.md")}
    for name in others - {*PAGES, *PAGES_OF_MODELS, *ELSEWHERE}:
        first = (report.RESULTS / f"{name}.md").read_text().splitlines()[0]
        said = re.fullmatch(
            r"Made by (benchmarks/\w+\.py) at commit [0-9a-f]{8}; "
            r"the program is no longer in the repository\.",
            first,
        )
        assert said, (name, first)
        assert not (report.ROOT / said[1]).exists()


def test_readmes_table_and_chart_are_made_of_the_committed_table() -> None:
    text = (report.ROOT / "README.md").read_text("utf-8")
    assert report.markdown(first_table.HEADER, first_table.rows()) in text
    assert len(text.splitlines()) <= 120
    assert first_chart.CHART.read_text() == first_chart.chart()
    chart = first_chart.CHART.relative_to(report.ROOT).as_posix()
    assert text.index(chart) < text.index("\n## "), "the chart is on the first screen"
    assert "do_no_harm=False" not in text.partition("\n## ")[0]


def test_a_figure_that_is_missing_is_said_to_be() -> None:
    measured = {"autocast": {"seconds": [1.0]}, "autoamp": {"seconds": [0.5]}}
    last = "autocast, channels last"
    rows = [row("resnet50", **measured), row("gpt2", **measured)]
    rows.append(row("vit", **measured) | {"failures": {last: "no memory"}})
    lines = step_times.table(rows, ("autocast", "autoamp", last)).splitlines()
    found = [line.split("|")[-2].strip() for line in lines[2:]]
    assert found == ["not measured", "-", "failed", "-"]


def test_the_models_that_convolve_are_those_with_convolutions() -> None:
    cases = {case.name: case for case in (*PAPER, *WRITTEN, MICRO)}
    kinds = (torch.nn.Conv1d, torch.nn.Conv2d)
    has = {
        name
        for name, case in cases.items()
        if any(isinstance(each, kinds) for each in case.model().modules())
    }
    assert has == CONVOLVE


def test_a_way_channels_last_has_weights_and_images_so() -> None:
    case = {case.name: case for case in PAPER}["resnet50"]
    ready = prepared(case, "autocast, channels last")
    pixels = ready.batch[1]["pixel_values"]
    assert pixels.is_contiguous(memory_format=torch.channels_last)
    weights = [p for p in ready.model.parameters() if p.dim() == 4]
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in weights)
    assert (
        not prepared(case, "autocast")
        .batch[1]["pixel_values"]
        .is_contiguous(memory_format=torch.channels_last)
    )


def test_rounds_have_every_step_and_ratios_are_taken_in_each_round() -> None:
    calls: list[str] = []
    steps = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    interleaved(steps, rounds=12)
    rounds = ["".join(calls[i : i + 3]) for i in range(0, 36, 3)]
    assert {"".join(sorted(each)) for each in rounds} == {"abc"}
    before_c = Counter(one for one, other in itertools.pairwise(calls) if other == "c")
    assert min(before_c["a"], before_c["b"]) >= 3, "no step has one predecessor"
    taken = {"base": [1.0, 10.0, 2.0], "x": [2.0, 30.0, 2.0]}
    assert ratios(taken, "base") == {"base": 1.0, "x": 2.0}


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "a.json"
    report.put(file, "old")

    def cut_off(self: Path, text: str) -> int:
        with self.open("w") as half:
            half.write(text[:1])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", cut_off)
    with pytest.raises(KeyboardInterrupt):
        report.put(file, "new")
    monkeypatch.undo()
    assert file.read_text() == "old"


def test_a_hash_of_what_is_emitted_shows_a_change(
    tmp_path, monkeypatch, capsys
) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    few = ["--only", "mlp", "--graphs", "3"]
    monkeypatch.setattr("sys.argv", ["emitted", str(before), *few])
    assert emitted.main() == 0
    again = ["emitted", str(after), "--against", str(before), *few]
    monkeypatch.setattr("sys.argv", again)
    assert emitted.main() == 0
    monkeypatch.setattr(emitted, "code_of", lambda gm: f"{gm.code} # changed")
    assert emitted.main() == 1
    assert "5 differ" in capsys.readouterr().out


# -- tables of models ---------------------------------------------------------------


def row(name: str, **ways: dict[str, Any]) -> processes.Row:
    return {"name": name, "commit": "c0ffee", "ways": ways, "failures": {}}


def test_only_models_with_convolutions_have_a_way_channels_last() -> None:
    ways = ["fp32", "autocast, channels last"]
    assert step_times.ways_of("gpt2", ways) == ["fp32"]
    assert step_times.ways_of("resnet50", ways) == ways


def test_a_way_that_raises_leaves_the_others() -> None:
    steps: list[str] = []

    def make(way: str) -> Any:
        if way == "slow":
            raise RuntimeError("no kernel\nand more")
        return lambda: steps.append(way)

    ways = ("autocast", "slow", "autoamp")
    found = step_times.measured("m", {w: lambda w=w: make(w) for w in ways})
    assert found["failures"] == {"slow": "RuntimeError: no kernel"}
    assert len(steps) == 2 * (step_times.ROUNDS + step_times.WARM_UP)
    assert [*found["ways"]] == ["autocast", "autoamp"]


def test_a_run_goes_on_where_it_was_and_measures_failures_anew(tmp_path: Path) -> None:
    taken: list[str] = []

    def take(name: str) -> processes.Row:
        taken.append(name)
        if name == "dies" and "earlier" not in taken:
            raise KeyboardInterrupt
        found = row(name, autocast={"seconds": [4.0]}, autoamp={"seconds": [2.0]})
        if taken == ["a"]:
            found["failures"] = {"bfloat16": "RuntimeError: no kernel"}
        return found

    def fill(*names: str, again: bool = False) -> str:
        return training.TABLE.fill(names, tmp_path, Setting(), take, again=again)

    with pytest.raises(KeyboardInterrupt):
        fill("a", "b", "dies")
    kept = processes.kept(tmp_path / "training.json")
    assert [*kept] == ["a", "b"]
    text = (tmp_path / "training.md").read_text()
    assert "- a, bfloat16: RuntimeError: no kernel" in text
    taken[:] = ["earlier"]
    text = fill("a", "b", "dies")
    assert taken == ["earlier", "a", "dies"]
    assert "RuntimeError" not in text
    assert text == (tmp_path / "training.md").read_text()
    taken[:] = ["earlier"]
    fill("b", again=True)
    assert taken == ["earlier", "b"]


@pytest.mark.slow
def test_inductor_counts_what_it_compiles() -> None:
    x = torch.ones(100, 100)
    with compiled.inductors_count() as count:
        torch.compile(lambda t: (t + 1).relu().sum(0))(x)
    assert count == {"bytes": 4 * (100 * 100 + 100), "kernels": 1}
    with compiled.inductors_count() as count:
        pass
    assert count == {"bytes": 0, "kernels": 0}


MODES = {mode.name: mode for mode in curves.MODES}


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_the_command_writes_a_table_and_curves_that_fall(tmp_path, capsys) -> None:
    arguments = ["--quick", "--seeds", "1", "--processes", "1"]
    arguments += ["--modes", "autoamp bf16"]
    assert curves.main([*arguments, "--out", str(tmp_path)]) == 0
    text = (tmp_path / "curves-quick.md").read_text()
    assert text in capsys.readouterr().out
    found = json.loads((tmp_path / "curves-quick.json").read_text())["results"]
    names = [(result["task"], result["mode"]) for result in found]
    assert names == [
        (task, mode)
        for task in ("digits", "chars")
        for mode in ("fp32", "autoamp bf16")
    ]
    for result in found:
        assert f"| {result['mode']} |" in " ".join(text.split())
        (run,) = result["runs"]
        assert run["curve"][-1] < 0.9 * run["curve"][0]
        assert run["skipped_steps"] == []
    assert found[0]["runs"][0]["curve"] != found[1]["runs"][0]["curve"]


def runs(*metrics: float) -> list[dict[str, object]]:
    """What `train` returns, as far as it is judged."""
    rest = {"metric_in_fp32": 0.0, "curve": [1.0], "skipped_steps": []}
    return [{"metric": metric, **rest} for metric in metrics]


@pytest.mark.parametrize(
    ("metrics", "within", "text"),
    [
        ((97.2, 96.2), True, "+0.20 ± 0.00 points, within 0.5"),
        ((98.0, 95.8), True, "within 0.5, by less than two standard errors"),
        ((97.7, 96.7), False, "NOT within 0.5"),
        ((math.nan, 96.0), False, "NOT within 0.5"),
    ],
)
def test_the_verdict(metrics: tuple[float, ...], within: bool, text: str) -> None:
    task = Digits(1)
    found = curves.summary(task, runs(*metrics), runs(97.0, 96.0))
    verdict, line = curves.verdict(task, MODES["autoamp bf16"], found)
    assert verdict is within
    assert text in line


BF16 = torch.bfloat16


def test_relative_error() -> None:
    a = {"x": torch.tensor([3.0, 0.0]), "n": torch.tensor(7)}
    b = {"x": torch.tensor([0.0, 4.0]), "n": torch.tensor(9)}
    assert relative_error(a, b) == pytest.approx(5 / 4)
    assert relative_error(a, a) == 0.0
    assert relative_error(torch.ones(2), torch.zeros(2)) == math.inf
    assert math.isnan(relative_error(torch.tensor([math.nan]), torch.ones(1)))
    z = torch.ones(1, dtype=torch.cfloat)
    assert relative_error(z * 1j, z) == pytest.approx(math.sqrt(2))
    with pytest.raises(ValueError):
        relative_error(torch.ones(2), torch.ones(3))


def test_a_missing_gradient_is_not_overlooked() -> None:
    case = BY_NAME["mlp"]
    model = case.model()
    whole = training_step(model, case.loss, case.inputs(0))
    model.get_parameter("0.weight").requires_grad_(requires_grad=False)
    part = training_step(model, case.loss, case.inputs(0))
    with pytest.raises(ValueError) as raised:
        output_and_grad_errors([part], [whole])
    says(raised, "0.weight")


def test_autocast_measures_as_itself_and_fp32_as_exact() -> None:
    case = BY_NAME["mlp"]
    record = compare_with_autocast(case, lambda model: model)
    assert record.converted.output_error == record.converted.grad_error == 0.0
    assert record.converted.counts.low_flops == 0
    assert record.converted.output_dtypes == (torch.float32,)
    assert record.autocast.output_dtypes == (BF16,)
    assert record.autocast.counts.low_share == 1.0
    assert 1e-4 < record.rounded.grad_error < record.autocast.grad_error < 1e-2
    # 3 weights, 3 biases, the input; the output's gradient; 6 gradients and no more.
    assert record.autocast.counts.cast_count(phase="forward") == 8
    assert record.autocast.counts.cast_count(source="weight") == 6
