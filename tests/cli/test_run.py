"""`autoamp run` and the process of the command: what a program sees, what is quick."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from autoamp.auto import environment
from autoamp_cli.run import run as run_command
from autoamp_cli.words import CATEGORIES
from tests.cli import calls
from tests.cli.calls import call
from tests.says import says

launched = calls.launched
REPO = Path(__file__).resolve().parents[2]
AUTOAMP = [sys.executable, "-m", "autoamp"]
SHOWS = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path[0],
    "stdin": sys.stdin.read(), "package": __package__, "main": __name__ in sys.modules,
}))
sys.exit(7)
"""


def process(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, input="line\n", capture_output=True, text=True, check=False
    )


def asked(environ: dict[str, str]) -> dict[str, str]:
    return {k: v for k, v in environ.items() if k.startswith("AUTOAMP_")}


@pytest.mark.usefixtures("nothing_asked_for")
@pytest.mark.parametrize(
    "how", ["script", pytest.param("module", marks=pytest.mark.slow)]
)
def test_program_sees_what_python_shows_it(how: str, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "script.py").write_text(SHOWS)
    what = ["package/script.py"] if how == "script" else ["-m", "package.script"]
    arguments = ["--precision", "x", "-m", "--", "--help", ""]
    own = process(sys.executable, *what, *arguments, cwd=tmp_path)
    ours = process(*AUTOAMP, "run", *what, *arguments, cwd=tmp_path)
    assert json.loads(ours.stdout) == json.loads(own.stdout)
    assert json.loads(own.stdout)["argv"][1:] == arguments
    assert (ours.returncode, ours.stderr) == (own.returncode, own.stderr) == (7, "")


TRAINS = """
import os, signal, sys, torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
model(torch.randn(2, 4))
sys.stderr.flush()
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.slow  # test_autoload.py has a quick one of the line, without the command
@pytest.mark.usefixtures("nothing_asked_for")
def test_precision_and_signals(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TRAINS)
    options = ("--precision", "bf16", "--convert-anyway")
    done = process(*AUTOAMP, "run", *options, "script.py", cwd=tmp_path)
    assert done.returncode == -signal.SIGTERM
    (line,) = done.stderr.splitlines()
    says(line, "Sequential", "bf16", "2 of 2 float ops")


@pytest.mark.slow
def test_interrupts_and_missing_scripts_are_pythons_own(tmp_path: Path) -> None:
    code = "import time; print('up', flush=True); time.sleep(60)"
    (tmp_path / "script.py").write_text(code)
    # In the background of a shell it is ignored here, and the child would inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    running = subprocess.Popen(
        [*AUTOAMP, "run", "script.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    signal.signal(signal.SIGINT, before)
    assert running.stdout is not None
    assert running.stdout.readline() == "up\n"
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=30)
    assert running.returncode == -signal.SIGINT
    assert err.splitlines()[-1] == "KeyboardInterrupt"
    own = process(sys.executable, "missing.py", cwd=tmp_path)
    ours = process(*AUTOAMP, "run", "missing.py", cwd=tmp_path)
    assert (ours.returncode, ours.stderr) == (own.returncode, own.stderr)


@pytest.mark.usefixtures("nothing_asked_for")
def test_options_before_the_script_are_ours(
    launched: calls.Programs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = {"AUTOAMP_BACKEND": "eager", "AUTOAMP_LOSS_SCALE": "off"}
    for name, value in {**before, "AUTOAMP_ENABLE": "0"}.items():
        monkeypatch.setenv(name, value)
    given = {
        "precision": "bf16",
        "rules": "tensorflow",
        "allow": "exp,log",
        "keep": "head,body.*",
        "inferlist-remove": "tanh",
        "loss-scale": "128",
        "report-dir": str(tmp_path),
        "unfused": "gelu,silu",
    }
    options = " ".join(f"--{name} {value}" for name, value in given.items())
    theirs = "--precision x --strict -- --no-such -m -"
    call(f"run --no-fuse {options} --convert-anyway --strict script.py {theirs}")
    ((command, environ),) = launched
    assert command == ["script.py", *theirs.split()]
    assert asked(environ) == {
        "AUTOAMP_ENABLE": "1",
        "AUTOAMP_BACKEND": "eager",
        "AUTOAMP_STRICT": "1",
        "AUTOAMP_FUSE": "0",
        "AUTOAMP_DO_NO_HARM": "0",
        "AUTOAMP_ALLOWLIST_ADD": given.pop("allow"),
        **{f"AUTOAMP_{n.upper().replace('-', '_')}": v for n, v in given.items()},
    }


@pytest.mark.usefixtures("nothing_asked_for")
@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ("-m package.module -m x", "-m package.module -m x"),
        ("-- script.py --strict", "script.py --strict"),
        ("- a", "- a"),
        ("script.py", "script.py"),
    ],
)
def test_what_is_launched(
    arguments: str,
    command: str,
    launched: calls.Programs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    call(f"run {arguments}")
    ((words, environ),) = launched
    assert words == command.split()
    assert asked(environ) == {"AUTOAMP_ENABLE": "1"}
    assert environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "1"


@pytest.mark.usefixtures("nothing_asked_for")
def test_a_checkout_that_is_not_installed_launches_nothing(
    launched: calls.Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch would start nothing: the script would run in fp32 without a word."""
    monkeypatch.setattr("importlib.metadata.distributions", lambda **_: iter(()))
    ran = call("run --precision bf16 script.py")
    assert ran.exit_code == 2
    says(ran.stderr, "not installed", "fp32", "pip install", sys.executable)
    assert launched == []


def test_every_variable_has_its_option() -> None:
    names = {"AUTOAMP_" + p.name.upper() for p in run_command.params if p.name}
    lists = {f"AUTOAMP_{each.upper()}" for each in CATEGORIES}
    names = (names - lists) | {f"{each}LIST_ADD" for each in lists}
    names = (names - {"AUTOAMP_CONVERT_ANYWAY"}) | {"AUTOAMP_DO_NO_HARM"}
    names -= {"AUTOAMP_SCRIPT", "AUTOAMP_ARGUMENTS", "AUTOAMP_AS_MODULE"}
    assert names == {*environment._VARIABLES, environment.REPORT_DIR, environment.HOT}


# -- the process of the command ----------------------------------------------------

COMMANDS = ["", "run", "env", "explain", "compare", "diff", "rules"]
COMMANDS += ["rules list", "rules check", "rules why"]
ENTRY = "import sys; from autoamp_cli import main; main(prog_name='autoamp')"


def entered(
    line: str = "", code: str = ENTRY, **environ: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *line.split()],
        env={**os.environ, "PYTHONPATH": str(REPO), **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_installed_command_is_the_quick_one() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"autoamp": "autoamp_cli:main"}


def test_the_version_and_every_command_are_shown() -> None:
    assert call("--version").output.startswith("autoamp, version ")
    says(call("--help").output, *COMMANDS[1:7])


@pytest.mark.parametrize("command", COMMANDS)
def test_help_answers_without_torch_and_shows_an_example(command: str) -> None:
    code = f"{ENTRY.replace('main(prog', 'sys.modules.update(torch=None); main(prog')}"
    done = entered(f"{command} --help", code=code)
    assert (done.returncode, done.stderr) == (0, "")
    if command not in ("", "rules"):
        says(done.stdout, "Example", f"\n    autoamp {command}")


def test_help_takes_a_third_of_a_second() -> None:
    for command in ("", "explain"):
        before = os.times()
        assert entered(f"{command} --help").returncode == 0
        after = os.times()
        spent = after.children_user - before.children_user
        spent += after.children_system - before.children_system
        assert spent < 0.3, f"autoamp {command} --help took {spent:.2f} s of CPU time"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands(shell: str) -> None:
    script = entered(_AUTOAMP_COMPLETE=f"{shell}_source")
    assert "_AUTOAMP_COMPLETE" in script.stdout
    typed = {
        "COMP_WORDS": "autoamp ex",
        "COMP_CWORD": "ex" if shell == "fish" else "1",
    }
    done = entered(_AUTOAMP_COMPLETE=f"{shell}_complete", **typed)
    assert "explain" in done.stdout
    assert "rules" not in done.stdout
