"""`python -m benchmarks.short_programs`: what the automatic mode costs short programs.

Each program in `benchmarks/short` runs as it is, without and with `AUTOAMP_ENABLE=1`,
in turns; the times are those of the whole process, imports included.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.progress import track

from . import report
from .report import ROOT, Data

PROGRAMS = ("digits", "lstm", "generate", "shapes", "agent")
ROUNDS = 5
HEADER = ("program", "without, s", "with, s", "ratio", "numbers", "lines on stderr")

NOTE = """\
Seconds of whole processes, the median of {} rounds in which the two take turns,
and the median of the rounds' ratios. "same": both printed the same numbers, since the
program was too short for a model to become hot."""


def run(program: str, enable: str) -> tuple[float, str, int]:
    """Seconds, what the program printed, and how many lines it wrote to stderr."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("AUTOAMP_")}
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "short" / f"{program}.py")],
        env={**kept, "PYTHONPATH": str(ROOT), "AUTOAMP_ENABLE": enable},
        capture_output=True,
        text=True,
        check=True,
    )
    taken = time.perf_counter() - began
    said = [line for line in done.stderr.splitlines() if line.startswith("autoamp")]
    return taken, done.stdout, len(said)


def measured(program: str, times: int) -> Data:
    """The row of one program."""
    rounds = [(run(program, "0"), run(program, "1")) for _ in range(times)]
    return {
        "program": program,
        "without": statistics.median(off[0] for off, _ in rounds),
        "with": statistics.median(on[0] for _, on in rounds),
        "ratio": statistics.median(on[0] / off[0] for off, on in rounds),
        "same": all(off[1] == on[1] for off, on in rounds),
        "lines": max(on[2] for _, on in rounds),
    }


def measure(given: argparse.Namespace) -> Data:
    """The rows of the programs that are asked for."""
    programs = [each for each in PROGRAMS if given.only in each]
    rows = [measured(each, given.rounds) for each in track(programs, "programs")]
    return {"rounds": given.rounds, "rows": rows}


def text(data: Data) -> str:
    """The page."""
    lines = [
        [
            row["program"],
            f"{row['without']:.2f}",
            f"{row['with']:.2f}",
            f"{row['ratio']:.3f}",
            "same" if row["same"] else "other",
            str(row["lines"]),
        ]
        for row in data["rows"]
    ]
    note = NOTE.format(data.get("rounds", ROUNDS))
    return report.page(data, note, report.markdown(HEADER, lines))


TABLE = report.Table(
    "short_programs", measure, text, options=(report.rounds(ROUNDS), report.ONLY)
)

if __name__ == "__main__":
    raise SystemExit(TABLE.main())
