"""Searches for examples that fail: runs all property tests with new seeds for a time.

    python -m tests.fuzz 600          600 seconds; `make fuzz SECONDS=600` calls this

Property tests are those marked `hypothesis`.  Each failure is printed as it is found,
with the command that shows it again.  The exit status is 1 if there was one.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
MAKES_EXAMPLES = re.compile(
    r"^@given\(|^@explored\(| explore\(|run_state_machine_as_test\(|    @given\(", re.M
)
TO_END = 30
"""Seconds in which a run that is interrupted may print the failures it has found."""


def files() -> list[Path]:
    """The files with property tests; the conformance tests, which take long, last."""
    found = TESTS.rglob("test_*.py")
    having = [path for path in found if MAKES_EXAMPLES.search(path.read_text())]
    return sorted(having, key=lambda path: ("conformance" in path.parts, path))


def command(path: Path, seed: int) -> list[str]:
    """Runs the property tests of one file with a seed."""
    name = str(path.relative_to(TESTS.parent))
    options = ["-m", "hypothesis and not slow", "-p", "no:cacheprovider", "-q"]
    shown = ["--tb=short", "--show-capture=no", "--timeout=0"]
    search = ["--hypothesis-profile=fuzz", f"--hypothesis-seed={seed}"]
    return [sys.executable, "-m", "pytest", name, *options, *shown, *search]


def search(path: Path, seed: int, seconds: float) -> str:
    """What a run prints that finds a failure; "" where there is none.

    The run is interrupted after `seconds`.
    """
    seeds = {"AUTOAMP_FUZZ_SEED": str(seed), "PYTHONHASHSEED": str(seed)}
    args = command(path, seed)
    run = subprocess.Popen(
        args,
        cwd=TESTS.parent,
        env={**os.environ, **seeds},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, ended = run.communicate(timeout=seconds)[0], True
    except subprocess.TimeoutExpired:
        run.send_signal(signal.SIGINT)
        try:
            said, ended = run.communicate(timeout=TO_END)[0], False
        except subprocess.TimeoutExpired:
            run.kill()
            said, ended = run.communicate()[0], False
    # A file whose examples are made in a text alone has no test to run.
    passed = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    failed = run.returncode not in passed if ended else "\nFAILED " in said
    again = " ".join([*(f"{k}={v}" for k, v in seeds.items()), shlex.join(args)])
    return f"{said}\n{again}\n" if failed else ""


def turns() -> Iterator[tuple[Path, int]]:
    """Each file in turn, each time with a new seed."""
    for path in itertools.cycle(files()):
        yield path, random.SystemRandom().randrange(2**32)


def main(seconds: float) -> int:
    """Searches for `seconds`; 1 if something was found."""
    end, found, runs = time.monotonic() + seconds, 0, 0
    for path, seed in turns():
        left = end - time.monotonic()
        if left <= 0:
            break
        runs += 1
        if said := search(path, seed, left):
            found += 1
            print(said, flush=True)
    print(f"{runs} runs, {found} with a failure", flush=True)
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
