"""What commands answer: on which stream, in which files, and with which exit code."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoamp
from autoamp import api
from autoamp.dtypes import LOW_DTYPES
from autoamp.messages import advice, on_command_line
from autoamp.passes import options as pass_options
from autoamp.tools import bench_ways, export_targets
from autoamp.training.options import Options
from autoamp_cli import words
from autoamp_cli.export import export
from tests.cli.calls import FORCED, call, timeless
from tests.says import says
from tests.small_models import BF16

FP16 = "--precision fp16 --convert-anyway"
BENCH = "bench nets:{} --ways half --rounds 2 --steps 2"


def explained() -> autoamp.Report:
    from nets import small  # type: ignore[import-not-found]

    model, args = small()
    return autoamp.explain(model, *args, **BF16)


# -- explain ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["thrice", "Net.example"])
def test_options_reach_explain(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    real: Callable[..., Any] = api.explain

    def explain(model: nn.Module, *args: Any, **given: Any) -> Any:
        seen.append((args, given))
        return real(model, *args, kwargs=given["kwargs"])

    monkeypatch.setattr(api, "explain", explain)
    given = "--precision fp16 --rules torch-cuda --placement forced --convert-anyway"
    assert call(f"explain nets:{name} {given} --device cuda:sm_90").exit_code == 0
    call(f"explain nets:{name}")
    options = {"precision": "fp16", "rules": "torch-cuda", "placement": "forced"}
    of_factory = {"kwargs": {"times": 3} if name == "thrice" else {}}
    (args, named), (_, bare) = seen
    assert torch.equal(args[0], torch.ones(64, 64))
    wanted = {**options, "do_no_harm": False, "device": "cuda:sm_90"}
    assert named == {**wanted, **of_factory}
    assert bare == {"device": None, **of_factory}


def test_a_report_is_printed_and_written_as_the_library_makes_it(
    tmp_path: Path,
) -> None:
    short, full = (call(f"explain nets:small {FORCED} {f}") for f in ("", "--full"))
    files = "--json a.json --dot a.dot"
    beside = call(f"explain nets:small {FORCED} {files}")
    assert (short.exit_code, beside.exit_code) == (0, 0)
    report = explained()
    with on_command_line():  # which names the command's flags
        assert timeless(short.stdout) == timeless(f"{report}\n")
        assert timeless(full.stdout) == timeless(f"{report.full()}\n")
    assert timeless(beside.stdout) == timeless(f"{report}\n")
    assert (tmp_path / "a.json").read_text() == report.to_json()
    assert (tmp_path / "a.dot").read_text() == report.to_dot()


def test_what_the_model_prints_goes_to_stderr() -> None:
    told = call(f"explain nets:small {FORCED} --json -")
    assert told.stdout == explained().to_json()
    says(told.stderr, "the module is imported\n", "the model runs\n")


@pytest.mark.parametrize("node", ["exp", "0:exp"])
def test_why_prints_one_node(node: str) -> None:
    told = call(f"explain nets:small {FORCED} --why {node}")
    assert told.exit_code == 0, told.output
    says(told.stdout, "graph 0", op="aten::exp.default")
    assert "What stayed in fp32" not in told.stdout


# -- compare ---------------------------------------------------------------------------


def test_a_comparison_is_printed_and_gives_a_rules_file(tmp_path: Path) -> None:
    told = call(f"compare nets:small {FORCED}")
    assert told.exit_code == 0, told.output
    says(told.stdout, "Net", "bf16", "fp32")
    says(told.stderr, "the model runs\n")
    given = f"compare nets:small {FORCED} --tolerance 1e-6 --to-rules"
    assert call(f"{given} keep.toml").exit_code == 0
    assert autoamp.Rules.load(tmp_path / "keep.toml").keep
    bad = call(f"{given} /no/such/keep.toml")
    assert bad.exit_code == 2
    says(bad.stderr, "/no/such/keep.toml")


def test_a_tolerance_that_no_set_reaches_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., Any] = api.compare

    def out_of_reach(*args: Any, tolerance: float, **given: Any) -> Any:
        return real(*args, **given).with_keep(None, tolerance)

    monkeypatch.setattr(api, "compare", out_of_reach)
    given = "--tolerance 1e-6 --to-rules none.toml"
    missed = call(f"compare nets:small {FORCED} {given}")
    assert (missed.exit_code, (tmp_path / "none.toml").exists()) == (1, False)
    says(missed.stdout, "no set of modules")


# -- export, and diff of what it writes ------------------------------------------------


def test_files_of_two_targets_and_a_report_have_one_plan() -> None:
    of = "nets:layers"
    told = call(f"export {of} --out a.pt2 {FP16}")
    assert told.exit_code == 0, told.output
    says(told.output, "a.pt2", "3 of 3 float ops", "fp16")
    told = call(f"export {of} --target onnx --out a.onnx {FP16}")
    assert told.exit_code == 0, told.output
    assert call(f"explain {of} --json a.json {FP16}").exit_code == 0
    told = call("diff a.pt2 a.onnx a.json")
    assert told.exit_code == 0, told.output
    assert told.output.count("No difference in 3 ops") == 2
    each = json.loads(call("diff a.json a.pt2 a.onnx --json").output)
    assert [one["new"] for one in each] == ["a.pt2", "a.onnx"]
    call(f"export {of} --out b.pt2 {FORCED}")
    told = call("diff a.pt2 b.pt2")
    assert told.exit_code == 1
    says(told.output, "bf16")


def test_a_program_of_any_sizes() -> None:
    told = call(f"export nets:scaled --out a.pt2 --dynamic {FP16}")
    assert told.exit_code == 0, told.output
    module = torch.export.load("a.pt2").module()
    assert module(torch.randn(7, 64), scale=torch.randn(7, 1)).shape == (7, 64)


def test_diff_of_a_file_without_a_plan() -> None:
    plain = torch.export.export(nn.Linear(8, 8), (torch.ones(2, 8),))
    torch.export.save(plain, "a.pt2")
    told = call("diff a.pt2 a.pt2")
    assert told.exit_code == 2
    says(told.stderr, "a.pt2", "no plan")


# -- bench -----------------------------------------------------------------------------


def test_bench_prints_its_table_and_writes_every_file(tmp_path: Path) -> None:
    files = "--json b.json --markdown b.md"
    done = call(f"{BENCH.format('small')} {files}")
    assert done.exit_code == 0, done.output
    says(done.stdout, "Net", "training", "bf16")
    document = json.loads((tmp_path / "b.json").read_text())
    assert document["schema"] == 1
    assert [row["way"] for row in document["rows"]] == ["fp32", ".bfloat16()"]
    says((tmp_path / "b.md").read_text(), "| fp32 |")
    assert not [*tmp_path.glob(".*")], "a draft was left"
    done = call(f"{BENCH.format('small')} --inference --json -")
    assert json.loads(done.stdout)["work"] == "inference"


@pytest.mark.parametrize("name", ["stops", "stops_early"])
def test_ctrl_c_prints_what_was_measured_and_writes_nothing(
    name: str, tmp_path: Path
) -> None:
    done = call(f"bench nets:{name} --ways half --rounds 9 --json b.json")
    assert done.exit_code == 130
    assert (".bfloat16()" in done.stdout) == (name == "stops")
    assert (done.stdout == "") == (name == "stops_early")
    says(done.stderr, "Interrupted", "above" if name == "stops" else "before a step")
    assert not (tmp_path / "b.json").exists()


# -- words -----------------------------------------------------------------------------


def test_words_in_the_help_are_the_packages_own() -> None:
    """The help does not import the package, which has the same words."""
    assert words.PLACEMENTS == pass_options.PLACEMENTS
    assert tuple(LOW_DTYPES) == words.PRECISIONS
    assert bench_ways.KINDS == words.WAYS
    assert tuple(export_targets.targets()) == words.TARGETS
    for category in words.CATEGORIES:
        assert call(f"rules list --category {category}").exit_code == 0


LISTS = ("keep", "allow", "deny", "infer", "clear")
NAMES = [field.name for field in dataclasses.fields(Options)]
KEYWORD = re.compile(rf"\b({'|'.join((*NAMES, 'device'))})=(?![^\n]* in Python)")
"""An option as Python writes it, without the word that it is Python's."""


@pytest.mark.parametrize("by_variables", [False, True])
def test_each_option_is_advised_as_the_commands_take_it(
    by_variables: bool,
) -> None:
    flags = {name for each in export.params for name in each.opts}
    for option in NAMES:
        value = ["aten::gelu"] if option in LISTS else False
        with on_command_line():
            text = advice(option, value, by_variables=by_variables)
        assert set(re.findall(r"--[\w-]+", text)) <= flags, text
        assert ("--" in text) != ("in Python" in text), text
        if option in LISTS:
            assert text == f"--{option} aten::gelu"


@pytest.mark.parametrize(
    "line",
    [
        "explain nets:layers --full",
        "explain nets:layers --device cpu:plain",
        "explain nets:layers --why linear",
        "compare nets:layers --tolerance 1e-9",
        "export nets:layers --target onnxruntime-cpu --out a.onnx",
    ],
)
def test_no_command_advises_keywords(line: str) -> None:
    for flags in ("", FP16, "--precision bf16"):
        told = call(f"{line} {flags}")
        assert told.exit_code in (0, 2), told.output
        assert not KEYWORD.search(told.output), told.output
