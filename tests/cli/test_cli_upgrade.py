"""`autoamp upgrade`: reports of two environments, the causes, and the rule back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import autoamp
import autoamp_cli
from autoamp.rules import Rules

NETS = """
import torch
from torch import nn

def small():
    return nn.Sequential(nn.Linear(64, 64), nn.Softmax(-1)), (torch.ones(8, 64),)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x):
        return torch.softmax(self.fc(x), -1) + 1

class Two(nn.Module):
    # Calls softmax and linear in two modules each.

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x):
        return (self.first(x) + 1).relu() + self.second(x)

def two():
    return Two(), (torch.ones(8, 64),)

def sums():
    return nn.Sequential(nn.Linear(64, 64), Sum()), (torch.ones(8, 64),)

class Sum(nn.Module):
    def forward(self, x):
        return torch.cumsum(x, -1)
"""
FORCED: dict[str, Any] = {"precision": "bf16", "do_no_harm": False}


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("upgraded_nets.py").write_text(NETS)
    return tmp_path


def write(
    path: str, factory: str = "small", device: str | None = None, **options: Any
) -> dict[str, Any]:
    from autoamp_cli.factory import made_by

    made = made_by(f"upgraded_nets:{factory}")
    given = {**FORCED, **options}
    report = autoamp.explain(made.model, *made.args, options=given, device=device)
    found: dict[str, Any] = json.loads(report.to_json(path))
    return found


def call(*arguments: str) -> Result:
    return CliRunner().invoke(autoamp_cli.main, ["upgrade", *arguments])


@pytest.mark.usefixtures("there", "no_units")
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
    assert AGAIN.format("small") in told.output
    assert "µs" not in told.output, "no time is predicted where bf16 does not pay"
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


CHECK = ("--model", "upgraded_nets:two", "--no-do-no-harm")
AGAIN = "With this rule the placement of upgraded_nets:{} is that of old.json again."


@pytest.mark.usefixtures("there")
def test_an_allow_rule_is_checked_on_the_model() -> None:
    write("old.json", "sums", allow=["cumsum"])
    write("new.json", "sums")
    told = call("old.json", "new.json", "--model", "upgraded_nets:sums", CHECK[-1])
    assert "as before with allow=['cumsum']" in told.output
    assert AGAIN.format("sums") in told.output


@pytest.mark.thorough(but=["before0-after0-rule0-True"])
@pytest.mark.usefixtures("there")
@pytest.mark.parametrize(
    ("before", "after", "rule", "again"),
    [
        # Some calls of an op moved: the module is kept, where it was fp32 as a whole.
        ({"keep": ["first"]}, {}, ["keep=['first']"], True),
        ({"keep": ["first.fc"]}, {}, ["keep=['first.fc']"], True),
        # The calls of an op moved both ways; autoamp, and no list, holds the others.
        ({"keep": ["first"]}, {"keep": ["second"]}, ["keep=['first']"], True),
        # Softmax stayed fp32 for another reason, which the rule takes away.
        (
            {"deny": ["softmax"]},
            {"deny": ["linear"]},
            ["allow=['linear']", "deny=['softmax']"],
            True,
        ),
        # The check is of the model with the rule alone.
        (
            {"deny": ["softmax"], "keep": ["first"]},
            {"keep": ["first"]},
            ["deny=['softmax']"],
            False,
        ),
    ],
)
def test_ops_of_which_some_calls_moved(
    before: dict[str, Any], after: dict[str, Any], rule: list[str], again: bool
) -> None:
    write("old.json", "two", **before)
    write("new.json", "two", **after)
    told = call("old.json", "new.json", *CHECK)
    lines = [f"as before with {each}" for each in rule]
    assert [x for x in told.output.splitlines() if x.startswith("as before")] == lines
    assert (AGAIN.format("two") in told.output) == again, told.output
    assert ("is still not that of old.json" in told.output) != again


def edited(
    path: str, found: dict[str, Any], **edits: dict[tuple[str, str], str]
) -> None:
    """Writes a report in which ops, by name and module, have other keys."""
    ops = [
        op | {key: each[op["op"], op["module"]] for key, each in edits.items()
              if (op["op"], op["module"]) in each}
        for op in found["ops"]
    ]  # fmt: skip
    Path(path).write_text(json.dumps({**found, "ops": ops}))


SOFTMAX = "aten::softmax.int"


@pytest.mark.usefixtures("there")
def test_keep_that_is_not_exact_is_said_and_not_written() -> None:
    """One softmax of two was fp32, and the linear of its module was low."""
    found = write("new.json", "two")
    edited("old.json", found, precision={(SOFTMAX, "first"): "fp32"})
    told = call("old.json", "new.json", "--write", "back.toml")
    assert (
        f"no rule moves 1 back ({SOFTMAX}): only some calls of the op are to move, and "
        "keep='first' would also keep 2 that were low (linear, add)"
    ) in told.output
    assert "as before with" not in told.output
    assert not Path("back.toml").exists()


@pytest.mark.usefixtures("there")
def test_calls_in_no_module_cannot_be_kept() -> None:
    found = write("new.json", "two")
    edited("old.json", found, precision={("aten::add.Tensor", ""): "fp32"})
    told = call("old.json", "new.json")
    assert "they are in no module, so that keep= cannot name them" in told.output


@pytest.mark.thorough(but=["False"])
@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("exact", [True, False])
def test_an_op_that_moved_both_ways_by_a_rule(exact: bool) -> None:
    """A rule denied the softmax of `second`, and then that of `first` instead."""
    found = write("new.json", "two")
    everything = {"aten::linear.default": "second.fc", "aten::add.Tensor": "second"}
    second = {each: "fp32" for each in everything.items() if exact}
    edited(
        "old.json",
        found,
        precision={**second, (SOFTMAX, "second"): "fp32"},
        category={(SOFTMAX, "second"): "deny"},
    )
    edited(
        "new.json",
        found,
        precision={**second, (SOFTMAX, "first"): "fp32"},
        category={(SOFTMAX, "first"): "deny"},
    )
    told = call("old.json", "new.json", "--write", "back.toml")
    assert "the rule changed: 2" in told.output
    if exact:
        rules = Rules.load("back.toml")
        assert rules.table["aten::softmax"].category == "allow"
        assert rules.keep == ("second",)
    else:
        assert f"no rule moves 2 back ({SOFTMAX}): only some calls" in told.output
        assert not Path("back.toml").exists()


@pytest.mark.usefixtures("there")
def test_allow_would_lower_a_call_that_was_fp32() -> None:
    """The rule denied one softmax before the upgrade, and denies both after it."""
    found = write("new.json", "two")
    denied = {(SOFTMAX, "first"): "deny", (SOFTMAX, "second"): "deny"}
    high = dict.fromkeys(denied, "fp32")
    edited("new.json", found, precision=high, category=denied)
    high.pop((SOFTMAX, "first"))
    edited("old.json", found, precision=high, category=denied)
    told = call("old.json", "new.json")
    assert "as before with" not in told.output
    Path("old.json").write_text(
        Path("old.json").read_text().replace('"deny"', '"infer"', 1)
    )
    told = call("old.json", "new.json")
    assert "keep='second' would also keep 2 that were low" in told.output


@pytest.mark.usefixtures("there")
def test_costs_and_versions() -> None:
    found = write("new.json", "two", "cuda:sm_90", deny=["softmax"])
    older = write("old.json", "two", "cuda:sm_90")
    del older["versions"]
    Path("old.json").write_text(json.dumps(older))
    told = json.loads(call("old.json", "new.json", "--json").output)
    (softmaxes, moves) = (told["causes"]["the rule changed"], told["causes"])
    rows = {(op["op"], op["module"]): op for op in found["ops"]}
    for move in softmaxes:
        row = rows[SOFTMAX, move["op"]["module"]]
        cost = (row["cost_fp32"] - row["cost_low"]) * 1e-10
        assert move["seconds"] == pytest.approx(cost) != 0
    each = [move["seconds"] for cause in moves.values() for move in cause]
    before, after = told["seconds"]
    assert sum(each) + told["seconds_of_the_rest"] == pytest.approx(after - before)
    assert told["versions"] == [{}, found["versions"]]
    text = call("old.json", "new.json").output
    made = f"torch {torch.__version__.partition('+')[0]}, autoamp "
    assert text.startswith("Two: old.json (unknown version) → new.json (" + made)
    micro = sum(move["seconds"] for move in softmaxes) * 1e6
    share = micro * 1e-6 / before
    assert f"the rule changed: 2, {micro:+.3g} µs ({share:+.1%} of a run)" in text
    assert f"that did not move: {told['seconds_of_the_rest'] * 1e6:+.3g} µs" in text


@pytest.mark.usefixtures("there")
def test_a_report_without_costs_says_none() -> None:
    write("new.json", "two", "cuda:sm_90", deny=["softmax"])
    older = write("old.json", "two", "cuda:sm_90")
    for op in older["ops"]:
        del op["cost_fp32"], op["cost_low"]
    Path("old.json").write_text(json.dumps(older))
    told = call("old.json", "new.json")
    assert "µs" not in told.output
    assert "predicted time of a run" in told.output
    told = call("old.json", "new.json", "--json")
    assert json.loads(told.output)["seconds_of_the_rest"] is None


@pytest.mark.thorough
@pytest.mark.usefixtures("there")
def test_json_has_the_check_and_nothing_else() -> None:
    write("old.json", "two", keep=["first"])
    write("new.json", "two")
    told = call("old.json", "new.json", "--json", *CHECK, "--write", "back.toml")
    found = json.loads(told.stdout)
    assert (found["schema"], found["version"]) == ("autoamp.upgrade", 1)
    assert found["rule"] == {"allow": [], "deny": [], "keep": ["first"]}
    assert found["check"] == {"changed": 0, "appeared": 0, "vanished": 0}
    assert Rules.load("back.toml").keep == ("first",)
    same = call("new.json", "new.json", "--json", *CHECK)
    found = json.loads(same.stdout)
    assert (same.exit_code, found["causes"], found["check"]) == (0, {}, None)


@pytest.mark.thorough(but=["True"])
@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("reverse", [False, True])
def test_ops_and_graphs_that_came_or_went(reverse: bool) -> None:
    found = write("a.json", "two", "cuda:sm_90")
    last = found["ops"].pop()
    found["headline"]["seconds"] -= 1e-6
    Path("b.json").write_text(json.dumps(found))
    pair = ("a.json", "b.json") if reverse else ("b.json", "a.json")
    told = json.loads(call(*pair, "--json").output)
    (move,) = told["causes"]["the model's code changed"]
    assert (move["old"], move["new"]) == (("bf16", "") if reverse else ("", "bf16"))
    sign = -1 if reverse else 1
    assert move["seconds"] == pytest.approx(sign * last["cost_low"] * 1e-10)
    found["graphs"].append({**found["graphs"][0], "graph": 1})
    found["ops"].append({**last, "graph": 1})
    Path("b.json").write_text(json.dumps(found))
    word = "appeared" if reverse else "vanished"
    assert f"graphs that {word}: 1\n" in call(*pair).output


@pytest.mark.usefixtures("there")
def test_a_module_whose_path_is_a_pattern() -> None:
    found = write("new.json", "two")
    for op in found["ops"]:
        op["module"] = op["module"].replace("first", "parts[0]")
    Path("new.json").write_text(json.dumps(found))
    edited(
        "old.json", found, precision={("aten::linear.default", "parts[0].fc"): "fp32"}
    )
    told = call("old.json", "new.json")
    assert "as before with keep=['parts[[]0].fc']" in told.output
