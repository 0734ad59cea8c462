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
from .report import Data, commit
from .setting import add_arguments, capability, setting_of

STEM = "calibrate"


def text(data: Data) -> str:
    """The page."""
    return f"""\
{data["capability"]}

`autoamp calibrate --device {data["device"]}`:

```text
{data["shown"].rstrip()}
```
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints the table and writes it; the status of `autoamp calibrate`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speeds")
    add_arguments(parser)
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    given = parser.parse_args(arguments)
    setting = setting_of(parser, given)
    done = subprocess.run(
        [sys.executable, "-m", "autoamp", "calibrate", "--device", setting.device],
        cwd=report.ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(done.stdout)
    if done.returncode == 0:
        machine = f"{capability(setting.device)}; commit {commit()}"
        data = {"capability": machine, "device": setting.device, "shown": done.stdout}
        report.write(given.out / setting.stem(STEM, precise=False), text(data), data)
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(main())
