"""Sets up the ways on copies of the model, times them in turn, and makes the rows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from autoamp import compat
from autoamp.ask.progress import told
from autoamp.benchmark import energy, memory
from autoamp.benchmark.clock import Length, in_rounds
from autoamp.benchmark.evidence import evidence_of
from autoamp.benchmark.figures import Figures, figures_of
from autoamp.benchmark.largest import largest_batch, within_reach
from autoamp.benchmark.little_gain import look_closer
from autoamp.benchmark.record import Evidence, Row
from autoamp.benchmark.result import Bench
from autoamp.benchmark.rows import Entry, busy, disturbed, row_of
from autoamp.benchmark.step.batch import batch_size, resized
from autoamp.benchmark.step.running import Running, device_of
from autoamp.benchmark.step.task import Task
from autoamp.benchmark.step.ways import Way
from autoamp.calibrate.clock import device_name
from autoamp.dtypes import short_name
from autoamp.errors import OptionError
from autoamp.printable import class_name, printable_line

_ROOM = 0.9
"""The share of the available memory that all ways together may fill."""


class BenchInterrupted(KeyboardInterrupt):
    """The measurement was interrupted.

    Attributes:
        bench: the measurements so far.
    """

    def __init__(self, bench: Bench) -> None:
        super().__init__("the benchmark was interrupted")
        self.bench = bench


@dataclass(frozen=True)
class Plan:
    """The plan of a measurement.

    Attributes:
        ways: the ways, fp32 first.
        task: the work of a step.
        length: how long to time.
        steps: the number of losses to note.
        sweep: batch sizes; empty for the batch of the arguments alone.
        memory: bytes that the largest batch may hold; None if no largest batch is
            sought.
        grams_per_kwh: grams of CO2 of a kilowatt-hour; None if no CO2 is shown.
    """

    ways: Sequence[Way]
    task: Task
    length: Length
    steps: int = 5
    sweep: Sequence[int] = ()
    memory: int | None = None
    grams_per_kwh: float | None = None


class Measurement:
    """One benchmark of one model: `run` measures, `bench` gives the results so far."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.model, self.plan = model, plan
        self.device = device_of(model)
        self.rows: list[Row] = []
        self.entries: list[Entry] = []
        self.task = plan.task
        self.apart = False
        self.loss_from = ""
        self.evidence: Evidence | None = None
        self.notes = busy()
        self.meter, self.no_meter = energy.meter_for(self.device)
        self.begun = time.perf_counter()

    def run(self) -> Bench:
        """Measures everything.

        Raises:
            BenchInterrupted: by Ctrl-C; holds the measurements so far.
            OptionError: the first batch does not fit into memory.
        """
        try:
            with _process_as_it_was():
                for size in self.plan.sweep or (None,):
                    self._measure(size)
                self._find_largest()
        except KeyboardInterrupt:
            self._gather()
            raise BenchInterrupted(self.bench(complete=False)) from None
        finally:
            self._close()
        return self.bench(complete=True)

    def bench(self, *, complete: bool) -> Bench:
        """The measurements so far."""
        low = self.plan.ways[0].low
        return Bench(
            label=class_name(self.model),
            device=device_name(self.device),
            torch=str(torch.__version__),
            precision=short_name(low),
            work=self.task.described(),
            loss_from=self.loss_from,
            rows=tuple(self.rows),
            rounds=max((len(row.times) for row in self.rows), default=0),
            interleaved=not self.apart,
            memory_how=memory.measured_how(self.device),
            energy_how=energy.described(
                self.meter,
                self.no_meter,
                estimated=any(row.energy_from == "estimate" for row in self.rows),
            ),
            evidence=self.evidence,
            notes=tuple(dict.fromkeys(self.notes)),
            complete=complete,
            measured_seconds=time.perf_counter() - self.begun,
        )

    def _measure(self, size: int | None) -> None:
        """Measures all ways at one batch size, and adds their rows."""
        call = self.plan.task.call
        own = call if size is None else resized(call, size)
        self.task = replace(self.plan.task, call=own)
        self.entries = [Entry(way) for way in self.plan.ways]
        doing = "setting up the ways" + (f" at batch {size}" if size else "")
        for entry in told(self.entries, doing):
            self._enter(entry)
            if self.apart:
                self._time([entry])
                entry.close()
        if not self.apart:
            self._time([e for e in self.entries if e.runner is not None])
            look_closer(self.entries, self.task)
        self._gather()

    def _enter(self, entry: Entry) -> None:
        """Sets up a way and counts its figures; a way that fails notes its error."""
        held = memory.Held(self.device)
        try:
            runner = Running(entry.way, self.model, self.task)
            entry.runner = runner
            entry.figures = figures_of(runner, held, self.plan.steps)
        except Exception as error:
            entry.close()
            entry.error = printable_line(_first_line(error), 300)
            short_of_memory = memory.is_out_of_memory(error)
            if short_of_memory and any(e.runner is not None for e in self.entries):
                self._go_apart()
                self._enter(entry)
            elif entry is self.entries[0] and not self.rows:
                if not short_of_memory:
                    raise
                raise OptionError(
                    f"{class_name(self.model)} does not fit into the memory of "
                    f"{self.device} in fp32 at batch {batch_size(self.task.call)}: "
                    f"{entry.error}"
                ) from error
        else:
            entry.error = ""
            self.loss_from = self.loss_from or runner.loss_from
            if entry.way.kind == "autoamp" and not entry.way.compiled:
                self.evidence = evidence_of(entry.way, runner.model)
            if entry is self.entries[0] and not self._fit_together(entry.figures):
                self._go_apart()

    def _fit_together(self, first: Figures) -> bool:
        """Whether all ways can be held at once, judged by the first way."""
        free = memory.available(self.device)
        if free is None or first.peak is None:
            return True
        more = first.resident * (len(self.entries) - 1) + first.peak - first.resident
        return more <= free * _ROOM

    def _go_apart(self) -> None:
        """Measures one way after the other from now on."""
        self.apart = True
        self.notes.append(
            "The ways do not fit into memory together, so they were timed one after "
            "the other, and ratios are ratios of medians"
        )
        for entry in self.entries:
            if entry.runner is not None and entry.figures is not None:
                if not entry.runner.seconds and entry is not self.entries[-1]:
                    self._time([entry])
                entry.close()

    def _time(self, entries: Sequence[Entry]) -> None:
        """Times these ways in turn."""
        runners = [e.runner for e in entries if e.runner is not None]
        if not runners:
            return
        rounds: list[int] = [0]
        bar = told(rounds, "timing steps")
        next(bar)
        for _ in in_rounds(runners, self.plan.length):
            rounds.append(0)
            next(bar)
        for entry in entries:
            if entry.runner is not None:
                entry.take()
                if self.meter is not None:
                    entry.joules = self.meter.of_a_step(entry.runner)
                    entry.energy_from = self.meter.kind

    def _find_largest(self) -> None:
        """Looks for the largest batch of each way within the budget."""
        if self.plan.memory is None:
            return
        budget = within_reach(self.plan.memory, self.device)
        if budget < self.plan.memory:
            self.notes.append(
                f"The budget for the largest batch was {budget / 1e6:,.0f} MB, because "
                "no more memory is free"
            )
        last = self.rows[-1].batch
        for way in told(self.plan.ways, "looking for the largest batches"):
            places = [i for i, r in enumerate(self.rows) if r.way == way.name]
            place = next((i for i in places if self.rows[i].batch == last), None)
            if place is None or self.rows[place].error:
                continue
            try:
                found = largest_batch(way, self.model, self.plan.task, budget)
            except Exception as error:  # noqa: BLE001 (the way runs at its own batch)
                said = printable_line(_first_line(error), 200)
                self.notes.append(f"The largest batch of {way.name} is unknown: {said}")
            else:
                self.rows[place] = replace(self.rows[place], largest_batch=found)

    def _gather(self) -> None:
        """Makes a row of each way that was set up."""
        for entry in self.entries:
            entry.take()
        found = [entry for entry in self.entries if entry.error or entry.times]
        base = self.entries[0].times if self.entries else []
        for entry in found:
            row = row_of(
                entry,
                self.task,
                base,
                paired=not self.apart,
                grams_per_kwh=self.plan.grams_per_kwh,
            )
            self.rows.append(row)
            self.notes += disturbed(row)
        self._close()

    def _close(self) -> None:
        for entry in self.entries:
            entry.close()
        self.entries = []
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _first_line(error: BaseException) -> str:
    lines = f"{type(error).__name__}: {error}".splitlines()
    return lines[0]


@contextmanager
def _process_as_it_was() -> Iterator[None]:
    """A region after which the modes and random generators are as they were."""
    modes, drawn = compat.Modes(), compat.Generators()
    try:
        with compat.autocast_off(), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        drawn.restore()
        modes.restore()
