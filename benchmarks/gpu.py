"""`make gpu`, or `python -m benchmarks.gpu`: the tests and tables that need a GPU.

Each piece is a command of its own, writes to `benchmarks/results/` files that are named
for the GPU, and takes at most ten minutes.  A piece that is cut off goes on where it
was when the same command is given again: the models, or tests, that it has finished are
skipped.  Nothing is fetched from the network.

The exit status is 3 if a piece was cut off, 1 if one failed, 2 if there is no GPU or no
such piece, and 0 if every piece is finished.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from . import gpu_tests, processes, report, turns
from .setting import NO_GPU, Setting, capability, usable

FINISHED, FAILED, REFUSED, CUT_OFF = range(4)
SAID = ("finished", "failed: see above", "", "cut off: give the same command again")

PIECE_S = 600.0
"""Seconds that a piece may take."""

GRACE_S = 20.0
"""The last seconds of these, in which a piece that was told to end may write."""

MODEL_SHARE = 0.7
"""The share of a piece's seconds that one model may take; it has failed after that."""


@dataclass(frozen=True)
class Piece:
    """A part of the work that can be asked for by name.

    Attributes:
        name: the name.
        module: the benchmark that measures it.
        stem: the start of the names of its files.
        precision: the compute dtype, or "" if its files are not named for one.
        goes_on: whether the benchmark keeps a model, or a test, as soon as it is
            finished, and skips those that it finds; others are measured at one go.
    """

    name: str
    module: str
    stem: str
    precision: str = ""
    goes_on: bool = True

    @property
    def in_rows(self) -> bool:
        """Whether it is a table of models, each measured in a process of its own."""
        return self.goes_on and self.module != gpu_tests.MODULE

    def setting(self, asked: Setting) -> Setting:
        """The setting that the piece is measured in."""
        return replace(asked, precision=self.precision or asked.precision)

    def table(self) -> processes.ModelTable:
        """The table of a piece that is in rows."""
        found: processes.ModelTable = importlib.import_module(self.module).TABLE
        return found

    def results(self, asked: Setting, folder: Path) -> Path:
        """The file that has its figures once there are any."""
        stem = self.setting(asked).stem(self.stem, precise=bool(self.precision))
        return folder / f"{stem}.json"

    def command(self, asked: Setting, folder: Path, limit: float) -> list[str]:
        """The command that measures what is missing."""
        words = [sys.executable, "-m", self.module, *self.setting(asked).arguments()]
        words += ["--out", str(folder)]
        if self.in_rows:
            words += ["--limit", f"{limit * MODEL_SHARE:g}"]
        return words


def pieces() -> tuple[Piece, ...]:
    """All pieces, in the order in which they run."""
    both = [
        Piece(f"{stem}-{precision}", f"benchmarks.{stem}", stem, precision)
        for precision in ("bf16", "fp16")
        for stem in ("training", "inference", "prediction", "compiled")
    ]
    return (
        Piece("calibrate", "benchmarks.speeds", "calibrate", goes_on=False),
        Piece("tests", gpu_tests.MODULE, gpu_tests.STEM),
        *both,
    )


def chosen(names: Sequence[str]) -> list[Piece]:
    """The pieces named; all where none is named.

    Args:
        names: "training-bf16" is one piece, "training" that of each compute dtype.

    Raises:
        ValueError: there is no such piece.
    """
    every = pieces()
    for name in names:
        if not any(name in (piece.name, piece.stem) for piece in every):
            there = ", ".join(piece.name for piece in every)
            raise ValueError(f"there is no piece {name!r}; there are {there}")
    return [p for p in every if not names or {p.name, p.stem} & set(names)]


def measure(piece: Piece, asked: Setting, folder: Path, limit: float) -> int:
    """Measures what is missing of a piece: `FINISHED`, `FAILED` or `CUT_OFF`."""
    results = piece.results(asked, folder)
    if not piece.goes_on and results.exists():
        return FINISHED
    status = within(limit, piece.command(asked, folder, limit))
    if status is None:
        return CUT_OFF
    # Figures that are not as good as asked are figures.
    whole = status == 0 if piece.goes_on else results.exists()
    return FINISHED if whole else FAILED


def side_by_side(
    wanted: Sequence[Piece], asked: Setting, folder: Path, limit: float, at_once: int
) -> dict[str, int]:
    """Measures what is missing of tables of models, `at_once` prepared together.

    Returns:
        For each piece `FINISHED`, `FAILED` or `CUT_OFF`.
    """
    jobs, ended = {}, {}
    for piece in wanted:
        setting = piece.setting(asked)
        done = processes.finished(piece.results(asked, folder))
        todo = [name for name in piece.table().names(setting) if name not in done]
        arguments = tuple(setting.arguments())
        jobs |= {turns.Job(piece.module, n, arguments): piece for n in todo}
        ended[piece.name] = CUT_OFF if todo else FINISHED
    left = {piece.name: [*jobs.values()].count(piece) for piece in wanted}
    for job, row in turns.rows([*jobs], at_once=at_once, limit=limit, errors=None):
        piece = jobs[job]
        piece.table().fill(
            [row["name"]],
            folder,
            piece.setting(asked),
            lambda _, row=row: row,  # it is measured
            again=True,
        )
        left[piece.name] -= 1
        if not left[piece.name]:
            whole = processes.finished(piece.results(asked, folder))
            every = {each.name for each, of in jobs.items() if of is piece}
            ended[piece.name] = FINISHED if every <= whole else FAILED
    return ended


def within(limit: float, command: Sequence[str]) -> int | None:
    """The exit status of a command; None if it was ended after `limit` seconds.

    Its own processes are ended with it, also where this process is told to end.
    """
    with subprocess.Popen(command, cwd=report.ROOT, start_new_session=True) as process:
        try:
            with ended_by_a_signal():
                return process.wait(max(limit - GRACE_S, limit / 2))
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Tells a process group to end, and kills it after `GRACE_S`."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def ended_by_a_signal() -> Iterator[None]:
    """In the region SIGTERM raises `SystemExit`, so that what is begun is ended."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the pieces asked for, and says of each how it ended."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="The tests and tables that need a GPU.",
        epilog="pieces: " + ", ".join(piece.name for piece in pieces()),
    )
    parser.add_argument("pieces", nargs="*", help="what to run (all)")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    parser.add_argument("--limit", type=float, default=PIECE_S, help="seconds a piece")
    parser.add_argument(
        "--at-once",
        type=int,
        default=1,
        metavar="N",
        help="models prepared side by side; each is timed alone",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="small, to try it")
    given = parser.parse_args(arguments)
    try:
        wanted = chosen(given.pieces)
    except ValueError as error:
        parser.error(str(error))
    if not usable(given.device):
        print(NO_GPU, file=sys.stderr)
        return REFUSED
    asked, folder = Setting(given.device, quick=given.quick), given.out.resolve()
    ended, together = {}, [p for p in wanted if p.in_rows and given.at_once > 1]
    for piece in wanted:
        if piece in together:
            continue
        print(f"{piece.name}: begun", flush=True)
        begun = time.monotonic()
        ended[piece.name] = measure(piece, asked, folder, given.limit)
        taken = time.monotonic() - begun
        print(f"{piece.name}: {SAID[ended[piece.name]]} ({taken:.0f} s)", flush=True)
    if together:
        ended |= side_by_side(together, asked, folder, given.limit, given.at_once)
    print(capability(asked.device))
    for name, status in ended.items():
        print(f"  {name}: {SAID[status]}")
    return worst(ended.values())


def worst(statuses: Iterable[int]) -> int:
    """The exit status: that a piece goes on comes before that one failed."""
    found = set(statuses)
    return next((s for s in (CUT_OFF, FAILED) if s in found), FINISHED)


if __name__ == "__main__":
    raise SystemExit(main())
