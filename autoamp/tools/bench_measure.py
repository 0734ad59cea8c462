"""Sets up the ways on copies of the model, times them in turn, and makes the rows."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autoamp import compat
from autoamp.dtypes import short_name
from autoamp.errors import OptionError, UnsupportedModelError
from autoamp.messages import class_name, printable_line, told
from autoamp.passes.check.saved import saved_bytes
from autoamp.passes.decide.devices import available
from autoamp.passes.decide.devices import device_of as figures_of_device
from autoamp.passes.speeds.clock import device_name, finish, surely_less
from autoamp.report.reporting import report_on
from autoamp.runtime.examine import checked_model, options_for
from autoamp.tools import bench_meters as meters
from autoamp.tools.bench import Bench
from autoamp.tools.bench_answer import WORTH, Evidence, Row, evidence_from
from autoamp.tools.bench_step import (
    Running,
    Task,
    adamw,
    batch_size,
    growth_of_steps,
    in_rounds,
    ratio,
    resized,
    sigma,
    token_count,
)
from autoamp.tools.bench_ways import KINDS, Way, arrived, device_of, ways_for
from autoamp.tools.count import CountingMode, TrafficMode
from autoamp.tools.named import given
from autoamp.training.meter import shares_of

_ROOM = 0.9
"""The share of the available memory that all ways together may fill."""

_SEED = 0
"""The seed of the random generators in each way, so that dropout masks are equal."""

_WARM_UP = 2
"""The least steps before the counted step: the first captures, the second settles."""

_FAR = 10.0
"""Sigmas from the median, by the median absolute deviation, that make an outlier."""

_AGAIN = "measure again when nothing else runs"


class BenchInterrupted(KeyboardInterrupt):
    """The measurement was interrupted.

    Attributes:
        bench: the measurements so far.
    """

    def __init__(self, bench: Bench) -> None:
        super().__init__("the benchmark was interrupted")
        self.bench = bench


# -- the arguments of `autoamp.bench` --------------------------------------------------


def bench_model(
    model: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    options: Mapping[str, Any] | None = None,
    loss_fn: Callable[[Any], Any] | None = None,
    optimizer: Callable[..., Any] | None = None,
    data: Iterable[Any] | None = None,
    infer: bool = False,
    generate: int = 0,
    ways: Iterable[str] = KINDS,
    compiled: bool = False,
    rounds: int | None = None,
    seconds: float = 10.0,
    steps: int = 5,
    sweep: Sequence[int] = (),
    memory: int | str | None = None,
    grams_per_kwh: float | None = None,
) -> Bench:
    """See `autoamp.bench`.

    Raises:
        AutoampError: the model, its arguments or an option cannot be used.
        BenchInterrupted: by Ctrl-C; holds the measurements so far.
    """
    if isinstance(model, str):
        how = {"trains": not (infer or generate), "room": generate, "data": True}
        made = given("bench", model, args, kwargs, **how)
        model, args, kwargs = made.model, made.args, made.kwargs
        data = made.data if data is None else data
    elif not isinstance(model, nn.Module):
        model, args, kwargs, data = _made_by(model, args, kwargs, data)
    model = checked_model(model)
    _refuse_small(generate=generate, rounds=rounds, seconds=seconds, steps=steps)
    if (sweep or memory is not None) and data is not None:
        raise OptionError(
            "sweep= and memory= resize the arguments of a call, but batches of data= "
            "cannot be resized: give data=, or sweep= and memory="
        )
    budget = None if memory is None else meters.bytes_in(memory)
    call = (tuple(args), dict(kwargs))
    for size in [*sweep, *([1] if memory is not None else [])]:
        resized(call, size)
    kind = "generate" if generate else "inference" if infer else "training"
    task = Task(kind, call, generate, loss_fn, optimizer or adamw, data)
    found = ways_for(model, options_for(model, options), ways, compiled=compiled)
    return _Measurement(
        model, found, task, rounds, seconds, steps, sweep, budget, grams_per_kwh
    ).run()


def _refuse_small(**numbers: float | None) -> None:
    least = {"generate": 0, "rounds": 1, "seconds": 0, "steps": 1}
    for name, value in numbers.items():
        if value is not None and not value >= least[name]:
            raise OptionError(
                f"{name}={value} is too small: give at least {least[name]}"
            )


def _made_by(
    factory: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], data: Any
) -> tuple[Any, tuple[Any, ...], dict[str, Any], Any]:
    """The model, arguments and data that a factory returns."""
    if not callable(factory):
        raise UnsupportedModelError(
            "bench() takes a torch.nn.Module, or a function that returns (model, "
            f"args), not {type(factory).__name__}"
        )
    if args or kwargs:
        raise OptionError(
            "the factory returns the arguments of the call; give bench() none"
        )
    returned = factory()
    match returned:
        case (nn.Module() as model, tuple() as found):
            return model, found, {}, data
        case (nn.Module() as model, tuple() as found, dict() as named):
            return model, found, named, data
        case (nn.Module() as model, tuple() as found, dict() as named, batches):
            return model, found, named, batches if data is None else data
    raise UnsupportedModelError(
        f"the factory returned {type(returned).__name__}; it must return (model, args),"
        " (model, args, kwargs) or (model, args, kwargs, data)"
    )


# -- the measurement -------------------------------------------------------------------


@dataclass
class _Measurement:
    """One benchmark of one model, and the measurements so far.

    Attributes:
        ways: the ways, fp32 first.
        task: the work of a step.
        rounds, seconds: how long to time; see `in_rounds`.
        steps: the number of losses to note.
        sweep: batch sizes; empty for the batch of the arguments alone.
        memory: bytes that the largest batch may hold; None if none is sought.
        grams_per_kwh: grams of CO2 of a kilowatt-hour; None if no CO2 is shown.
        running: the ways at the batch size that is measured now.
        apart: whether one way is measured after the other.
    """

    model: nn.Module
    ways: Sequence[Way]
    task: Task
    rounds: int | None
    seconds: float
    steps: int
    sweep: Sequence[int]
    memory: int | None
    grams_per_kwh: float | None
    running: list[Running] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    apart: bool = False
    loss_from: str = ""
    evidence: Evidence | None = None

    def __post_init__(self) -> None:
        self.device = device_of(self.model)
        self.notes = _busy()
        self.meter, self.no_meter = meters.meter_for(self.device)
        self.begun = time.perf_counter()

    def run(self) -> Bench:
        """Measures everything.

        Raises:
            BenchInterrupted: by Ctrl-C; holds the measurements so far.
            OptionError: the first batch does not fit into memory.
        """
        try:
            with _process_as_it_was():
                for size in self.sweep or (None,):
                    self._measure(size)
                self._find_largest()
        except KeyboardInterrupt:
            self._gather()
            raise BenchInterrupted(self._bench(complete=False)) from None
        finally:
            self._close()
        return self._bench(complete=True)

    def _bench(self, *, complete: bool) -> Bench:
        task, energy_how = self.task, f"not measured ({self.no_meter})"
        if self.meter is not None:
            energy_how = self.meter.how
        elif any(row.energy_from for row in self.rows):
            energy_how += f"; the joules are {meters.ESTIMATED}"
        return Bench(
            label=class_name(self.model),
            device=device_name(self.device),
            torch=str(torch.__version__),
            precision=short_name(self.ways[0].low),
            work=f"generate {task.tokens}" if task.tokens else task.kind,
            loss_from=self.loss_from,
            rows=tuple(self.rows),
            rounds=max((len(row.times) for row in self.rows), default=0),
            interleaved=not self.apart,
            memory_how=meters.MEMORY_HOW.get(
                self.device.type, "not measured on this device"
            ),
            energy_how=energy_how,
            evidence=self.evidence,
            notes=tuple(dict.fromkeys(self.notes)),
            complete=complete,
            measured_seconds=time.perf_counter() - self.begun,
        )

    def _measure(self, size: int | None) -> None:
        """Measures all ways at one batch size, and adds their rows."""
        call = self.task.call if size is None else resized(self.task.call, size)
        task = replace(self.task, call=call)
        self.running = [Running(way, task) for way in self.ways]
        doing = "setting up the ways" + (f" at batch {size}" if size else "")
        for running in told(self.running, doing):
            self._set_up(running)
            if self.apart:
                self._time([running])
                running.close()
        if not self.apart:
            self._time(self.running)
            self._look_closer()
        self._gather()

    def _set_up(self, running: Running) -> None:
        """Sets up a way and counts its figures; a way that fails notes its error."""
        held = meters.Held(self.device)
        first = self.running[0]
        try:
            running.set_up(self.model)
            running.figures = _figures_of(running, held, self.steps)
        except Exception as error:
            running.close()
            running.error = _said(error, 300)
            short_of_memory = meters.is_out_of_memory(error)
            if short_of_memory and any(each.ready for each in self.running):
                self._go_apart()
                self._set_up(running)
            elif running is first and not self.rows:
                if not short_of_memory:
                    raise
                raise OptionError(
                    f"{class_name(self.model)} does not fit into the memory of "
                    f"{self.device} in fp32 at batch {batch_size(running.task.call)}: "
                    f"{running.error}"
                ) from error
            return
        running.error = ""
        self.loss_from = self.loss_from or running.loss_from
        if running.way.kind == "autoamp" and not running.way.compiled:
            self.evidence = _evidence_of(running)
        if running is first and not self._fit_together(running, held.more()):
            self._go_apart()

    def _fit_together(self, first: Running, resident: int) -> bool:
        """Whether all ways can be held at once, if they hold as much as the first."""
        free, peak = available(self.device), first.figures["peak"]
        if free is None or peak is None:
            return True
        return bool(peak + resident * (len(self.running) - 1) <= free * _ROOM)

    def _go_apart(self) -> None:
        """Measures one way after the other from now on."""
        self.apart = True
        self.notes.append(
            "The ways do not fit into memory together, so they were timed one after "
            "the other, and ratios are ratios of medians"
        )
        for running in self.running:
            self._time([running])
            running.close()

    def _time(self, ways: Sequence[Running]) -> None:
        """Times those of these ways that are set up, in turn."""
        ways = [running for running in ways if running.ready]
        if not ways:
            return
        rounds: list[int] = [0]
        bar = told(rounds, "timing steps")
        next(bar)
        for _ in in_rounds(ways, self.rounds, self.seconds):
            rounds.append(0)
            next(bar)
        if self.meter is not None:
            for running in ways:
                running.figures["joules"] = self.meter.of_a_step(running)
                running.figures["energy_from"] = self.meter.kind

    def _look_closer(self) -> None:
        """Times twice the batch in fp32 and autoamp, if autoamp gains little.

        Nothing is noted for a batch that cannot be doubled, or whose double does not
        fit into memory.
        """
        kinds = ("fp32", "autoamp")
        pair = [
            each
            for each in self.running
            if each.way.kind in kinds and not each.way.compiled and each.ready
        ]
        size = batch_size(pair[0].task.call) if pair else None
        if len(pair) < 2 or not size or self.task.data is not None:
            return
        base, ours = pair[0].seconds, pair[1].seconds
        middles = statistics.median(ours), statistics.median(base)
        if surely_less(ours, base) and middles[0] <= WORTH * middles[1]:
            return
        call = pair[0].task.call
        twice = resized(call, 2 * size)
        for running in told(pair, "timing twice the batch"):
            try:
                running.figures["growth"] = growth_of_steps(running, call, twice)
            except Exception:  # noqa: BLE001 (the model may take one batch size only)
                return

    def _find_largest(self) -> None:
        """Looks for the largest batch of each way within the budget."""
        if self.memory is None:
            return
        free = available(self.device)
        budget = self.memory if free is None else min(self.memory, int(free * _ROOM))
        if budget < self.memory:
            self.notes.append(
                f"The budget for the largest batch was {budget / 1e6:,.0f} MB, because "
                "no more memory is free"
            )
        last = self.rows[-1].batch
        for way in told(self.ways, "looking for the largest batches"):
            for place, row in enumerate(self.rows):
                if row.way != way.name or row.batch != last or row.error:
                    continue
                try:
                    found = meters.largest_size(partial(self._peak, way), budget)
                except Exception as error:  # noqa: BLE001 (it runs at its own batch)
                    self.notes.append(
                        f"The largest batch of {way.name} is unknown: "
                        f"{_said(error, 200)}"
                    )
                else:
                    self.rows[place] = replace(row, largest_batch=found)

    def _peak(self, way: Way, size: int) -> int | None:
        """The most memory held in a step of this size; None where memory runs out."""
        held = meters.Held(self.device)
        call = resized(self.task.call, size)
        self.running = [running := Running(way, replace(self.task, call=call))]
        try:
            running.set_up(self.model)
            for _ in range(_WARM_UP):  # the second step holds the optimizer's state
                running.step()
            return held.peak(running.step)
        except Exception as error:
            if not meters.is_out_of_memory(error):
                raise
            return None
        finally:
            self._close()

    def _gather(self) -> None:
        """Makes a row of each way that was set up."""
        base = self.running[0].seconds if self.running else []
        for running in self.running:
            if running.error or running.seconds:
                row = self._row_of(running, base)
                self.rows.append(row)
                self.notes += _disturbed(row)
        self._close()

    def _row_of(self, running: Running, base: Sequence[float]) -> Row:
        """The row of a way; `base` are the times of fp32."""
        way, task, times = running.way, running.task, tuple(running.seconds)
        loads = task.data is not None
        size = None if loads else batch_size(task.call)
        row = Row(way.name, way.kind, way.compiled, size, running.error)
        if running.error:
            return row
        figures = running.figures
        if "joules" not in figures:
            figures["joules"] = meters.estimated_joules(figures)
            if figures["joules"] is not None:
                figures["energy_from"] = "estimate"
        if figures["joules"] is not None and self.grams_per_kwh is not None:
            figures["co2_grams"] = figures["joules"] / 3.6e3 * self.grams_per_kwh
        tokens = None if loads else token_count(task.call)
        if task.kind == "generate":
            tokens = (size or 1) * task.tokens
        middle = statistics.median(times)
        share = ratio(times, base, paired=not self.apart) if base else (None, None)
        return replace(
            row,
            seconds=middle,
            sigma=sigma(times),
            ratio=share[0],
            ratio_sigma=share[1],
            times=times,
            data_seconds=statistics.median(running.data_seconds) if loads else None,
            samples=size / middle if size else None,
            tokens=tokens / middle if tokens else None,
            **figures,
        )

    def _close(self) -> None:
        for running in self.running:
            running.close()
        self.running = []
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


# -- one way ---------------------------------------------------------------------------


def _figures_of(running: Running, held: meters.Held, steps: int) -> dict[str, Any]:
    """Runs the first steps of a way, then counts one more step.

    Bytes and casts of the optimizer's own kernels do not count.

    Args:
        held: the memory that was held before the way was set up.
        steps: the number of losses to note.

    Returns:
        Values of fields of a `Row`; None for a figure that cannot be counted.
    """
    torch.manual_seed(_SEED)
    running.rewind()
    losses = []
    first_call = 0.0
    with running.updates_measured() as meter:
        for _ in range(max(steps, _WARM_UP)):
            batch = running.batch()
            start = time.perf_counter()
            losses.append(running.step(batch))
            finish(running.device)
            first_call = first_call or time.perf_counter() - start
            del batch
    kept = [loss.item() for loss in losses[:steps] if loss is not None]
    del losses
    found = {
        "first_call": first_call,
        "losses": tuple(kept),
        "peak": held.peak(running.step),
        "saved": None,
        "updates": tuple(shares_of(running.model, [meter])) if meter else (),
        **dict.fromkeys(("moved", "casts", "flops", "low_flops")),
    }
    weights = running.model.parameters()
    if not running.way.compiled:
        batch = running.batch()
        with CountingMode(weights) as counting, TrafficMode() as traffic:
            running.backward(batch)
        running.forget()
        counts = counting.counts
        found |= {
            "moved": traffic.traffic.bytes(),
            "casts": counts.total_casts,
            "flops": counts.flops.total(),
            "low_flops": counts.low_flops,
        }
    if running.task.trains:
        forward = partial(running.forward, running.batch())
        found["saved"] = saved_bytes(forward, running.model.parameters()).total
    return found


def _evidence_of(running: Running) -> Evidence:
    """The evidence of a model that autoamp has converted, after it has run."""
    device = figures_of_device(running.device, running.way.low)
    report, half = report_on(running.model), arrived(running.model)
    if report is None:
        return Evidence(device.pays, device.name, half)
    return evidence_from(report, device, half)


# -- notes -----------------------------------------------------------------------------


def _busy() -> list[str]:
    """A note if other programs use more cores than this machine has."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= cores:
        return []
    said = f"The machine was busy already (load {load:.1f} on {cores} cores)"
    return [f"{said}, so the times are unreliable; {_AGAIN}"]


def _disturbed(row: Row) -> list[str]:
    """A note if some times of a row lie far from the others."""
    if not row.times:
        return []
    middle = statistics.median(row.times)
    far = [abs(seconds - middle) for seconds in row.times]
    limit = _FAR * 1.4826 * statistics.median(far)
    count = sum(each > limit for each in far) if limit else 0
    if not count:
        return []
    said = f"{count} of {len(row.times)} times of {row.way} lie far from its median"
    return [f"{said}: another program was running; {_AGAIN}"]


def _said(error: BaseException, most: int) -> str:
    """The first line of an error, with its class."""
    lines = f"{type(error).__name__}: {error}".splitlines()
    return printable_line(lines[0], most)


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
