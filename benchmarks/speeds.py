"""`python -m benchmarks.speeds`: the speeds by which ops are priced on a device.

The table is that of `autoamp calibrate`, which measures the speeds anew and keeps them
for the user's later runs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from . import report
from .processes import commit
from .setting import add_arguments, setting_of

STEM = "calibrate"
ROOT = Path(__file__).parents[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints the table and writes it; the status of `autoamp calibrate`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speeds")
    add_arguments(parser)
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    given = parser.parse_args(arguments)
    setting = setting_of(parser, given)
    command = ["calibrate", "--device", setting.device]
    done = subprocess.run(
        [sys.executable, "-m", "autoamp", *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(done.stdout)
    if done.returncode == 0:
        line = f"{setting.capability}; commit {commit()}"
        said = f"`autoamp {' '.join(command)}`"
        text = f"{line}\n\n{said}:\n\n```text\n{done.stdout.rstrip()}\n```\n"
        stem = given.out / setting.stem(STEM, precise=False)
        data = {"capability": line, "shown": done.stdout}
        report.write(stem, text, data)
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(main())
