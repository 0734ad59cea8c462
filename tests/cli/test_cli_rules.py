"""`autoamp rules`: the lists, the faults of a rules file, the rules on one op."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from autoamp.rules import Rules
from autoamp.rules.model import BUILTIN, builtin_path
from autoamp.rules.parse import Fault, check
from autoamp_cli import main

FAULTY = """# my rules
[meta]
dtype = "float8"

[allow]
linaer = "a typing error"
"aten.exp" = "right"
relu = { reason = "", jumps = 3 }

[deny]
exp = "twice"
softmax = { reason = "x", nonsense = 1 }
  "sofmtax.int" = 'quoted' # and indented

[deny.sum]
reason = 3

[keep]
modules = "head"
[graylist] # TensorFlow's old name
x = "y"
"""


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["rules", *map(str, arguments)])


# -- check -----------------------------------------------------------------------------


def test_every_fault_is_found_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(FAULTY)
    result = call("check", path)
    assert (result.exit_code, result.stderr) == (1, "")
    lines = [line.removeprefix(f"{path}:") for line in result.stdout.splitlines()]
    told = [line.partition(": ")[::2] for line in lines]
    assert [(int(number), said.partition(":")[0]) for number, said in told] == [
        (3, "meta.dtype"),
        (6, "allow.linaer"),
        (8, "allow.relu.reason"),
        (11, "aten"),
        (12, "deny.softmax.nonsense"),
        (13, "deny.sofmtax.int"),
        (15, "deny.sum.reason"),
        (19, "keep.modules"),
        (20, "graylist"),
    ]
    assert "did you mean aten::linear" in told[1][1]
    assert told[3][1].startswith("aten::exp: named twice, in [allow] and in [deny]")
    assert check(path)[1] == 1


@pytest.mark.parametrize("name", BUILTIN)
def test_a_file_without_fault(name: str) -> None:
    path = builtin_path(name)
    result = call("check", path)
    assert result.exit_code == 0, result.output
    count = len(Rules.load(name).table)
    assert result.stdout == f"{path}: {count} rules, no fault\n"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[allow]\nx = = 3\n", Fault(2, "not a TOML file: Invalid value (at line 2")),
        (
            "[allow]\nmm = 'x'\nmm = 'y'\n",
            Fault(3, "not a TOML file: Cannot overwrite"),
        ),
        ("a = 1\n", Fault(1, "a: no such table; use allow, deny, infer, clear, keep")),
        ("allow = 3\n", Fault(1, "allow: must be a table: write [allow] on its own")),
        (
            "[allow]\n" + "a." * 200 + "b = 1\n",
            Fault(2, "line 2 has more than 100 dot"),
        ),
        (
            '[infer]\n"a\\u0062s" = 3\n',
            Fault(2, "infer.abs: must be a reason or a table"),
        ),
    ],
)
def test_one_fault(text: str, fault: Fault, tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(text)
    ((found,), _) = check(path)
    assert found.line == fault.line
    assert found.problem.startswith(fault.problem)
    assert call("check", path).exit_code == 1


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.toml", "/dev/zero", "a\0b"):
        result = call("check", path)
        assert (result.exit_code, result.stdout) == (2, ""), path
        assert result.stderr.startswith("Error: ")


# -- list ------------------------------------------------------------------------------


def test_the_lists_are_printed() -> None:
    lines = call("list").stdout.splitlines()
    rules = Rules.default("bf16")
    assert len(lines) == len(rules.table)
    assert lines[0].startswith(f"allow  {rules.names('allow')[0]}: ")
    assert sum(line.startswith("deny ") for line in lines) == len(rules.names("deny"))


def test_one_list_of_one_precision_as_json() -> None:
    result = call("list", "--precision", "fp16", "--category", "deny", "--json")
    found = json.loads(result.stdout)
    rules = Rules.default("fp16")
    assert [row["op"] for row in found] == list(rules.names("deny"))
    for row in found:
        rule = rules.table[row["op"]]
        assert (row["category"], row["reason"]) == ("deny", rule.reason)
        assert [c["test"] for c in row["when"]] == [c.test for c in rule.when]
    assert call("list", "--category", "graylist").exit_code == 2


# -- why -------------------------------------------------------------------------------


def test_why_an_op_is_in_its_list() -> None:
    result = call("why", "exp")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "aten::exp"
    at = lines.index("  autoamp, bf16 (rules/bf16.toml)")
    rule = Rules.default("bf16").table["aten::exp"]
    assert lines[at + 1] == f"    {rule.category}: {rule.reason}"
    (condition,) = rule.when
    assert lines[at + 2].startswith(
        f"      but {condition.category} where device_is cu"
    )
    assert "  autoamp, fp16 (rules/fp16.toml)" in lines
    at = lines.index("  torch.autocast, CUDA")
    assert lines[at + 1].startswith("    deny: autocast casts")
    at = lines.index("  torch.autocast, CPU")
    assert lines[at + 1] == "    in no list: runs in the dtypes it is given"
    at = lines.index("  TensorFlow, fp16")
    assert lines[at + 1] == "    deny: Exp"


def test_overloads_with_rules_of_their_own_are_told_apart() -> None:
    shown = call("why", "norm").stdout
    at = shown.splitlines().index("  torch.autocast, CUDA")
    assert any("[" in line for line in shown.splitlines()[at : at + 3])
    shown = call("why", "aten::sum.dim_IntList", "--precision", "fp16").stdout
    assert shown.startswith("aten::sum.dim_IntList\n  autoamp, fp16 (rules/")
    assert "bf16.toml" not in shown


def test_an_unknown_op_gets_a_hint() -> None:
    result = call("why", "sofmtax")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "torch has no op aten::sofmtax; did you mean aten::softmax" in result.stderr
    assert call("why", "a\x1b\0b").exit_code == 2
