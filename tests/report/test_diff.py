"""Saved reports: how two are compared, and which files are no reports."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import autoamp
from autoamp.passes.report_rows import SavedReport
from autoamp.passes.saved_reports import diff, load
from autoamp_cli import main
from tests.report.saved_reports import cast, document, layers, saved, text
from tests.says import says

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "report-schema.md"


def changes(old: SavedReport, new: SavedReport) -> list[tuple[str, str, str]]:
    """(name in the old report, name in the new one, new precision) of each change."""
    return [(c.old.name, c.new.name, c.new.precision) for c in diff(old, new).changed]


# -- the comparison --------------------------------------------------------------------


def test_one_op_that_changed_precision_is_the_only_difference() -> None:
    ops = layers(3)
    casts = (cast("input_0"), cast("relu_2", "up"))
    same = diff(saved(ops, casts=casts), saved(ops, casts=casts))
    assert (same.is_empty, same.same) == (True, 9)
    fp32 = [*ops[:3], ("linear", "h.1", "fp32"), *ops[4:]]
    found = diff(saved(ops), saved(fp32))
    assert (found.is_empty, found.same) == (False, 8)
    assert changes(saved(ops), saved(fp32)) == [("linear_1", "linear_1", "fp32")]
    assert changes(saved(fp32), saved(ops)) == [("linear_1", "linear_1", "bf16")]


@pytest.mark.parametrize("at", [0, 1, 7, 45, 89, 90])
def test_an_inserted_op_is_one_difference(at: int) -> None:
    ops = layers(30)
    longer = [*ops[:at], ("add", "residual", "fp32"), *ops[at:]]
    found = diff(saved(ops), saved(longer))
    assert [(op.module, op.op) for op in found.appeared] == [
        ("residual", "aten::add.default")
    ]
    assert (found.changed, found.vanished, found.same) == ((), (), 90)
    back = diff(saved(longer), saved(ops))
    assert [op.module for op in back.vanished] == ["residual"]
    assert (back.changed, back.appeared, back.same) == ((), (), 90)


def test_a_change_is_seen_behind_an_inserted_op() -> None:
    ops = layers(10)
    longer = [("add", "residual", "fp32"), *ops]
    longer[-2] = ("add", "h.9", "fp32")
    found = diff(saved(ops), saved(longer))
    assert changes(saved(ops), saved(longer)) == [("add_9", "add_10", "fp32")]
    assert [op.name for op in found.appeared] == ["add"]


def test_a_name_that_has_come_to_mean_another_op_is_not_believed() -> None:
    """The first relu of both reports is `relu`, of the same module and source line."""
    old = [("conv1", "a", "bf16"), ("relu", "", "bf16"), ("conv2", "b", "bf16")]
    old += [("relu", "", "fp32")]
    new = [("conv0", "z", "fp32"), ("relu", "", "fp32"), *old]
    found = diff(saved(old), saved(new))
    assert [op.name for op in found.appeared] == ["conv0", "relu"]
    assert (found.changed, found.vanished, found.same) == ((), (), 4)


def test_modules_that_were_renamed_keep_their_ops() -> None:
    ops = layers(4)
    renamed = [(op, module.replace("h.", "blocks."), low) for op, module, low in ops]
    renamed[4] = ("add", "blocks.1", "fp32")
    # Less than half of the modules in common: another graph, and none of its ops.
    assert diff(saved(ops), saved(renamed)).graphs_vanished == ("0",)
    some = [*ops[:8], *renamed[8:]]
    some[9] = ("linear", "blocks.3", "fp32")
    assert changes(saved(ops), saved(some)) == [("linear_3", "linear_3", "fp32")]


def test_casts_added_and_removed() -> None:
    ops = layers(3)
    kept = cast("h_0_weight", "weight")
    casts = (cast("relu_1", "up"), cast("input_0"), cast("input_1", size=8))
    old = saved(ops, casts=(kept, cast("h_1_weight", "weight"), *casts))
    longer = [("add", "residual", "bf16"), ("relu", "residual", "bf16"), *ops]
    # `relu_1` is `relu_2` now, and `input_1` is `input_2`.
    casts = (cast("relu_2", "up"), cast("input_2", size=8), cast("add_1"))
    new = saved(longer, casts=(kept, cast("h_2_weight", "weight"), *casts))
    found = diff(old, new)
    assert [each.value for each in found.casts_added] == ["h_2_weight", "add_1"]
    assert [each.value for each in found.casts_removed] == ["h_1_weight", "input_0"]


def test_graphs_appear_vanish_and_move() -> None:
    a, b, c = layers(2), [("exp", "m", "fp32")] * 4, [("tanh", "n", "bf16")] * 5
    assert diff(saved(a), saved(a, b)).graphs_appeared == ("1",)
    assert diff(saved(a, b), saved(a)).graphs_vanished == ("1",)
    moved = diff(saved(a, b), saved(c, a, b))
    assert moved.graphs_appeared == ("0",)
    assert (moved.graphs_vanished, moved.same) == ((), 10)


def test_an_unrolled_loop_is_compared_in_seconds() -> None:
    steps = [("mul", "", "bf16"), ("add", "", "bf16"), ("tanh", "", "fp32")] * 3000
    other = [*steps[:4000], ("exp", "", "fp32"), *steps[4000:]]
    other[6001] = (*other[6001][:2], "fp16")
    start = time.process_time()
    found = diff(saved(steps), saved(other))
    assert time.process_time() - start < 20
    assert [op.name for op in found.appeared] == ["exp"]
    assert len(found.changed) == 1


# -- files -----------------------------------------------------------------------------


def test_a_written_report_is_read_back(tmp_path: Path) -> None:
    report = saved(layers(3), casts=(cast("input_0"),))
    path = tmp_path / "a.json"
    path.write_text(text(report))
    assert load(path) == dataclasses.replace(report, path=str(path))


@pytest.mark.parametrize("kind", ["utf-8-sig", "utf-16"])
def test_a_report_is_read_as_windows_writes_it(kind: str, tmp_path: Path) -> None:
    report = saved(layers(3))
    path = tmp_path / "a.json"
    path.write_bytes(text(report).encode(kind))
    assert load(path) == dataclasses.replace(report, path=str(path))


def changed(**keys: Any) -> str:
    return json.dumps({**document(saved(layers(1))), **keys})


def with_op(**keys: Any) -> str:
    (op, *rest) = document(saved(layers(1)))["ops"]
    return changed(ops=[{**op, **keys}, *rest])


def without(key: str) -> str:
    found = document(saved(layers(1)))
    del found[key]
    return json.dumps(found)


HOSTILE: dict[str, tuple[str | bytes, list[str]]] = {
    "empty": ("", ["not JSON"]),
    "no JSON": ("precision: low", ["not JSON"]),
    "not UTF-8": (b"\xff\xfe{}", ["not JSON"]),
    "nested": ("[" * 200_000, ["nested too deeply"]),
    "nested objects": ('{"schema":' * 200_000, ["nested too deeply"]),
    "huge number": (changed(version=0).replace("0", "9" * 5000, 1), ["not JSON"]),
    "a list": ("[]", ['no key "schema"']),
    "null": ("null", ['no key "schema"']),
    "no schema": (without("schema"), ['no key "schema"']),
    "other schema": (changed(schema="npm.lock"), ["schema", "'npm.lock'"]),
    "schema is a list": (changed(schema=[1]), ["schema", "a list"]),
    "newer": (changed(version=3), ["version is 3", "upgrade autoamp"]),
    "version is text": (changed(version="1"), ["version is '1'"]),
    "version is true": (changed(version=True), ["version is True"]),
    "no version": (without("version"), ["version"]),
    "no ops": (without("ops"), ["ops", "must be a list"]),
    "ops is an object": (changed(ops={}), ["ops is an object"]),
    "an op is a number": (changed(ops=[1]), ["ops[0] is 1"]),
    "name is null": (with_op(name=None), ["ops[0].name is None"]),
    "graph is negative": (with_op(graph=-1), ["ops[0].graph is -1"]),
    "no such graph": (with_op(graph=7), ["ops[0]", "no graph 7"]),
    "other precision": (with_op(precision="int8"), ["fp32, fp16, bf16"]),
    "twice": (with_op(name="add"), ["two ops of graph 0"]),
    "graph twice": (
        changed(graphs=[{"graph": 0, "body": "", "device": ""}] * 2),
        ["graphs[1]", "graph 0", "twice"],
    ),
    "model is a list": (changed(model=["x"] * 10**6), ["model is a list"]),
    "escape": (changed(schema="\x1b[2J\n"), [r"'\x1b[2J\n'"]),
    "lone surrogate": (changed(schema="\ud800"), [r"'\ud800'"]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(name: str, tmp_path: Path) -> None:
    content, named = HOSTILE[name]
    path = tmp_path / "a.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(autoamp.OptionError) as raised:
        load(path)
    says(raised, f"{path}: ", *named)
    assert len(str(raised.value)) < 600
    assert "\x1b" not in str(raised.value)


def test_what_is_no_file_or_a_huge_one_is_refused(tmp_path: Path) -> None:
    huge = tmp_path / "a.json"
    with huge.open("wb") as file:
        file.truncate(1 << 30)
    for path, problem in (
        (tmp_path, "directory"),
        (tmp_path / "missing.json", "No such file"),
        (Path("/dev/zero"), "a device or a pipe"),
        ("a\0b", "null byte"),
        (huge, "1,073,741,824 bytes"),
    ):
        with pytest.raises(autoamp.OptionError) as raised:
            load(path)
        says(raised, problem)


# -- the command -----------------------------------------------------------------------


def call(*arguments: str | Path) -> Result:
    runner = CliRunner(env={"COLUMNS": "150", "TERM": "dumb"})
    return runner.invoke(main, ["diff", *map(str, arguments)])


def put(path: Path, report: SavedReport) -> Path:
    path.write_text(text(report))
    return path


def test_the_commands_exit_status(tmp_path: Path) -> None:
    a = put(tmp_path / "a.json", saved(layers(2)))
    b = put(tmp_path / "b.json", saved([*layers(2), ("exp", "", "fp32")]))
    c = put(tmp_path / "c.json", saved(layers(2, "fp16")))
    assert (call(a, a).exit_code, call(a, a, "--json").exit_code) == (0, 0)
    assert "No difference in 6 ops." in call(a, a).stdout
    assert call(a, b).exit_code == 0, "an op that appeared changed no precision"
    assert call(a, a, "--exit-code").exit_code == 0
    assert call(a, b, "--exit-code").exit_code == 1
    assert call(b, a, "--exit-code").exit_code == 1
    d = put(tmp_path / "d.json", saved(layers(2), layers(1)))
    assert (call(a, d).exit_code, call(a, d, "--exit-code").exit_code) == (0, 1)
    assert (call(a, c).exit_code, call(a, c, "--json").exit_code) == (1, 1)
    bad = call(a, tmp_path)
    assert (bad.exit_code, bad.stdout) == (2, "")
    says(bad.stderr, tmp_path, "directory")


def test_the_commands_json(tmp_path: Path) -> None:
    a = put(tmp_path / "a.json", saved(layers(1)))
    b = put(tmp_path / "b.json", saved(layers(1, "fp32")))
    found = json.loads(call(a, b, "--json").stdout)
    assert found == json.loads(json.dumps(diff(load(a), load(b)).to_dict()))
    keys = set(re.findall(r"`([a-z_]+)`", DOCUMENT.read_text().split("of a diff")[1]))
    assert found.keys() <= keys, "every key is documented"


def test_long_tables_are_cut_unless_all_is_asked_for(tmp_path: Path) -> None:
    a = put(tmp_path / "a.json", saved(layers(30)))
    b = put(tmp_path / "b.json", saved(layers(30, "fp32")))
    short, full = call(a, b).stdout, call(a, b, "--full").stdout
    assert "and 70 more; --full shows all" in short
    assert (short.count("bf16 → fp32"), full.count("bf16 → fp32")) == (20, 90)


def test_hostile_names_are_shown_plainly(tmp_path: Path) -> None:
    a = put(tmp_path / "a.json", saved([("exp", "\x1b[2J", "bf16")]))
    b = put(tmp_path / "b.json", saved([("exp", "\x1b[2J", "fp32")], model="\ud800"))
    result = call(a, b)
    assert result.exit_code == 1
    assert "\x1b" not in result.stdout
    assert "The models are Net and \\ud800." in result.stdout
