"""One name for a model, in every command; and what all commands have in common."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import torch

import autoamp
from autoamp.passes.decide import devices
from autoamp.passes.speeds import speeds
from autoamp_cli import main
from tests.cli.calls import FORCED, call
from tests.says import says
from website.commands import commands_of

GPT2 = "transformers:GPT2Config(n_layer=1,n_embd=64,n_head=2,vocab_size=99)"
ASKING = {
    "explain": "",
    "compare": "",
    "bench": "--ways half --rounds 2 --steps 2",
    "export": "--out a.pt2",
}
"""Each command that takes the name of a model, and options that make it quick."""

COMMANDS = {words: each for words, each in commands_of(main) if words}
CONVERTING = [*ASKING, "run"]
SILENT = {"autoamp run"}
"""The commands that print no result of their own."""


@pytest.fixture
def config(tmp_path: Path) -> str:
    sizes = {"n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 99}
    file = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}
    (tmp_path / "config.json").write_text(json.dumps(file))
    return "config.json --batch 2 --sequence 16"


@pytest.mark.parametrize("command", ASKING)
def test_each_command_takes_each_kind_of_name(command: str, config: str) -> None:
    pytest.importorskip("transformers")
    sized = f"'{GPT2}' --sequence 16"
    # The two kinds of models of transformers differ only in how they are read.
    of_transformers = config if command in ("export", "compare") else sized
    for name in ("./nets.py:layers", of_transformers):
        told = call(f"{command} {name} {FORCED} {ASKING[command]} --json a.json")
        assert told.exit_code == 0, told.output
        assert json.loads(Path("a.json").read_text())
        assert told.stdout


@pytest.mark.parametrize("command", ["explain", "export --out a.pt2"])
@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("nets.py:layer", "layers"),
        ("net.py:layers", "nets.py"),
        ("nets.py", "nets.py:factory"),
        ("gpt2", "transformers:gpt2"),
        ("transformers:gtp2", "gpt2"),
        ("transformers:LlamConfig()", "LlamaConfig"),
    ],
)
def test_a_wrong_name_is_told_with_the_nearest(
    command: str, name: str, nearest: str
) -> None:
    pytest.importorskip("transformers")
    told = call(f"{command} '{name}'")
    assert told.exit_code == 2
    says(told.stderr, name.removeprefix("transformers:").strip("()"), nearest)
    assert told.stderr.count(name) <= 2, "the name is told again"


def test_functions_take_names(monkeypatch: pytest.MonkeyPatch) -> None:
    report = autoamp.explain("nets.py:layers", precision="bf16", do_no_harm=False)
    assert len(report.ops) == 3
    pytest.importorskip("transformers")
    program = autoamp.export(GPT2, (), {"sequence": 8}, precision="bf16")
    assert isinstance(program, torch.export.ExportedProgram)
    with pytest.raises(autoamp.OptionError) as raised:
        autoamp.compare(GPT2, torch.ones(2, 2))
    says(raised, "named model", "batch", "sequence")
    monkeypatch.setattr("autoamp.tools.named_transformers.available", lambda _: 1000)
    with pytest.raises(autoamp.OptionError) as raised:
        autoamp.compare(GPT2)
    says(raised, "memory", "autoamp explain", "1.00 kB")


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    for number in (1, 2):
        folder = tmp_path / f"f{number}"
        folder.mkdir()
        layers = ", ".join(["torch.nn.Linear(4, 4)"] * number)
        (folder / "shapes.py").write_text(
            f"import torch\ndef f(): return torch.nn.Sequential({layers}), "
            "(torch.ones(2, 4),)\n"
        )
    ops = [autoamp.explain(f"f{n}/shapes.py:f", do_no_harm=False).ops for n in (1, 2)]
    assert [len(each) for each in ops] == [1, 2]


# -- the help --------------------------------------------------------------------------


def groups(group: click.Group, words: str = "") -> list[str]:
    inner = [
        each
        for name, sub in group.commands.items()
        if isinstance(sub, click.Group)
        for each in groups(sub, f"{words} {name}")
    ]
    return [words, *inner]


@pytest.mark.parametrize(
    "words", [*groups(main), *(each.removeprefix("autoamp") for each in COMMANDS)]
)
def test_a_help_fits_one_screen(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("click.formatting.FORCED_WIDTH", 100)
    told = call(f"{words} -h")
    assert told.exit_code == 0
    assert told.stdout == call(f"{words} --help").stdout
    lines = told.stdout.splitlines()
    assert len(lines) <= 50, len(lines)
    assert max(map(len, lines)) <= 100


def test_no_description_is_cut() -> None:
    told = " ".join(call("-h").stdout.split())
    for name, command in main.commands.items():
        says(told, f"{name} {command.get_short_help_str(1000)}")


def test_each_command_has_the_common_options() -> None:
    for words, command in COMMANDS.items():
        flags = {flag for each in command.params for flag in each.opts}
        assert ("--json" in flags) == (words not in SILENT), words
        lists = {"--allow", "--deny", "--infer", "--clear", "--keep"}
        common = lists | {"--precision", "--rules", "--placement", "--convert-anyway"}
        if words.removeprefix("autoamp ") in CONVERTING:
            assert common <= flags, words
        else:
            assert not lists & flags, words


def test_lists_reach_the_model() -> None:
    def low(options: str) -> list[str]:
        told = call(f"explain nets.py:layers {FORCED} {options} --json")
        assert told.exit_code == 0, told.output
        ops = json.loads(told.stdout)["ops"]
        return [op["name"] for op in ops if op["precision"] != "fp32"]

    assert len(low("")) == 3
    assert low("--deny linear,relu") == []
    assert [name for name in low("--keep 0") if name.startswith("linear")] == [
        "linear_1"
    ]
    told = call("explain nets.py:layers --deny lineer")
    assert told.exit_code == 2
    says(told.stderr, "lineer", "aten::linear")


def roofline_of(_: torch.device, low: torch.dtype) -> devices.Device:
    return devices.roofline("plain", low)


# -- JSON ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "explain --json nets:layers",
        "env --json",
        "rules check --json mine.toml",
        "rules why exp --json",
        "rules list --category deny --json",
        "calibrate --device cpu --json",
        "diff a.json --json b.json",
    ],
)
def test_json_without_a_file_is_all_of_stdout(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AUTOAMP_CALIBRATE", raising=False)
    monkeypatch.setattr(speeds, "measure_again", roofline_of)
    (tmp_path / "mine.toml").write_text('[allow]\nlineer = "x"\n')
    for name in ("a", "b") if line.startswith("diff") else ():
        assert call(f"explain nets:layers --json {name}.json").exit_code == 0
    told = call(line)
    assert told.exit_code in (0, 1), told.output
    assert json.loads(told.stdout)
    assert not (tmp_path / "nets:layers").exists()


def test_a_report_is_not_written_over_by_its_difference() -> None:
    for name in ("a", "b", "c"):
        call(f"explain nets:layers --json {name}.json")
    before = Path("a.json").read_text()
    told = call("diff --json a.json b.json c.json")
    assert told.exit_code == 2
    says(told.stderr, "a.json", "after OLD and NEW")
    assert Path("a.json").read_text() == before


# -- the end of a command --------------------------------------------------------------


@pytest.mark.parametrize("name", ["bare", "bad_shape", "deep"])
def test_a_wrong_shape_is_blamed_on_a_line_of_the_users(name: str) -> None:
    wrong = {
        "bare": "return nn.Sequential(nn.Linear(8, 8)), (torch.ones(2, 3),)",
        "bad_shape": "x = self.fc(x)",
        "deep": "return nn.Sequential(Net()), (torch.ones(3, 3),)",
    }
    factory = "\ndef {}():\n    {}\n"
    with open("nets.py", "a") as file:
        file.writelines(factory.format(n, wrong[n]) for n in ("bare", "deep"))
    line = wrong["bad_shape" if name == "deep" else name]
    for command in (
        "explain",
        "bench",
        "compare",
        "export --out a.pt2",
    ):
        told = call(f"{command} nets.py:{name} --convert-anyway --precision bf16")
        assert told.exit_code == 2
        says(told.stderr, "nets.py:", line)
        assert "/autoamp/" not in told.stderr


@pytest.mark.parametrize("after", [0.2, 0.8, 1.6, 4.0])
def test_ctrl_c_ends_a_command_with_130_at_any_time(after: float) -> None:
    """While modules are imported, and while a model is at work."""
    with _explaining(_MAIN) as running:
        time.sleep(after)
        running.send_signal(signal.SIGINT)
        _, told = running.communicate(timeout=30)
    assert (running.returncode, told) == (130, "Interrupted.\n")


def test_ctrl_c_while_torch_imports_numpy_is_not_lost() -> None:
    """torch drops errors of that import: a command went on for a minute."""
    strikes = """
import os, signal, sys
class Strikes:
    def find_spec(self, name, *_):
        if name == "numpy":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Strikes())
"""
    with _explaining(strikes + _MAIN) as running:
        _, told = running.communicate(timeout=30)
    assert (running.returncode, told) == (130, "Interrupted.\n")


_MAIN = """
from autoamp_cli import main
print("ready", flush=True)
main(prog_name="autoamp")
"""


@contextlib.contextmanager
def _explaining(code: str) -> Iterator[subprocess.Popen[str]]:
    """A process that explains a model whose factory takes a minute."""
    Path("slow.py").write_text("import time\ndef f(): time.sleep(60)\n")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    running = subprocess.Popen(
        [sys.executable, "-c", code, "explain", "slow.py:f"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    signal.signal(signal.SIGINT, before)
    with running:
        try:
            assert running.stdout is not None
            assert running.stdout.readline() == "ready\n"
            yield running
        finally:
            running.kill()


def test_ctrl_c_inside_a_factory_or_an_error_of_an_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.default_int_handler)
    body = "import os, signal\ndef f():\n    {}\n"
    kill = "os.kill(os.getpid(), signal.SIGINT)"
    hidden = f"try: {kill}\n    except KeyboardInterrupt: raise ImportError('x')"
    before = signal.getsignal(signal.SIGINT)
    for text in (kill, hidden):
        Path("stops.py").write_text(body.format(text))
        told = call("compare stops.py:f")
        assert (told.exit_code, told.stdout) == (130, ""), told.output
        says(told.stderr, "Interrupted")
        sys.modules.pop("stops", None)
    signal.signal(signal.SIGINT, before)
