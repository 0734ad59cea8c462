"""Processes that begin with torch and autoamp imported: copies of one that waits.

The imports take two seconds, a copy takes a few milliseconds.  A test of the imports
themselves starts Python anew.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]

_WAITS = """
import json, os, runpy, sys
import torch, torch._dynamo, autoamp.api, autoamp.auto.switch, autoamp_autoload
for line in sys.stdin:
    given = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
for number, name in enumerate((os.devnull, given["out"], given["err"])):
    os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
os.environ.clear()
os.environ.update(given["environ"])
os.chdir(given["cwd"])
sys.argv = given["argv"]
sys.path[0] = os.path.dirname(sys.argv[0])
unit = given["unit"]
units = {torch.bfloat16: unit} if unit else {}
autoamp.compat.cpu_low_precision_units = lambda: units
autoamp_autoload.autoload()  # as at the end of torch's import
names = runpy.run_path(sys.argv[0], run_name="__main__")
"""


CPU = "TESTS_CPU"
"""The variable that names the units of the CPU that tests are told they run on."""

_BY_A_TABLE = {"AUTOAMP_CALIBRATE": "0"}
"""Prices are alike on all machines, and nothing is written to the user's folder."""


@functools.cache
def _waiting() -> subprocess.Popen[str]:
    """The process that is copied.

    It has one thread: OpenMP's threads do not survive a fork.
    """
    ours = {k: v for k, v in os.environ.items() if not k.startswith("AUTOAMP_")}
    process = subprocess.Popen(
        [sys.executable, "-c", _WAITS],
        env={
            **ours,
            **_BY_A_TABLE,
            "PYTHONPATH": str(REPO),
            "OMP_NUM_THREADS": "1",
        },
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.communicate)
    return process


def run_script(
    source: str | Path, *arguments: str, cwd: Path = REPO, **variables: str
) -> subprocess.CompletedProcess[str]:
    """A script, or code, as `python` runs it with these variables added.

    Of autoamp's variables it sees these, and that nothing is measured.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith("AUTOAMP_")}
    with tempfile.TemporaryDirectory() as folder:
        path, out, err = (Path(folder, name) for name in ("script.py", "out", "err"))
        if isinstance(source, Path):
            path = source
        else:
            path.write_text(source)
        argv = [str(path), *arguments]
        unit = os.environ[CPU].removeprefix("plain")
        given = {"argv": argv, "out": str(out), "err": str(err), "cwd": str(cwd)}
        process = _waiting()
        assert process.stdin is not None
        assert process.stdout is not None
        print(
            json.dumps(
                {**given, "unit": unit, "environ": {**kept, **_BY_A_TABLE, **variables}}
            ),
            file=process.stdin,
            flush=True,
        )
        status = int(process.stdout.readline())
        return subprocess.CompletedProcess(
            argv, status, out.read_text(), err.read_text()
        )
