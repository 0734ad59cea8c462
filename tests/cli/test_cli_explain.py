"""`autoamp explain`: factories, options, outputs; and a command line that is quick."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import autoamp_cli
from autoamp import pass_options, questions
from autoamp.dtypes import LOW_DTYPES
from autoamp.messages import on_command_line
from autoamp.rules import Category, Rules
from autoamp_cli import words
from autoamp_cli.factory import Made, made_by

REPO = Path(__file__).resolve().parents[2]

FACTORIES = """
import torch
from torch import nn

print("the module is imported")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x, *, times=1):
        print("the model runs")
        for _ in range(times):
            x = self.fc(x)
        return x.exp()

    @staticmethod
    def example():
        return Net(), (torch.ones(64, 64),)

def small():
    return Net.example()

def thrice():
    return Net(), (torch.ones(64, 64),), {"times": 3}

def raises():
    raise ValueError("no weights\\x1b[2J here")

def leaves():
    raise SystemExit(0)

def one():
    return Net()

def four():
    return Net(), (), {}, ()

def no_model():
    return Net, (torch.ones(64, 64),)

def no_tuple():
    return Net(), torch.ones(64, 64)

def no_dict():
    return Net(), (), [("times", 3)]

def no_names():
    return Net(), (torch.ones(64, 64),), {3: 1}

def bad_shape():
    return Net(), (torch.ones(3, 3),)

constant = 3
"""


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "nets.py").write_text(FACTORIES)
    (tmp_path / "broken.py").write_text("import torch\n\nx = 1 / 0\n")
    (tmp_path / "no_python.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("nets", "broken"):
        sys.modules.pop(name, None)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(autoamp_cli.main, ["explain", *arguments])


# -- factories -------------------------------------------------------------------------


def test_a_factory_gives_a_model_and_the_arguments_of_a_call() -> None:
    made = made_by("nets:thrice")
    assert isinstance(made.model, nn.Module)
    assert made.args[0].shape == (64, 64)
    assert made.kwargs == {"times": 3}
    assert made_by("nets:Net.example").kwargs == {}


WRONG = {
    "nets": "'nets' is not the name of a factory: write module:factory",
    ":small": "':small' is not the name of a factory",
    "nosuchmodule:f": "nosuchmodule cannot be imported: ModuleNotFoundError: No module",
    "broken:f": "broken cannot be imported: ZeroDivisionError: division by zero (",
    "no_python:f": "no_python cannot be imported: SyntaxError: ",
    "nets:nosuch": "nets:nosuch: module nets has no nosuch",
    "nets:constant": "nets:constant is a int, not a function; it must return (model,",
    "nets:raises": "nets:raises raised ValueError: no weights\\x1b[2J here (",
    "nets:leaves": "nets:leaves raised SystemExit: 0 (",
    "nets:one": "nets:one returned a Net; it must return (model, args) or",
    "nets:four": "nets:four returned a tuple of 4; it must return",
    "nets:no_model": "returned a type as model, which must be a torch.nn.Module",
    "nets:no_tuple": "returned a Tensor as args, which must be a tuple",
    "nets:no_dict": "returned a list as kwargs, which must be a dict",
    "nets:no_names": "returned kwargs with the key 3, no string",
    "nets:bad_shape": "nets:bad_shape: the model raised RuntimeError: ",
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_factory_is_named_with_its_fault(name: str) -> None:
    result = call(name, "--no-do-no-harm")  # the model is called on any machine
    assert (result.exit_code, result.stdout) == (2, "")
    last = result.stderr.splitlines()[-1]
    assert last.startswith("Error: ")
    assert WRONG[name] in last
    assert name in last
    if name in ("broken:f", "nets:raises", "nets:leaves", "nets:bad_shape"):
        assert f"{name.partition(':')[0]}.py:" in last, "the line that raised"


# -- options ---------------------------------------------------------------------------


def test_options_reach_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    real: Callable[..., Any] = questions.explain

    def explain(model: nn.Module, *args: Any, **given: Any) -> Any:
        seen.append((args, given))
        return real(model, *args, **{**given, "options": {}, "device": None})

    monkeypatch.setattr(questions, "explain", explain)
    given = ["--precision", "fp16", "--rules", "torch-cuda", "--placement", "forced"]
    result = call("nets:thrice", *given, "--no-do-no-harm", "--device", "cuda:sm_90")
    assert result.exit_code == 0, result.output
    ((args, named),) = seen
    assert torch.equal(args[0], torch.ones(64, 64))
    assert named == {
        "options": {
            "precision": "fp16",
            "rules": "torch-cuda",
            "placement": "forced",
            "do_no_harm": False,
        },
        "device": "cuda:sm_90",
        "times": 3,
    }
    call("nets:small")
    assert seen[1][1] == {"options": {}, "device": None}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (("--precision", "fp8"), "precision='fp8' is not a low precision"),
        (("--device", "tpu"), "tpu"),
        (("--rules", "/no/such.toml"), "/no/such.toml: cannot be read"),
        (("--placement", "best"), "placement='best' is unknown; give one of"),
        (("--json", "/no/such/folder.json"), "/no/such/folder.json cannot be written"),
    ],
)
def test_unusable_options(given: tuple[str, ...], problem: str) -> None:
    result = call("nets:small", *given)
    assert (result.exit_code, result.stdout) == (2, "")
    assert problem in result.stderr.splitlines()[-1]


def test_words_in_the_help_are_autoamps_own() -> None:
    assert words.PLACEMENTS == pass_options.PLACEMENTS
    assert tuple(LOW_DTYPES) == words.PRECISIONS
    assert tuple(Category) == words.CATEGORIES


# -- outputs ---------------------------------------------------------------------------

FORCED = ("--precision", "bf16", "--no-do-no-harm")


@pytest.mark.thorough
def test_the_report_is_printed() -> None:
    result = call("nets:small", *FORCED)
    assert result.exit_code == 0
    full = call("nets:small", *FORCED, "--full")
    with on_command_line():  # which names the command's flags
        expected = _explained()
        assert timeless(result.stdout) == timeless(f"{expected}\n")
        assert timeless(full.stdout) == timeless(f"{expected.full()}\n")


@pytest.mark.thorough
def test_what_the_model_prints_goes_to_stderr() -> None:
    result = call("nets:small", *FORCED, "--json", "-")
    assert result.stdout == _explained().to_json()
    assert json.loads(result.stdout)["model"] == "Net"
    assert "the module is imported\n" in result.stderr
    assert "the model runs\n" in result.stderr


@pytest.mark.thorough
def test_reports_are_written(tmp_path: Path) -> None:
    report = _explained()
    result = call("nets:small", *FORCED, "--json", "a.json", "--dot", "a.dot")
    assert (result.exit_code, result.stdout) == (0, "")
    assert (tmp_path / "a.json").read_text() == report.to_json()
    assert (tmp_path / "a.dot").read_text() == report.to_dot()
    result = call("nets:small", *FORCED, "--json", "a.json", "--text")
    assert timeless(result.stdout) == timeless(f"{report}\n")


def timeless(text: str) -> str:
    """`text` without the time that the pass took."""
    return re.sub(r"pass took .*", "", text)


def _explained() -> Any:
    made: Made = made_by("nets:small")
    given = {"precision": "bf16", "do_no_harm": False}
    return questions.explain(made.model, *made.args, options=given)


# -- compare ---------------------------------------------------------------------------


def compared(*arguments: str) -> Result:
    return CliRunner().invoke(autoamp_cli.main, ["compare", *arguments])


def test_a_comparison_is_printed() -> None:
    result = compared("nets:small", *FORCED)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("autoamp compare: Net, bf16 against fp32\n")
    assert "the model runs\n" in result.stderr


@pytest.mark.thorough
def test_a_tolerance_gives_a_rules_file(tmp_path: Path) -> None:
    given = ("nets:small", *FORCED, "--tolerance")
    result = compared(*given, "1e-6", "--to-rules", "keep.toml")
    assert result.exit_code == 0, result.output
    assert Rules.load(tmp_path / "keep.toml").keep
    bad = compared(*given, "1e-6", "--to-rules", "/no/such/keep.toml")
    assert bad.exit_code == 2
    assert "/no/such/keep.toml cannot be written" in bad.stderr
    assert compared("nets:small", "--to-rules", "a.toml").exit_code == 2
    assert compared("nets:one").exit_code == 2


def test_a_tolerance_that_no_set_reaches_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., Any] = questions.compare

    def out_of_reach(*args: Any, tolerance: float, **given: Any) -> Any:
        return real(*args, **given).with_keep(None, tolerance)

    monkeypatch.setattr(questions, "compare", out_of_reach)
    given = ("nets:small", *FORCED, "--tolerance", "1e-6", "--to-rules", "none.toml")
    missed = compared(*given)
    assert (missed.exit_code, (tmp_path / "none.toml").exists()) == (1, False)
    assert "no set of modules kept in fp32 is enough" in missed.stdout


# -- the process -----------------------------------------------------------------------

COMMANDS = (
    (),
    ("run",),
    ("env",),
    ("explain",),
    ("compare",),
    ("diff",),
    ("rules",),
    ("rules", "list"),
    ("rules", "check"),
    ("rules", "why"),
)
ENTRY = "import sys; from autoamp_cli import main; main(prog_name='autoamp')"


def process(
    *arguments: str, code: str = ENTRY, **environ: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(REPO), **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_installed_command_is_the_quick_one() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"autoamp": "autoamp_cli:main"}
    from autoamp.cli import main  # the name that older installations have

    assert main is autoamp_cli.main


@pytest.mark.thorough(but=["", "rules why"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_answers_without_torch_and_shows_an_example(
    command: tuple[str, ...],
) -> None:
    code = f"{ENTRY.replace('main(prog', 'sys.modules.update(torch=None); main(prog')}"
    done = process(*command, "--help", code=code)
    assert (done.returncode, done.stderr) == (0, "")
    if command not in ((), ("rules",)):
        assert "Example" in done.stdout
        assert f"\n    autoamp {' '.join(command)}" in done.stdout


def test_help_takes_a_third_of_a_second() -> None:
    for command in ((), ("explain",)):
        before = os.times()
        assert process(*command, "--help").returncode == 0
        after = os.times()
        spent = after.children_user - before.children_user
        spent += after.children_system - before.children_system
        assert spent < 0.3, f"autoamp {command} --help took {spent:.2f} s of CPU time"


@pytest.mark.thorough(but=["zsh"])
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands(shell: str) -> None:
    script = process(_AUTOAMP_COMPLETE=f"{shell}_source")
    assert "_AUTOAMP_COMPLETE" in script.stdout
    words_ = {
        "COMP_WORDS": "autoamp ex",
        "COMP_CWORD": "ex" if shell == "fish" else "1",
    }
    done = process(_AUTOAMP_COMPLETE=f"{shell}_complete", **words_)
    assert "explain" in done.stdout
    assert "rules" not in done.stdout


def test_why_prints_one_node_or_names_those_that_are_close() -> None:
    given = ["nets:small", "--precision", "bf16", "--no-do-no-harm", "--why"]
    for node in ("exp", "0:exp"):
        result = call(*given, node)
        assert result.exit_code == 0, result.output
        assert "exp (aten::exp.default) of graph 0 runs in " in result.stdout
        assert "What stayed in fp32" not in result.stdout
    for node, said in (("exq", "did you mean exp"), ("7:exp", "no such graph")):
        result = call(*given, node)
        assert (result.exit_code, result.stdout) == (2, "")
        assert said in result.stderr
