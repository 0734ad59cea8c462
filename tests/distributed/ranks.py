"""Runs functions of tests on several ranks: gloo processes, each group with a deadline.

The processes live as long as the fixture that made them, so that a test costs no start
of Python and torch.  A test whose ranks wait for each other for ever fails at its
deadline, and the next test gets new processes.
"""

from __future__ import annotations

import gc
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

COLLECTIVE = timedelta(seconds=40)
"""How long a collective waits for other ranks: less than a test's deadline, so that a
failure tells which collective waited."""


class RankError(AssertionError):
    """A rank raised, died, or did not answer in time; says what of which rank."""


class Ranks:
    """Processes of one process group, which run what they are told.

    Attributes:
        world: how many there are.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def run(
        self, function: Callable[..., Any], *args: Any, deadline: float = 60, **kw: Any
    ) -> list[Any]:
        """What `function(rank, *args, **kw)` returns on each rank, in order of ranks.

        Args:
            function: of a module's top level, since processes find it by its name.
            deadline: seconds.

        Raises:
            RankError: see there.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args, kw))
        until = time.monotonic() + deadline
        answers, problems = [], []
        for rank, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(max(until - time.monotonic(), 0.01)):
                    problems.append(f"rank {rank} did not answer in {deadline} s")
                    continue
                failed, answer = pipe.recv()
            except EOFError:
                problems.append(f"rank {rank} died")
                continue
            answers.append(answer)
            if failed:
                problems.append(f"rank {rank} raised\n{answer}")
        if problems:
            self.close()
            raise RankError("\n".join(problems))
        return answers

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = mp.get_context("spawn")
        store = f"file://{tempfile.mkdtemp()}/store"
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, store, rank, self.world), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)


def _serve(pipe: Connection, store: str, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=world, timeout=COLLECTIVE
    )
    while True:
        try:
            function, args, kw = pipe.recv()
        except EOFError:
            return
        torch.manual_seed(0)
        try:
            answer = False, function(rank, *args, **kw)
        except BaseException:  # noqa: BLE001 (a rank tells of any error)
            answer = True, traceback.format_exc()
        pipe.send(answer)
        del answer
        torch._dynamo.reset()
        gc.collect()
