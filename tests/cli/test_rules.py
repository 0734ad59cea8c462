"""`autoamp rules`: the lists, the faults of a rules file, the rules on one op."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autoamp import Rules
from autoamp.passes.rules.model import BUILTIN, builtin_path
from tests.cli.calls import call
from tests.says import says

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


def check(path: Path, text: str) -> list[tuple[int, str]]:
    """The faults that `autoamp rules check` prints, each with its line."""
    path.write_text(text)
    told = call(f"rules check {path}")
    assert (told.exit_code, told.stderr) == (1, "")
    lines = [line.removeprefix(f"{path}:") for line in told.stdout.splitlines()]
    told_of = [line.partition(": ")[::2] for line in lines]
    return [(int(number), problem) for number, problem in told_of]


def test_every_fault_is_found_with_its_line(tmp_path: Path) -> None:
    found = check(tmp_path / "my.toml", FAULTY)
    assert [(line, problem.partition(":")[0]) for line, problem in found] == [
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
    says(found[1][1], option="did you mean aten::linear")
    says(found[3][1], "[allow]", "[deny]", op="aten::exp")


@pytest.mark.parametrize("name", BUILTIN)
def test_a_file_without_fault(name: str) -> None:
    path = builtin_path(name)
    told = call(f"rules check {path}")
    assert told.exit_code == 0, told.output
    says(told.stdout, path, f"{len(Rules.load(name).table)} rules, no fault")


ONE_FAULT: list[tuple[str, int, list[str]]] = [
    ("[allow]\nx = = 3\n", 2, ["not a TOML file"]),
    ("[allow]\nmm = 'x'\nmm = 'y'\n", 3, ["not a TOML file"]),
    ("a = 1\n", 1, ["a:", "allow, deny, infer, clear, keep"]),
    ("allow = 3\n", 1, ["allow:", "write [allow] on its own"]),
    ("[allow]\n" + "a." * 200 + "b = 1\n", 2, ["100 dot"]),
    ('[infer]\n"a\\u0062s" = 3\n', 2, ["infer.abs", "a reason or a table"]),
]


@pytest.mark.parametrize(("text", "line", "named"), ONE_FAULT)
def test_one_fault(text: str, line: int, named: list[str], tmp_path: Path) -> None:
    ((at, problem),) = check(tmp_path / "my.toml", text)
    assert at == line
    says(problem, *named)


def test_the_lists_are_printed_or_written_as_json() -> None:
    lines, rules = call("rules list").stdout.splitlines(), Rules.default("bf16")
    assert len(lines) == len(rules.table)
    assert lines[0].startswith(f"allow  {rules.names('allow')[0]}: ")
    assert sum(line.startswith("deny ") for line in lines) == len(rules.names("deny"))
    told = call("rules list --precision fp16 --category deny --json")
    found, rules = json.loads(told.stdout), Rules.default("fp16")
    assert [row["op"] for row in found] == list(rules.names("deny"))
    for row in found:
        rule = rules.table[row["op"]]
        assert (row["category"], row["reason"]) == ("deny", rule.reason)
        assert [c["test"] for c in row["when"]] == [c.test for c in rule.when]


def test_why_an_op_is_in_its_list() -> None:
    told = call("rules why mv")
    assert told.exit_code == 0
    lines = told.stdout.splitlines()
    assert lines[0] == "aten::mv"

    def below(heading: str) -> list[str]:
        at = lines.index(f"  {heading}")
        return lines[at + 1 : at + 3]

    rule = Rules.default("bf16").table["aten::mv"]
    (condition,) = rule.when
    own, but = below("autoamp, bf16 (rules/bf16.toml)")
    says(own, f"{rule.category}: {rule.reason}")
    says(but, f"but {condition.category}", "device_is cpu")
    assert below("autoamp, fp16 (rules/fp16.toml)")
    says(below("torch.autocast, CUDA")[0], "allow: ")
    says(below("torch.autocast, CPU")[0], "in no list")
    says(below("TensorFlow, fp16")[0], "allow: MatMul")


def test_overloads_with_rules_of_their_own_are_told_apart() -> None:
    shown = call("rules why norm").stdout
    at = shown.splitlines().index("  torch.autocast, CUDA")
    assert any("[" in line for line in shown.splitlines()[at : at + 3])
    shown = call("rules why aten::sum.dim_IntList --precision fp16").stdout
    assert shown.startswith("aten::sum.dim_IntList\n  autoamp, fp16 (rules/")
    assert "bf16.toml" not in shown


@pytest.mark.parametrize("name", BUILTIN)
def test_a_built_in_set_is_checked_by_its_name(name: str) -> None:
    told = call(f"rules check {name}")
    assert told.exit_code == 0, told.output
    says(told.stdout, name, "no fault")


def test_a_file_goes_before_a_built_in_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fp16").write_text('[allow]\nlinaer = "safe"\n')
    assert call("rules check fp16").exit_code == 1
