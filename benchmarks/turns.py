"""A turn at the device: processes prepare side by side, and are timed one at a time."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import torch

from .processes import Row, new_row
from .report import ROOT

WAITS = "BENCHMARK_WAITS"
"""The variable by which a process is told to wait for its turn."""
READY = "ready for its turn"


def wait() -> bool:
    """Waits for this process's turn at the device, if it has to; whether it had to.

    Memory that is free goes back to the device meanwhile, for the processes beside.
    """
    if not is_beside_others():
        return False
    give_back()
    print(READY, flush=True)
    sys.stdin.readline()
    return True


def is_beside_others() -> bool:
    """Whether this process is one of several that prepare side by side."""
    return bool(os.environ.get(WAITS))


def give_back() -> None:
    """Gives memory that is free back to the GPU, if this process has one."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def prepared_beside_others(prepare: Callable[[], Made]) -> Made:
    """What `prepare` makes, once the processes beside this one leave memory for it."""
    if not is_beside_others():
        return prepare()
    for pause in PAUSES_S:
        try:
            made = prepare()
            give_back()
            return made
        except torch.OutOfMemoryError:
            give_back()
            time.sleep(pause)
    return prepare()


PAUSES_S = (2.0, 4.0, 8.0)
"""Pauses before something is prepared again for which there was no memory."""

Made = TypeVar("Made")


@dataclass(frozen=True)
class Job:
    """A row to measure: `python -m MODULE --one NAME ARGUMENTS`."""

    module: str
    name: str
    arguments: tuple[str, ...] = ()


class Beside:
    """A process that prepares a job, and measures it when it is told to.

    Args:
        job: the job.
        errors: where its stderr goes.
    """

    def __init__(self, job: Job, errors: int | None = subprocess.DEVNULL) -> None:
        self.job, self.late = job, False
        self._lines: list[str] = []
        self._ready = threading.Event()
        self._process = subprocess.Popen(
            [sys.executable, "-m", job.module, "--one", job.name, *job.arguments],
            cwd=ROOT,
            env={"OMP_NUM_THREADS": "2"} | os.environ | {WAITS: "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == READY:
                self._ready.set()
            else:
                self._lines.append(line)
        self._ready.set()

    def wait_until_ready(self, limit: float) -> None:
        """Returns when it waits for its turn or has ended; ends it after `limit` s."""
        if not self._ready.wait(max(limit, 0.0)):
            self._process.kill()
            self.late = True

    def row(self, limit: float) -> Row:
        """Gives it its turn; its row, or one that says how it failed."""
        if self.late:
            return self._failed("it was not ready for its turn in time")
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        self._reader.join(max(limit, 0.0))
        if self._reader.is_alive():
            return self._failed(f"its turn took more than {limit:.0f} s")
        if status := self._process.wait():
            return self._failed(f"exit {status}")
        row: Row = json.loads(self._lines[-1])
        return row

    def _failed(self, why: str) -> Row:
        return new_row(self.job.name, failures={"all": why})

    def end(self) -> None:
        """Kills it, if it runs."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError, ValueError):
                pipe.close()


PREPARING = 0.7
"""The share of the time that is left in which jobs are prepared."""


def rows(
    jobs: Sequence[Job],
    *,
    at_once: int,
    limit: float,
    errors: int | None = subprocess.DEVNULL,
) -> Iterator[tuple[Job, Row]]:
    """Each job with its row: `at_once` are prepared together, then timed in turn.

    Nothing is prepared while a job is timed: a job that is not ready after
    `PREPARING` of the time that is left has failed.

    Args:
        jobs: what to measure, in this order.
        at_once: processes at a time.
        limit: seconds from now after which jobs have failed.
        errors: where the stderr of the processes goes; None is that of this process.
    """
    until = time.monotonic() + limit
    for first in range(0, len(jobs), at_once):
        beside = [Beside(job, errors) for job in jobs[first : first + at_once]]
        ready_at = time.monotonic() + PREPARING * (until - time.monotonic())
        try:
            for each in beside:
                each.wait_until_ready(ready_at - time.monotonic())
            for each in beside:
                yield each.job, each.row(until - time.monotonic())
                each.end()
        finally:
            for each in beside:
                each.end()
