"""Checks an installed autoamp: `python -P installed.py`, by its environment's Python.

It needs the standard library, autoamp and what autoamp requires, and nothing of this
checkout, so that it also runs where no test tool is installed.  Each check prints one
line with its time; the first check that fails ends the script.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

MODEL = """
import torch
from torch import nn

def small():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    return model, (torch.randn(16, 64),)
"""
REPORT = """
import autoamp, models
model, (x,) = models.small()
model = autoamp.convert(model, precision="bf16", do_no_harm=False)
model(x).sum().backward()
assert all(p.grad.dtype == p.dtype == models.torch.float32 for p in model.parameters())
report = autoamp.report(model)
print(report)
print(report.why("linear"))
report.to_html("report.html")
"""
COMPILED = """
import torch, models
model, args = models.small()
options = {"precision": "bf16", "backend": "eager", "do_no_harm": False}
print(torch.compile(model, backend="autoamp", options=options)(*args).dtype)
"""
SCRIPT = """
import sys, models
model, args = models.small()
for _ in range(3):
    model(*args).sum().backward()
print("autoamp.auto.switch" in sys.modules)
"""
HELP = """
import sys
sys.modules["torch"] = None
from autoamp_cli import main
main(["--help"])
"""


def python(*arguments: str, **variables: str) -> str:
    """The stdout and stderr of a fresh interpreter; one that fails is an error."""
    hidden = ("PYTHON", "AUTOAMP_")
    given = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=given | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stdout}")
    return done.stdout


def command(*arguments: str) -> str:
    """The output of the command `autoamp` that stands beside the interpreter."""
    name = Path(sys.executable).with_name("autoamp")
    done = subprocess.run(
        [name, *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"autoamp {' '.join(arguments)} failed:\n{done.stderr}")
    return done.stdout


def has(text: str, *parts: str) -> None:
    """Ends the script if a part is missing."""
    for part in parts:
        if part not in text:
            raise SystemExit(f"{part!r} is missing in:\n{text}")


def modules() -> Iterator[str]:
    """The name of every module of the distribution."""
    yield from ("autoamp_autoload", "autoamp_said")
    for package in ("autoamp", "autoamp_cli"):
        path = importlib.import_module(package).__path__
        yield package
        for found in pkgutil.walk_packages(path, f"{package}."):
            yield found.name


def every_module_imports() -> None:
    site = Path(sys.prefix).resolve()
    for name in modules():
        file = importlib.import_module(name).__file__
        if file is None or not Path(file).resolve().is_relative_to(site):
            raise SystemExit(f"{name} is {file}, which is outside of {site}")


def versions_agree() -> None:
    import autoamp

    assert metadata.version("autoamp") == autoamp.__version__
    has(command("--version"), autoamp.__version__)
    has(python("-m", "autoamp", "--version"), autoamp.__version__)


def types_are_announced() -> None:
    for package in ("autoamp", "autoamp_cli"):
        (folder,) = importlib.import_module(package).__path__
        assert (Path(folder) / "py.typed").exists(), package


def help_needs_no_torch() -> None:
    has(python("-c", HELP), "explain", "bench", "run")
    for name in ("bench", "compare", "diff", "env", "explain", "rules", "run"):
        has(command(name, "--help"), f"autoamp {name}")


def rules_are_found() -> None:
    from autoamp.passes.rules.model import builtin_path

    assert builtin_path("bf16").parent.name == "_rules"
    has(command("rules", "list", "--precision", "fp16"), "linear", "exp")


def a_model_is_converted() -> None:
    has(python("-c", REPORT, PYTHONPATH="."), "What runs low", "runs in bf16")
    assert "<html" in Path("report.html").read_text("utf-8").lower()


def torch_compile_knows_the_backend() -> None:
    has(python("-c", COMPILED, PYTHONPATH="."), "torch.float32")


def no_variable_changes_nothing() -> None:
    has(python("script.py"), "False")


def the_environment_switches_autoamp_on() -> None:
    asked = {"AUTOAMP_PRECISION": "bf16", "AUTOAMP_DO_NO_HARM": "0", "AUTOAMP_HOT": "0"}
    told = python("script.py", AUTOAMP_ENABLE="1", **asked)
    has(told, "True", "autoamp: Sequential", "bf16")


def a_script_is_run() -> None:
    options = ("--precision", "bf16", "--convert-anyway", "--hot", "0")
    has(command("run", *options, "script.py"), "True")


def a_model_is_explained() -> None:
    command("explain", "models:small", "--device", "cuda:sm_80", "--json", "a.json")
    assert json.loads(Path("a.json").read_text("utf-8"))["ops"]
    has(command("env"), "torch")


CHECKS: list[Callable[[], None]] = [
    every_module_imports,
    versions_agree,
    types_are_announced,
    help_needs_no_torch,
    rules_are_found,
    a_model_is_converted,
    torch_compile_knows_the_backend,
    no_variable_changes_nothing,
    the_environment_switches_autoamp_on,
    a_script_is_run,
    a_model_is_explained,
]


def main() -> None:
    import torch

    print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, {sys.prefix}")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("models.py").write_text(MODEL, "utf-8")
        Path("script.py").write_text(SCRIPT, "utf-8")
        for check in CHECKS:
            begun = time.perf_counter()
            check()
            took = time.perf_counter() - begun
            print(f"{took:6.1f} s  {check.__name__.replace('_', ' ')}", flush=True)
        os.chdir("/")


if __name__ == "__main__":
    main()
