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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import track

from . import report
from .capability import capability
from .processes import commit

STEM = "short_programs"
ROUNDS = 5
PROGRAMS = ("digits", "lstm", "generate", "shapes", "agent")
ROOT = Path(__file__).parents[1]

NOTE = f"""\
Seconds of whole processes, the median of {ROUNDS} rounds in which the two take turns,
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


def measured(program: str) -> dict[str, Any]:
    """The row of one program."""
    rounds = [(run(program, "0"), run(program, "1")) for _ in range(ROUNDS)]
    return {
        "program": program,
        "without": statistics.median(off[0] for off, _ in rounds),
        "with": statistics.median(on[0] for _, on in rounds),
        "ratio": statistics.median(on[0] / off[0] for off, on in rounds),
        "same": all(off[1] == on[1] for off, on in rounds),
        "lines": max(on[2] for _, on in rounds),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The Markdown table."""
    lines = [
        [
            row["program"],
            f"{row['without']:.2f}",
            f"{row['with']:.2f}",
            f"{row['ratio']:.3f}",
            "same" if row["same"] else "other",
            str(row["lines"]),
        ]
        for row in rows
    ]
    heads = ["program", "without, s", "with, s", "ratio", "numbers", "lines on stderr"]
    return report.markdown(heads, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Times all programs, and writes and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.short_programs")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    options = parser.parse_args(arguments)
    rows = [measured(each) for each in track(PROGRAMS, "short programs")]
    head = f"{capability('cpu')}; commit {commit()}"
    text = "\n".join([head, "", NOTE, "", table(rows), ""])
    data: dict[str, Any] = {"capability": capability("cpu"), "rows": rows}
    report.write(options.out / STEM, text, data)
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
