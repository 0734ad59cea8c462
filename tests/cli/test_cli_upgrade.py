"""`autoamp upgrade`: reports of two environments, the causes, and the rule back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import autoamp
import autoamp_cli
from autoamp.rules import Rules

NETS = """
import torch
from torch import nn

def small():
    return nn.Sequential(nn.Linear(64, 64), nn.Softmax(-1)), (torch.ones(8, 64),)
"""
FORCED: dict[str, Any] = {"precision": "bf16", "do_no_harm": False}


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("upgraded_nets.py").write_text(NETS)
    return tmp_path


def write(path: str, **options: Any) -> dict[str, Any]:
    from autoamp_cli.factory import made_by

    made = made_by("upgraded_nets:small")
    report = autoamp.explain(made.model, *made.args, options={**FORCED, **options})
    found: dict[str, Any] = json.loads(report.to_json(path))
    return found


def call(*arguments: str) -> Result:
    return CliRunner().invoke(autoamp_cli.main, ["upgrade", *arguments])


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("reverse", [False, True])
def test_a_changed_rule(reverse: bool) -> None:
    """The old environment has the rule that softmax stays fp32, or the new one."""
    rule = {"deny": ["softmax"]}
    write("old.json", **({} if reverse else rule))
    write("new.json", **(rule if reverse else {}))
    check = ("--model", "upgraded_nets:small", "--no-do-no-harm")
    told = call("old.json", "new.json", "--write", "back.toml", *check)
    assert told.exit_code == 1, told.output
    assert "the rule changed: 1" in told.output
    assert f"as before with {'allow' if reverse else 'deny'}=['softmax']" in told.output
    # The rule of today's environment, the built-in one, is not the old one's.
    if not reverse:
        assert "is that of old.json again" in told.output
    table = Rules.load("back.toml").table
    assert table["aten::softmax"].category == ("allow" if reverse else "deny")


@pytest.mark.usefixtures("there")
def test_nothing_moved() -> None:
    write("old.json")
    told = call("old.json", "old.json")
    assert (told.exit_code, "Nothing moved." in told.output) == (0, True)


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({"op": "aten::_softmax.default"}, "another op of the same code: 2"),
        ({"precision": "fp32", "kernel": "k"}, "the kernel changed: 1"),
        ({"precision": "fp32", "category": "deny"}, "the rule changed: 1"),
        ({"precision": "fp32"}, "what surrounds the op changed: 1"),
    ],
)
def test_another_torch(edit: dict[str, str], said: str) -> None:
    found = write("old.json")
    found["ops"][-1].update(edit)
    Path("new.json").write_text(json.dumps(found))
    told = call("old.json", "new.json")
    assert told.exit_code == 1, told.output
    assert said in told.output


@pytest.mark.usefixtures("there")
def test_other_prices() -> None:
    found = write("old.json")
    found["ops"][-1]["precision"] = "fp32"
    found["devices"] = [{"name": "faster"}]
    found["headline"]["seconds"] = 0.002
    Path("new.json").write_text(json.dumps(found))
    found["ops"][-1]["precision"] = "bf16"
    found["devices"], found["headline"]["seconds"] = [], 0.001
    Path("old.json").write_text(json.dumps(found))
    told = call("old.json", "new.json")
    assert "the prices changed: 1" in told.output
    assert "1 ms → 2 ms (+100.0%)" in told.output
    assert "as before with" not in told.output, "allow= changes no price"
    assert "lock='old.json'" in told.output


@pytest.mark.usefixtures("there")
def test_bad_input() -> None:
    found = write("old.json")
    for key, value, message in (
        ("model", "Other", "not of one model"),
        ("compute_dtype", "fp16", "not of one precision"),
        ("schema", "other", "no report of autoamp"),
    ):
        Path("new.json").write_text(json.dumps({**found, key: value}))
        told = call("old.json", "new.json")
        assert (told.exit_code, message in told.output) == (2, True), told.output
