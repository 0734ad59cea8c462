"""The examples: each runs, and its exit status tells whether its result is right."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import (
    convnet_first_experiment,
    demo,
    move_one_op,
    nan_hunt,
    own_backend,
    power,
    resnet50,
    serve,
    served,
)

SCRIPT = Path(demo.__file__)


def run_example(
    *arguments: str, script: Path = SCRIPT
) -> subprocess.CompletedProcess[str]:
    """The script as `make demo` runs it."""
    return run_python(str(script), *arguments)


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=False,
    )


SMALL_DEMO = ["--rounds", "1", "--width", "64", "--layers", "1", "--batch", "1"]


@pytest.mark.slow
def test_the_demo_holds_and_fits_a_screen() -> None:
    done = run_example("--rounds", "2", "--batch", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    for wanted in ("fp32", "autocast", "autoamp", "kept for backward", "away"):
        assert wanted in said
    assert "truth 1000; autocast, on CPUs, 256; autoamp 1000" in said
    assert "autoamp run train.py" in said
    lines = said.splitlines()
    assert len(lines) <= 36
    assert max(map(len, lines)) <= 80


@pytest.mark.slow
@pytest.mark.parametrize("pays", [True, False])
def test_the_demo_shows_times_only_where_they_mean_something(
    pays, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(demo, "converts_by_itself", lambda *_: pays)
    assert demo.main(SMALL_DEMO) == 0
    said = capsys.readouterr().out
    for row in ("time of a call", "time of a step"):
        assert (row in said) is pays
    assert ("mean nothing" in said) is not pays
    assert "casts in a call" in said


def test_the_sum_that_autocast_loses_is_the_same_whatever_the_threads() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert [demo.bias_gradient(way) for way in demo.WAYS] == [1000, 256, 1000]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("wrong", [["--rounds", "0"], ["--width", "6"]])
def test_the_demo_refuses_sizes_that_mean_nothing(wrong, capsys) -> None:
    with pytest.raises(SystemExit) as raised:
        demo.main(wrong)
    assert raised.value.code == 2
    assert "multiple of 4" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("bias_gradient", lambda way: 256.0 if way == "autoamp" else 1000.0),
        ("norm_weights_moved", lambda *, converted: (0, 256)),
        ("overflow", lambda: (["  no cure was found"], False)),
        ("MORE_ERROR", 0.0),
    ],
)
def test_the_demo_fails_where_a_part_is_wrong(name, wrong, monkeypatch) -> None:
    monkeypatch.setattr(demo, name, wrong)
    assert demo.main(SMALL_DEMO) == 1


# -- the other examples: each checks its own result ------------------------------------


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (convnet_first_experiment, ["--batches", "32"]),
        (move_one_op, ["--width", "32"]),
        (own_backend, ["--width", "32"]),
        (serve, ["--requests", "8", "--width", "32"]),
        pytest.param(power, ["--widths", "8"], marks=pytest.mark.slow),
        pytest.param(resnet50, ["--rounds", "2"], marks=pytest.mark.slow),
        pytest.param(nan_hunt, ["--epochs", "10"], marks=pytest.mark.slow),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_an_example_reaches_its_result(module, arguments, capsys) -> None:
    assert module.main(arguments) == 0, capsys.readouterr().out


FAILS: list[tuple[Any, list[str], dict[str, Any]]] = [
    (move_one_op, ["--width", "32", "--budget", "1e-6"], {}),
    (own_backend, ["--width", "32"], {"keep": ["*"]}),
    (serve, ["--width", "32"], {"keep": ["*"]}),
    (nan_hunt, [], {"precision": "bf16"}),
]
"""Examples whose result is wrong where one thing is, and the options that spoil it."""


@pytest.mark.parametrize(
    ("module", "arguments", "spoiled"),
    [pytest.param(*row, marks=[pytest.mark.slow] * bool(row[2])) for row in FAILS],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_an_example_fails_where_its_result_is_wrong(
    module, arguments, spoiled, monkeypatch
) -> None:
    for name, value in spoiled.items():
        monkeypatch.setitem(module.OPTIONS, name, value)
    assert module.main(arguments) == 1


def test_resnet_fails_where_a_published_speed_is_above_the_prediction(
    monkeypatch,
) -> None:
    # The slow test of the whole example predicts; a prediction takes two captures.
    above = float(max(resnet50.PUBLISHED.values()) + 1)
    monkeypatch.setattr(resnet50, "predicted", lambda _: (above,) * 3)
    assert resnet50.beside_published()[1]
    monkeypatch.setitem(resnet50.PUBLISHED, "AMP", 10_000)
    assert not resnet50.beside_published()[1]


@pytest.mark.slow
@pytest.mark.timeout(900)  # three compilations in C++
def test_a_package_is_served_without_autoamp() -> None:
    small = ["--layers", "2", "--rounds", "2"]
    done = run_example(*small, script=SCRIPT.with_name("served.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "which computes in fp32" in done.stdout


@pytest.mark.parametrize(
    ("wrong", "same", "told"),
    [
        ({}, False, "the exported program answers"),
        ({"apart": 2.1e-3}, True, "the package is within 2.0e-03"),
        ({"apart": 0.0, "error": 0.0}, True, "the package is within"),
        ({"size": 66}, True, "its file is at most"),
        ({"knows_autoamp": True}, True, "the serving processes"),
    ],
)
def test_serving_a_package_fails_where_one_thing_is_wrong(wrong, same, told) -> None:
    right = served.Served(65, 50, 1.0, apart=1.9e-3, error=1e-3, knows_autoamp=False)
    ways = {"fp32": replace(right, size=100), "autoamp": right}
    assert all(served.checks(ways, same=True).values())
    ways["autoamp"] = replace(right, **wrong)
    failed = [k for k, ok in served.checks(ways, same=same).items() if not ok]
    assert len(failed) == 1
    assert failed[0].startswith(told)


def test_a_region_of_autocast_around_an_export_is_seen_to_be_lost(
    monkeypatch,
) -> None:
    model, x = torch.nn.Linear(8, 8).eval(), torch.randn(4, 8)
    export = torch.export.export

    def keeps_the_region(model, args):
        return export(served.UnderAutocast(model), args)

    with torch.no_grad():
        assert served.region_is_lost(model, x)
        monkeypatch.setattr(torch.export, "export", keeps_the_region)
        assert not served.region_is_lost(model, x)


@pytest.mark.slow
def test_two_ranks_train_alike_under_both_wrappers() -> None:
    script = SCRIPT.with_name("two_ranks.py")
    done = run_example("--steps", "40", "--timeout", "200", script=script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("weights of all ranks equal: yes") == 2


@pytest.mark.slow
def test_three_lines_and_one_save_the_published_memory() -> None:
    done = run_example(script=SCRIPT.with_name("three_lines.py"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_bert_learns_in_mixed_precision_without_knowing() -> None:
    script = SCRIPT.with_name("finetune_bert_trainer.py")
    options = ["--precision", "bf16", "--convert-anyway", str(script)]
    done = run_python("-m", "autoamp", "run", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "BertForSequenceClassification is converted to bf16" in done.stderr
    assert "autoamp" not in script.read_text().partition("from __future__")[2]
