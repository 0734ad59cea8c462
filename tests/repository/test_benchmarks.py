"""Benchmarks measure what they say, and their pages are made of their figures.

The figures themselves are not judged here.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch

import autoamp
from benchmarks import __main__ as harness
from benchmarks import bytes as bytes_table
from benchmarks import compiled, emitted, first_table, processes, report, step_times
from benchmarks.models import MICRO_BATCHES, Workload, gpu_cases, workloads
from benchmarks.setting import Setting, capability
from benchmarks.timing import interleaved, ratios
from benchmarks.ways import low_way, prepared, scaler_of
from tests.small_models import mlp

QUICK = workloads(quick=True)
MLP = next(w for w in QUICK if w.name.startswith("mlp") and w.kind == "training")

PAGES = {
    "automatic-cpu": "automatic",
    "cpu-quick": "__main__",
    "exported-small": "exported",
    "gradients-cpu": "gradients",
    "rows-cpu": "rows",
    "scaling-cpu": "scaling",
    "calibrate-nvidia-h100-80gb-hbm3": "speeds",
} | {
    name: name
    for name in (
        *("budget", "calibration", "conformance", "curves", "explain", "exported"),
        *("first_call", "guard", "layouts", "overhead", "page", "parallel", "ranks"),
        *("short_programs", "zoo"),
    )
}
"""Pages of tables that are measured at one go, and their modules."""

H100 = "nvidia-h100-80gb-hbm3"
PAGES_OF_MODELS = {
    "decoding": ("decoding", Setting()),
    "meshes": ("meshes", Setting()),
    "prediction": ("prediction", Setting()),
    "training": ("training", Setting()),
    f"training-bf16-{H100}": ("training", Setting("cuda")),
    f"training-fp16-{H100}": ("training", Setting("cuda", "fp16")),
}
OLDER = {"bytes", "compiled", "inference"}
"""Pages that were measured before the table had all of its columns of today."""


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
    if table.plot is not None:
        assert table.plot(rows) == (report.RESULTS / f"{name}.svg").read_text()


def test_every_page_is_one_of_these() -> None:
    pages = {path.stem for path in report.RESULTS.glob("*.md")}
    elsewhere = {"mutation", "trust"}  # of the mutants, and of the conformance tests
    assert pages == {*PAGES, *PAGES_OF_MODELS, *OLDER, *elsewhere}


def test_readmes_table_is_made_of_the_committed_tables() -> None:
    text = (report.ROOT / "README.md").read_text("utf-8")
    assert report.markdown(first_table.HEADER, first_table.rows()) in text
    assert len(text.splitlines()) <= 130


COMMANDS = {
    "__main__": "--quick --only mlp --peers autocast --rounds 1",
    "guard": "--model small",
    "gradients": "--only mlp",
    "scaling": "--quick --only mlp --rounds 1",
    "automatic": "--only mlp --rounds 2",
    "inference": "--quick --rounds 2",
    "overhead": "",
    "rows": "--rounds 1",
    "short_programs": "--only agent --rounds 1",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_writes_its_page_and_its_figures(name: str, tmp_path, capsys) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    threads = torch.get_num_threads()
    try:
        module.TABLE.main(["--out", str(tmp_path), *COMMANDS[name].split()])
    finally:
        torch.set_num_threads(threads)
    (page,) = tmp_path.glob("*.md")
    figures = json.loads(page.with_suffix(".json").read_text())
    assert page.read_text() == module.text(figures)
    assert page.read_text() in capsys.readouterr().out
    assert torch.__version__ in figures["capability"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "resnet50"])
def test_a_model_is_timed_in_a_process_of_its_own(name: str, tmp_path) -> None:
    training = importlib.import_module("benchmarks.training")
    assert training.TABLE.main(["--quick", "--out", str(tmp_path), name]) == 0
    (row,) = processes.kept(tmp_path / "training-quick.json").values()
    assert set(row["ways"]) == {"fp32", "autocast", "autoamp", "bfloat16"}


def test_each_round_has_every_step_and_no_step_has_one_predecessor() -> None:
    calls: list[str] = []
    steps = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    taken = interleaved(steps, rounds=12)
    rounds = ["".join(calls[i : i + 3]) for i in range(0, 36, 3)]
    assert {"".join(sorted(each)) for each in rounds} == {"abc"}
    before_c = Counter(one for one, other in itertools.pairwise(calls) if other == "c")
    assert before_c["a"] >= 3
    assert before_c["b"] >= 3
    assert [len(times) for times in taken.values()] == [12, 12, 12]


def test_ratio_is_the_median_of_the_ratios_of_each_round() -> None:
    taken = {"base": [1.0, 10.0, 2.0], "x": [2.0, 30.0, 2.0]}
    assert ratios(taken, "base") == {"base": 1.0, "x": 2.0}


def test_a_training_step_is_all_micro_batches_and_one_optimizer_step() -> None:
    many = Workload("mlp", "micro-batches", MLP.case)
    forwards: list[int] = []
    made, step = harness.ready(many, "fp32", Setting())
    made.model.register_forward_hook(lambda *_: forwards.append(1))
    before = [p.detach().clone() for p in made.model.parameters()]
    step()
    assert len(forwards) == MICRO_BATCHES
    pairs = zip(made.model.parameters(), before, strict=True)
    assert all(not torch.equal(p, b) for p, b in pairs)
    assert all(p.grad is None for p in made.model.parameters())


def test_figures_of_one_workload() -> None:
    chosen = ["fp32", "autocast", "model.bfloat16()"]
    found = harness.run(MLP, chosen, rounds=2, device="cpu")
    assert found["fp32"]["time_ratio"] == 1.0
    assert found["fp32"]["casts"] == 0
    # 2 weights, 2 biases, the input; up: the loss's `.float()`; the backward of these.
    assert found["autocast"]["casts"] == 11
    assert found["autocast"]["low_share"] == 1.0
    assert found["autocast"]["saved_weight_copies"] > 0
    assert found["model.bfloat16()"]["saved_bytes"] < found["fp32"]["saved_bytes"]
    assert len(harness.rows("mlp (training)", found)) == len(chosen)


def test_a_failing_peer_is_told_and_the_others_go_on(monkeypatch) -> None:
    def fail(case: object, way: str, *_: Any) -> Any:
        if way == "autocast":
            raise RuntimeError("no such thing here\nand more")
        return prepared(case, way, *_)  # type: ignore[arg-type]

    monkeypatch.setattr(harness, "prepared", fail)
    found = harness.run(MLP, ["fp32", "autocast"], 1, "cpu")
    assert found["autocast"] == {"failed": "RuntimeError: no such thing here"}
    assert found["fp32"]["time_ratio"] == 1.0
    assert harness.rows("mlp (training)", found)[1][3] == "failed"


@pytest.mark.parametrize("arguments", [["--peers", "fp33"], ["--only", "nothing"]])
def test_an_unknown_name_is_an_error(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match=arguments[1]):
        harness.TABLE.main(arguments)


def test_autocast_scales_its_loss_in_fp16() -> None:
    fp16 = Setting(precision="fp16")
    assert low_way(fp16) == "float16"
    assert scaler_of("autocast", fp16) is not None
    assert scaler_of("autoamp", fp16) is None
    assert scaler_of("autocast", Setting()) is None


def test_markdown_wants_whole_rows() -> None:
    assert report.markdown(["a", "b"], [["x", "1"]]).splitlines() == [
        "| a   |   b |",
        "| --- | --: |",
        "| x   |   1 |",
    ]
    with pytest.raises(ValueError, match="needs 2 cells"):
        report.markdown(["a", "b"], [["x"]])


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


def test_a_copy_without_its_history_is_told_its_commit(monkeypatch) -> None:
    monkeypatch.setenv(report.COMMIT, "c0ffee")
    assert report.commit() == "c0ffee"
    monkeypatch.delenv(report.COMMIT)
    monkeypatch.setattr(report.shutil, "which", lambda _: None)
    assert report.commit() == "unknown"


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


def counted(name: str, **steps: int) -> processes.Row:
    """A row in which a way's forward is half its step, and what it saves a tenth."""
    ways = {
        way: {"step": step, "forward": step // 2, "saved": step // 10}
        for way, step in steps.items()
    }
    return row(name, **ways)


def cells_of(table: str) -> list[list[str]]:
    return [[c.strip() for c in line.split("|")[1:-1]] for line in table.splitlines()]


TWO = [
    counted("a", fp32=8_000_000, autocast=4_000_000, autoamp=2_000_000, bfloat16=1),
    counted("b", fp32=8_000_000, autocast=1_000_000, autoamp=8_000_000, bfloat16=1),
]


def test_the_table_of_bytes_has_ratios_and_a_bound() -> None:
    half = counted("half", fp32=8, autoamp=4)
    bounded = counted("c", autoamp=3_000_000)
    bounded["ways"]["autoamp"]["bound"] = 2_000_000
    cells = cells_of(bytes_table.table([*TWO, half, bounded]))
    assert cells[2] == ["a", "8", "4", "2", "1e-06", *["0.500"] * 3, "-", "-"]
    assert cells[4][2] == "failed"
    assert cells[5][-2:] == ["2", "1.500"]
    assert cells[-1] == ["geometric mean", *[""] * 4, *["2.000"] * 3, "", ""]
    assert processes.mean([], "step") is None


def test_the_plot_of_bytes_has_a_bar_for_every_figure() -> None:
    zoo = [counted("zoo/c", autocast=4, autoamp=3), counted("zoo/d", fp32=4)]
    drawn = ET.fromstring(bytes_table.plot([*TWO, *zoo]))
    titles = [e.text for e in drawn.iter() if e.tag.endswith("title")]
    assert len(titles) == 2 * 4 + 1
    assert "a, autoamp: 0.250" in titles
    assert "zoo/c: 0.750" in titles


def test_the_table_of_times_has_geometric_means_of_what_there_is() -> None:
    rows = [
        row(name, **{way: {"seconds": taken} for way, taken in ways.items()})
        for name, ways in {
            "a": {"fp32": [4.0, 9.0, 2.0], "autocast": [2.0, 3.0, 2.0]},
            "b": {"fp32": [1.0], "autocast": [1.0], "bfloat16": [0.5]},
            "c": {"fp32": [1.0]},
        }.items()
    ]
    cells = cells_of(step_times.table(rows, ("fp32", "autocast", "bfloat16")))
    assert cells[0] == ["model", "autocast, ms", "fp32", "bfloat16"]
    assert cells[2] == ["a", "2000", "2.00", "failed"]
    assert cells[4] == ["c", "failed", "failed", "failed"]
    assert cells[5] == ["geometric mean", "", "1.41", "0.50"]


def test_a_table_of_a_gpu_shows_memory_and_kernels() -> None:
    way = {"seconds": [0.1], "held": 2**20, "peak": 2**21, "kernels": 7, "busy": 0.05}
    shown = step_times.gpu_table([row("net", autocast=way)], ["autocast", "autoamp"])
    assert "3, 7, 50.0" in shown
    assert "failed" in shown


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
        found = counted(name, fp32=8, autocast=4, autoamp=4)
        if taken == ["a"]:
            found["failures"] = {"bfloat16": "RuntimeError: no kernel"}
        return found

    def fill(*names: str, again: bool = False) -> str:
        return bytes_table.TABLE.fill(names, tmp_path, Setting(), take, again=again)

    with pytest.raises(KeyboardInterrupt):
        fill("a", "zoo/b", "dies")
    kept = processes.kept(tmp_path / "bytes.json")
    assert [*kept] == ["a", "zoo/b"]
    text = (tmp_path / "bytes.md").read_text()
    assert "Not counted:\n\n- a, bfloat16: RuntimeError: no kernel" in text
    taken[:] = ["earlier"]
    text = fill("a", "zoo/b", "dies")
    assert taken == ["earlier", "a", "dies"]
    assert "Not counted" not in text
    assert text == (tmp_path / "bytes.md").read_text()
    taken[:] = ["earlier"]
    fill("zoo/b", again=True)
    assert taken == ["earlier", "zoo/b"]


def test_a_process_that_ends_badly_gives_a_row(monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    got = processes.in_a_process("gpt2", "benchmarks.bytes")
    assert got["ways"] == {}
    assert got["failures"] == {"all": "exit 1: no message"}


def test_results_are_named_for_what_is_not_as_by_default() -> None:
    assert Setting().stem("training") == "training"
    assert Setting(quick=True).stem("inference") == "inference-quick"
    assert Setting(precision="fp16").stem("training") == "training-fp16"
    assert "cores" in capability("cpu")
    names = [case.name for case in gpu_cases(quick=False)]
    assert names[:4] == ["gpt2", "bert", "llama", "t5"]


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
