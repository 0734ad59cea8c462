"""The command line: `autoamp run`, `autoamp env`, and wrong options of theirs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from autoamp import cli, compat
from autoamp.auto import environment
from autoamp_cli.run import run as run_command

pytestmark = pytest.mark.usefixtures("nothing_asked_for")

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


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, arguments, prog_name="autoamp")


class Launched(Exception):  # noqa: N818 (what happened, not an error)
    """What would have taken this process's place."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    found: list[tuple[list[str], dict[str, str]]] = []

    def execve(path: str, command: list[str], environ: dict[str, str]) -> None:
        assert path == sys.executable == command[0]
        found.append((command[1:], environ))
        raise Launched

    monkeypatch.setattr(os, "execve", execve)
    return found


def asked(environ: dict[str, str]) -> dict[str, str]:
    return {k: v for k, v in environ.items() if k.startswith("AUTOAMP_")}


# -- run -------------------------------------------------------------------------------


@pytest.mark.thorough
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
def test_precision_and_signals(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TRAINS)
    options = ("--precision", "bf16", "--do-no-harm", "0")
    done = process(*AUTOAMP, "run", *options, "script.py", cwd=tmp_path)
    assert done.returncode == -signal.SIGTERM
    (line,) = done.stderr.splitlines()
    assert "Sequential is converted to bf16: 2 of 2 float ops low" in line


@pytest.mark.slow
def test_interrupts_and_missing_scripts_are_pythons_own(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import time; print('up', flush=True); time.sleep(60)"
    )
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


def test_options_before_the_script_are_ours(
    launched: list[tuple[list[str], dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("AUTOAMP_ENABLE", "0")
    monkeypatch.setenv("AUTOAMP_BACKEND", "eager")
    monkeypatch.setenv("AUTOAMP_LOSS_SCALE", "off")
    given = {
        "precision": "bf16",
        "rules": "tensorflow",
        "allowlist-add": "exp,log",
        "inferlist-remove": "tanh",
        "loss-scale": "128",
        "do-no-harm": "0",
        "report-dir": str(tmp_path),
        "unfused": "gelu,silu",
    }
    options = ["--no-fuse"]
    options += [text for name, value in given.items() for text in (f"--{name}", value)]
    theirs = ["--precision", "x", "--strict", "--", "--no-such", "-m", "-"]
    result = call("run", *options, "--strict", "script.py", *theirs)
    assert isinstance(result.exception, Launched), result.output
    ((command, environ),) = launched
    assert command == ["script.py", *theirs]
    assert asked(environ) == {
        "AUTOAMP_ENABLE": "1",
        "AUTOAMP_BACKEND": "eager",
        "AUTOAMP_STRICT": "1",
        "AUTOAMP_FUSE": "0",
        **{f"AUTOAMP_{n.upper().replace('-', '_')}": v for n, v in given.items()},
    }


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["-m", "package.module", "-m", "x"], ["-m", "package.module", "-m", "x"]),
        (["--", "script.py", "--strict"], ["script.py", "--strict"]),
        (["-", "a"], ["-", "a"]),
        (["script.py"], ["script.py"]),
    ],
)
def test_what_is_launched(
    arguments: list[str],
    command: list[str],
    launched: list[tuple[list[str], dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    result = call("run", *arguments)
    assert isinstance(result.exception, Launched), result.output
    assert launched[0][0] == command
    environ = launched[0][1]
    assert asked(environ) == {"AUTOAMP_ENABLE": "1"}
    assert environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "1"


WRONG = {
    ("--precision", "fp8", "s.py"): (
        1,
        "AUTOAMP_PRECISION='fp8': give one of auto, fp",
    ),
    ("--rules", "/proc/x", "s.py"): (1, "AUTOAMP_RULES='/proc/x': /proc/x: cannot be"),
    ("--loss-scale", "nan", "s.py"): (1, "AUTOAMP_LOSS_SCALE='nan': give auto, dynam"),
    ("--report-dir", "/proc/x", "s.py"): (1, "AUTOAMP_REPORT_DIR='/proc/x': "),
    ("--allowlist-add", "expp", "s.py"): (1, "did you mean aten::exp"),
    ("--unfused", "gelo", "s.py"): (1, "which is no kernel; did you mean 'gelu'?"),
    ("--precison", "bf16", "s.py"): (2, "No such option"),
    ("-x", "s.py"): (2, "No such option"),
    ("--precision",): (2, "'--precision' requires an argument"),
    (): (2, "Missing argument 'SCRIPT'"),
}


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_wrong_options(
    arguments: tuple[str, ...], launched: list[tuple[list[str], dict[str, str]]]
) -> None:
    exit_code, message = WRONG[arguments]
    result = call("run", *arguments)
    assert isinstance(result.exception, SystemExit)
    assert (result.exit_code, launched) == (exit_code, [])
    errors = [line for line in result.output.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert result.output.splitlines()[-1] == errors[0]


def test_bad_variables_stop_a_run_as_options_do(
    launched: list[tuple[list[str], dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOAMP_BACKEND", "nonsense")
    result = call("run", "script.py")
    assert (result.exit_code, launched) == (1, [])
    assert result.output.startswith("Error: AUTOAMP_BACKEND='nonsense': give one of ")


def test_other_words() -> None:
    assert call("--version").output.startswith("autoamp, version ")
    assert call("no-such-command").exit_code == 2
    for command in ("run", "env", "explain", "compare", "diff", "rules"):
        assert command in call("--help").output


def test_every_variable_has_its_option() -> None:
    names = {"AUTOAMP_" + p.name.upper() for p in run_command.params if p.name}
    names -= {"AUTOAMP_SCRIPT", "AUTOAMP_ARGUMENTS", "AUTOAMP_AS_MODULE"}
    assert names == {*environment._VARIABLES, environment.REPORT_DIR, environment.HOT}


# -- env -------------------------------------------------------------------------------


def sections(output: str) -> dict[str, list[str]]:
    """Heading to its lines; what comes first has none."""
    found: dict[str, list[str]] = {}
    for block in output.split("\n\n"):
        head, *lines = block.splitlines()
        found[head.partition("  ")[0]] = [line.strip() for line in lines]
    return found


UNITS: dict[str, dict[torch.dtype, str]] = {
    "none": {},
    "avx": {torch.bfloat16: "avx512_bf16"},
    "amx": {torch.bfloat16: "amx_bf16", torch.float16: "amx_fp16"},
}


@pytest.mark.parametrize("kind", UNITS)
def test_what_pays_on_this_cpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "cpu_low_precision_units", lambda: UNITS[kind])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = call("env")
    assert result.exit_code == 0
    found = sections(result.output)
    fp16, bf16 = found["cpu"]
    slow = "is slower than fp32: this CPU has no units that multiply it. No model is"
    assert fp16.startswith("fp16 pays for matrix" if kind == "amx" else f"fp16 {slow}")
    assert bf16.startswith(f"bf16 {slow}" if kind == "none" else "bf16 pays for matrix")
    if kind == "avx":
        assert bf16.endswith("(vector instructions, avx512_bf16)")
    if kind == "amx":
        assert bf16.endswith("(matrix tiles, amx_bf16)")
    assert found["environment"] == ["no AUTOAMP_ variable is set"]


def test_versions() -> None:
    lines = call("env").output.split("\n\n")[0].splitlines()
    found = dict(re.split(r":\s+", line, maxsplit=1) for line in lines)
    assert found["torch"] == torch.__version__
    assert found["python"].endswith(f"({sys.executable})")
    assert {"autoamp", "system", "networkx", "rich", "CUDA"} <= set(found)
    assert "timm" not in found, "only what is installed"


CAPABILITIES: list[tuple[tuple[int, int], bool, bool]] = [
    ((6, 1), False, False),
    ((7, 5), True, False),
    ((9, 0), True, True),
]


def test_what_pays_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_index(device: Any) -> tuple[int, int]:
        return CAPABILITIES[device if isinstance(device, int) else device.index][0]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(CAPABILITIES))
    monkeypatch.setattr(torch.cuda, "get_device_capability", by_index)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    found = sections(call("env").output)
    for index, ((major, minor), fp16, bf16) in enumerate(CAPABILITIES):
        lines = found[f"cuda:{index}"]
        for line, name, pays, needed in zip(
            lines, ("fp16", "bf16"), (fp16, bf16), ("7.0", "8.0"), strict=True
        ):
            if pays:
                assert line == f"{name} pays: tensor cores"
            else:
                assert f"it needs compute capability {needed} or higher" in line
        name = f"cuda:{index}  GPU {index}, compute capability {major}.{minor}"
        assert name in call("env").output


def test_broken_driver_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("CUDA error: unknown error\nCompile with ...")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", fail)
    result = call("env")
    assert result.exit_code == 0
    assert sections(result.output)["cuda:0"] == [
        "cannot be used: RuntimeError: CUDA error: unknown error"
    ]


def test_variables_are_shown_with_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AUTOAMP_ENABLE", "yes")
    monkeypatch.setenv("AUTOAMP_PRECISON", "bf16")
    monkeypatch.setenv("AUTOAMP_STRICT", "a\nb\x1b[31m")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    lines = sections(call("env").output)["environment"]
    assert lines[:3] == [
        "AUTOAMP_ENABLE='yes'",
        "AUTOAMP_PRECISON='bf16'",
        "AUTOAMP_STRICT='a\\nb\\x1b[31m'",
    ]
    assert lines[3].startswith("unusable, so autoamp stays off: AUTOAMP_STRICT='a\\nb")
    assert lines[4].startswith("AUTOAMP_ENABLE='yes': give one of 1, true, on")
    assert lines[5].endswith(
        "is no variable of autoamp; did you mean AUTOAMP_PRECISION?"
    )
    assert lines[6] == "TORCH_DEVICE_BACKEND_AUTOLOAD=0: AUTOAMP_ENABLE has no effect"
