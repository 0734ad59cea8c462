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
from autoamp.messages import advice, class_name, printable, printable_line, told
from autoamp.passes.check.saved_bytes import saved_bytes
from autoamp.passes.decide.devices import available
from autoamp.passes.decide.devices import device_of as figures_of_device
from autoamp.passes.speeds.clock import device_name, finish
from autoamp.runtime.eligible import home_of
from autoamp.runtime.examine import checked_model, options_for
from autoamp.runtime.stand_in import check_loss_fn
from autoamp.tools import bench_memory as memory
from autoamp.tools.bench import Bench, Row
from autoamp.tools.bench_step import (
    Running,
    Task,
    adamw,
    batch_size,
    in_rounds,
    ratio,
    sigma,
    token_count,
)
from autoamp.tools.bench_ways import KINDS, Way, ways_for
from autoamp.tools.count import CountingMode
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
    numbers: dict[str, tuple[float | None, int]] = {
        "generate": (generate, 0),
        "rounds": (rounds, 1),
        "seconds": (seconds, 0),
        "steps": (steps, 1),
    }
    for name, (number, least) in numbers.items():
        if number is not None and not isinstance(
            number, (int, float) if name == "seconds" else int
        ):
            raise OptionError(f"{name}={number!r} is not a whole number")
        if number is not None and not number >= least:  # NaN is refused too
            raise OptionError(f"{name}={number} is too small: give at least {least}")
    check_loss_fn(loss_fn)
    if optimizer is not None and not callable(optimizer):
        raise OptionError(
            "optimizer= takes a function of the parameters, as torch.optim.AdamW, and "
            f"no optimizer that is made already ({class_name(optimizer)})"
        )
    if data is not None and not isinstance(data, Iterable):
        raise OptionError(
            f"data={printable(repr(data))} cannot be iterated over for batches"
        )
    call = (tuple(args), dict(kwargs))
    kind = "generate" if generate else "inference" if infer else "training"
    task = Task(kind, call, generate, loss_fn, optimizer or adamw, data)
    timed_ways = ways_for(model, options_for(model, options), ways, compiled=compiled)
    return _Measurement(model, timed_ways, task, rounds, seconds, steps).run()


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
        running: the ways.
        apart: whether one way is measured after the other.
    """

    model: nn.Module
    ways: Sequence[Way]
    task: Task
    rounds: int | None
    seconds: float
    steps: int
    running: list[Running] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    apart: bool = False
    loss_from: str = ""

    def __post_init__(self) -> None:
        self.device = home_of(self.model)
        self.notes: list[str] = []
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        if load > cores:
            self.notes.append(
                f"The machine was busy already (load {load:.1f} on {cores} cores), so "
                f"the times are unreliable; {_AGAIN}"
            )
        self.begun = time.perf_counter()

    def run(self) -> Bench:
        """Measures everything.

        Raises:
            BenchInterrupted: by Ctrl-C; holds the measurements so far.
            OptionError: the batch does not fit into memory.
        """
        try:
            with _process_as_it_was():
                self._measure()
        except KeyboardInterrupt:
            self._gather()
            raise BenchInterrupted(self._bench(complete=False)) from None
        finally:
            self._close()
        return self._bench(complete=True)

    def _bench(self, *, complete: bool) -> Bench:
        task = self.task
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
            memory_how=memory.MEMORY_HOW.get(
                self.device.type, "not measured on this device"
            ),
            no_gain=_no_gain(self.ways[0], self.device),
            notes=tuple(dict.fromkeys(self.notes)),
            complete=complete,
            measured_seconds=time.perf_counter() - self.begun,
        )

    def _measure(self) -> None:
        """Measures all ways, and adds their rows."""
        self.running = [Running(way, self.task) for way in self.ways]
        for running in told(self.running, "setting up the ways"):
            self._set_up(running)
            if self.apart:
                self._time([running])
                running.close()
        if not self.apart:
            self._time(self.running)
        self._gather()

    def _set_up(self, running: Running) -> None:
        """Sets up a way and counts its figures; a way that fails notes its error."""
        memory_before = memory.Held(self.device)
        first = self.running[0]
        try:
            running.set_up(self.model)
            running.figures = _figures_of(running, first, memory_before, self.steps)
        except Exception as error:
            running.close()
            first_line = f"{type(error).__name__}: {error}".splitlines()[0]
            running.error = printable_line(first_line, 300)
            short_of_memory = memory.is_out_of_memory(error)
            if short_of_memory and any(each.ready for each in self.running):
                self._go_apart()
                self._set_up(running)
            elif running is first:
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
        if running is first and not self._fit_together(running, memory_before.more()):
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
            **running.figures,
        )

    def _close(self) -> None:
        for running in self.running:
            running.close()
        self.running = []
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


# -- one way ---------------------------------------------------------------------------


def _figures_of(
    running: Running, first: Running, held: memory.Held, steps: int
) -> dict[str, Any]:
    """Runs the first steps of a way, then counts one more step.

    Casts of the optimizer's own kernels do not count.

    Args:
        first: fp32, which has run before.
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
        **dict.fromkeys(("casts", "flops", "low_flops")),
        "deviation": running.deviation_from(first),
    }
    weights = running.model.parameters()
    if not running.way.compiled:
        batch = running.batch()
        with CountingMode(weights) as counting:
            running.backward(batch)
        running.forget()
        counts = counting.counts
        found |= {
            "casts": counts.total_casts,
            "flops": counts.flops.total(),
            "low_flops": counts.low_flops,
        }
    if running.task.trains:
        forward = partial(running.forward, running.batch())
        found["saved"] = saved_bytes(forward, running.model.parameters()).total
    return found


def _no_gain(way: Way, device: torch.device) -> str:
    """Why no way can gain here, with the option to try; "" for no reason."""
    figures, low = figures_of_device(device, way.low), short_name(way.low)
    if way.arrived:
        return (
            f"the model's weights are {way.arrived} already, so the model runs in "
            f"{way.arrived} without autoamp. To train it with fp32 master weights: "
            "convert(model, optimizer)"
        )
    if not figures.pays:
        another = advice("device", "cuda:sm_80", by_variables=False)
        return (
            f"this device ({figures.name}) has no units that multiply {low}, so {low} "
            f"would be slower than fp32. For another device, explain it with {another}"
        )
    return ""


# -- notes -----------------------------------------------------------------------------


def _disturbed(row: Row) -> list[str]:
    """A note if some times of a row lie far from the others."""
    if not row.times:
        return []
    middle = statistics.median(row.times)
    far = [abs(seconds - middle) for seconds in row.times]
    limit = _FAR * 1.4826 * statistics.median(far)
    count = sum(distance > limit for distance in far) if limit else 0
    if not count:
        return []
    said = f"{count} of {len(row.times)} times of {row.way} lie far from its median"
    return [f"{said}: another program was running; {_AGAIN}"]


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
