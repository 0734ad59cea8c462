"""The speeds by which ops are priced: measured on this machine, or a table's.

Speeds are measured once for a device, a number of threads and a version of torch, and
kept on disk.  Of several ranks the first measures, and the others take its figures, so
that all place ops alike.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE, short_name
from autoamp.messages import advice, log_once, printable_line
from autoamp.passes.decide.devices import Curve, Device, Rates, device_of, is_here
from autoamp.passes.speeds.clock import described, device_name, seconds_of
from autoamp.passes.speeds.store import Store
from autoamp_said import logger_of

logger = logger_of(__name__)

Times = Mapping[str, float]
"""The name of a probe to the nanoseconds of one call."""

SWITCH = "AUTOAMP_CALIBRATE"
"""The environment variable that switches measuring off."""

OFF = ("0", "false", "off")

SECONDS, _AT_LEISURE = 0.5, 10.0
"""The time that a measurement may take, by itself and where a user has asked for it."""

_FEWEST, _MOST = 3, 15
"""Bounds on the rounds; the first one warms up."""

_AGREE = 2.0
"""The most that the second shortest reading of a probe takes, over the shortest.

With this bound 20 of 20 measurements on an idle CPU counted, and none of 20 beside two
processes that multiply matrices (benchmarks/results/calibration.md).
"""

_PATIENCE = 10.0
"""Seconds that a rank waits for the figures of the first rank: longer than measuring
takes, and than ranks are apart at their first calls as a rule."""

STEPS = 4
"""Steps of the grid of figures per doubling.

Figures are rounded to powers of 2 ** (1 / STEPS), a grid of 19 %, since another
measurement on the same machine gives figures that differ by several per cent
(benchmarks/results/calibration.md).
"""

_LAYOUT_GAIN = 0.95
"""The most time of a convolution with the channels last, over the usual layout's, for
which copies of weights in another layout pay."""

_LONGEST_NS = 1e9
"""No probe takes a second: a longer time is no measurement."""

_known: dict[tuple[str, torch.dtype, bool], Device] = {}
_measuring = threading.Lock()


class NoTimeError(Exception):
    """The device is too slow, or too busy, to be measured in the time there is."""


def device_for(device: torch.device, low: torch.dtype, *, calibrate: bool) -> Device:
    """The speeds of `device`, of this machine, computing in `low`.

    Args:
        calibrate: whether the figures may be measured ones.
    """
    table = device_of(device, low)
    if is_off() or not (calibrate and table.pays and is_here(device.type)):
        return table
    # Waiting for a device is an error while a CUDA graph is captured.
    if compat.is_capturing(device):
        return table
    # Ranks that start later have figures to agree on, whatever this process has found.
    key = described(device), low, compat.are_several()
    with _measuring:
        if key not in _known:
            find = _shared if compat.are_several() else _kept_or_measured
            _known[key] = _device(find(device, low), device, low, table)
    return _known[key]


def measure_again(device: torch.device, low: torch.dtype) -> Device:
    """Measures the speeds of a device anew, at leisure, and keeps them.

    Raises:
        OSError: the file that holds the speeds kept so far cannot be deleted.
    """
    with _measuring:
        _store(device, low).path.unlink(missing_ok=True)
        _known.clear()
        found = _kept_or_measured(device, low, _AT_LEISURE)
    return _device(found, device, low, device_of(device, low))


def is_off() -> bool:
    """Whether `AUTOAMP_CALIBRATE` switches measuring off."""
    return os.environ.get(SWITCH, "").strip().lower() in OFF


def _device(
    found: Times | str, device: torch.device, low: torch.dtype, table: Device
) -> Device:
    """The device by the times that were found, or by a table for the reason found."""
    if isinstance(found, str):
        return replace(table, name=f"{table.name} by a table, as {found}")
    return device_from(found, low, table, f"{_shown_name(device)}, measured")


def _shown_name(device: torch.device) -> str:
    """The device's name without double spaces."""
    return " ".join(device_name(device).split())


def _store(device: torch.device, low: torch.dtype) -> Store:
    """The times of all probes on a device, by the name of the low dtype."""
    return Store(
        f"speeds, {described(device)}",
        lambda dtype, times: dtype == short_name(low) and is_sane(times, low, device),
    )


def is_sane(times: object, low: torch.dtype, device: torch.device) -> bool:
    """Whether `times`, read from a file, may be the times of all probes."""
    names = work_of(low, device.type).keys()
    if not isinstance(times, dict) or times.keys() != names:
        return False
    return all(
        isinstance(ns, int | float)
        and not isinstance(ns, bool)
        and 1.0 <= ns <= _LONGEST_NS  # which no NaN is
        for ns in times.values()
    )


def _kept_or_measured(
    device: torch.device, low: torch.dtype, seconds: float = SECONDS
) -> Times | str:
    """The times kept on disk, or measured now; where there are none, the reason."""
    store, dtype = _store(device, low), short_name(low)
    if dtype in store.known:
        return dict(store.known[dtype])
    begun = time.perf_counter()
    try:
        times = measured(device, low, seconds)
    except NoTimeError:
        return _given_up(device, f"it was too busy to be measured in {seconds:g} s")
    except Exception as error:  # noqa: BLE001 (a device that fails has a table)
        problem = printable_line(f"{type(error).__name__}: {error}", 200)
        return _given_up(device, f"measuring failed ({problem})")
    store.add({dtype: {name: round(ns) for name, ns in times.items()}})
    logger.info(
        "autoamp: measured the speeds of %s in %.1f s, once: they are kept in %s "
        "(%s takes the figures of a table)",
        _shown_name(device),
        time.perf_counter() - begun,
        store.path,
        advice("calibrate", False, by_variables=True),
    )
    # As stored: where two processes have measured at once, the first counts.
    return dict(store.known[dtype])


def _given_up(device: torch.device, why: str) -> str:
    text = f"autoamp: the speeds of {_shown_name(device)} are those of a table: {why}"
    log_once(logger, logging.INFO, text)
    return why


# -- several ranks ---------------------------------------------------------------------


def _shared(device: torch.device, low: torch.dtype) -> Times | str:
    """The times of the first rank, or of the rank that was first to have some."""
    store = compat.default_store()
    if store is None:
        return "ranks cannot tell each other their speeds"
    key = f"autoamp/speeds/{device.type}/{short_name(low)}"
    try:
        if torch.distributed.get_rank() == 0 or not _is_set(store, key):
            said = json.dumps(_kept_or_measured(device, low))
            # `add` is atomic: of several ranks that waited in vain, one sets the
            # figures.
            if store.add(f"{key}/turns", 1) == 1:
                store.set(key, said)
        store.wait([key], timedelta(seconds=_PATIENCE))
        found = json.loads(store.get(key))
    except Exception as error:  # noqa: BLE001 (a rank that is alone has a table)
        problem = printable_line(f"{type(error).__name__}: {error}", 200)
        return _given_up(device, f"the ranks cannot tell each other ({problem})")
    if is_sane(found, low, device):
        return dict(found)
    return found if isinstance(found, str) else "the first rank has no figures"


def _is_set(store: Any, key: str) -> bool:
    """Whether the first rank sets a key in time."""
    until = time.monotonic() + min(_PATIENCE, store.timeout.total_seconds() / 2)
    while time.monotonic() < until:
        if store.check([key]):
            return True
        time.sleep(0.01)
    return False


# -- from probes to figures ------------------------------------------------------------


def measured(
    device: torch.device, low: torch.dtype, seconds: float = SECONDS
) -> dict[str, float]:
    """The nanoseconds of one call of each probe.

    The probes take turns, so that a disturbance spoils one reading of many probes and
    not all readings of one.  Disturbances only make a reading longer, so the least is
    taken, if another reading agrees with it.

    Raises:
        NoTimeError: three rounds take longer than `seconds`, or their readings differ.
        Exception: the device fails.
    """
    begun = time.perf_counter()
    readings: dict[str, list[float]] = defaultdict(list)
    with compat.on_real_numbers():
        every = probes(device, low)
        for number in range(1, _MOST + 1):
            started = time.perf_counter()
            for probe in every:
                reading = 1e9 * seconds_of(probe.call, device, probe.times)
                readings[probe.name].append(reading)
                if number < _FEWEST and time.perf_counter() - begun > seconds:
                    raise NoTimeError
            now = time.perf_counter()
            # Another round as long as this one would not end in time.
            if number >= _FEWEST and 2 * now - started - begun > seconds:
                break
    for each in readings.values():
        least, second = [*sorted(each), *each][:2]
        if second > _AGREE * least:
            raise NoTimeError
    return {name: min(each) for name, each in readings.items()}


def device_from(times: Times, low: torch.dtype, table: Device, name: str) -> Device:
    """The device that `times` describe.

    Args:
        times: the times of all probes.
        table: the device by the table, which tells all that is no time.
        name: the name of the device in reports.
    """
    launch = _rounded(times["start of an op"])
    work = work_of(low, table.type)
    high_rates, low_rates = (
        _rates(times, work, dtype, launch) for dtype in (HIGH_DTYPE, low)
    )
    last, usual = (
        times[f"{short_name(low)} convolution{layout}"]
        for layout in (", channels last", "")
    )
    return replace(
        table,
        name=name,
        bytes_per_ns=_rounded(work["stream"] / times["stream"]),
        launch_ns=launch,
        high_flops_per_ns=high_rates.products[-1][1],
        low_flops_per_ns=low_rates.products[-1][1],
        tf32_flops_per_ns=0.0,  # the fp32 products were timed as torch computes them
        channels_last=table.channels_last and last < _LAYOUT_GAIN * usual,
        high=high_rates,
        low=low_rates,
        casts=_by_size(times, work, "cast", launch),
    )


def _rates(
    times: Times, work: Mapping[str, int], dtype: torch.dtype, launch: float
) -> Rates:
    name = short_name(dtype)
    start = _beyond(times[f"{name} start of a product"], launch)

    def rate(probe: str, fixed: float = 0.0) -> float:
        probe = f"{name} {probe}"
        return _rounded(work[probe] / _beyond(times[probe], fixed))

    return Rates(
        products=tuple(
            (float(rows), rate(f"product of {rows} rows", launch + start))
            for rows in ROWS
        ),
        convolution=max(rate("convolution"), rate("convolution, channels last")),
        channelwise=rate("convolution of each channel"),
        batched=rate("batched product"),
        light=_by_size(times, work, f"{name} light op", launch),
        heavy=_by_size(times, work, f"{name} heavy op", launch),
        start_ns=_rounded(start),
    )


def _by_size(times: Times, work: Mapping[str, int], op: str, launch: float) -> Curve:
    """Bytes moved to GB/s."""
    names = [f"{op} of {size} numbers" for size in SIZES]
    return tuple(
        (float(work[name]), _rounded(work[name] / _beyond(times[name], launch)))
        for name in names
    )


def _beyond(spent: float, fixed: float) -> float:
    """`spent` without a fixed cost, of which it may hold less than the fixed cost."""
    return max(spent - fixed, 0.1 * spent)


def _rounded(figure: float) -> float:
    """The nearest power of 2 ** (1 / STEPS), to four digits."""
    nearest = 2.0 ** (round(math.log2(figure) * STEPS) / STEPS)
    return float(f"{nearest:.4g}")


# -- the calls that are timed ----------------------------------------------------------

# The numbers in their tensors are constants: no random generator moves.  Weights take
# turns, so that a processor's caches hold none of them, as in a model of ordinary size.

ROWS = (1, 4, 16, 64, 256)
"""The rows of the matrix products."""

SIZES = (2**16, 2**19, 2**22)
"""Numbers in the tensors of ops without products: 256 KiB, 2 and 16 MiB of fp32.

The smallest tensors fit a core's cache.
"""

STREAM = 2**23
"""Numbers in tensors that no usual cache holds: 32 MiB of fp32."""

_SMALL = 16
"""The width of products that take no longer than their start."""

_LAYOUTS = {"": torch.contiguous_format, ", channels last": torch.channels_last}


@dataclass(frozen=True)
class Shapes:
    """The sizes of products on one type of device.

    Attributes:
        weight: the shape of the weight of a matrix product: results, operands.
        weights: how many weights take turns.
        image, kernel: the shapes of a convolution's operands; its output is as large.
        filters: the kernel of a convolution of each channel by itself.
        heads: the shape of the operands of a batched product, as attention has it.
    """

    weight: tuple[int, int]
    weights: int
    image: tuple[int, ...]
    kernel: tuple[int, ...]
    filters: tuple[int, ...]
    heads: tuple[int, int, int]


_ON_CPU = Shapes(
    weight=(2048, 1024),
    weights=8,
    image=(2, 64, 56, 56),
    kernel=(64, 64, 3, 3),
    filters=(64, 1, 7, 7),
    heads=(24, 256, 64),
)
_ELSEWHERE = Shapes(  # a GPU needs larger products to be busy
    weight=(4096, 4096),
    weights=4,
    image=(32, 128, 56, 56),
    kernel=(128, 128, 3, 3),
    filters=(128, 1, 7, 7),
    heads=(192, 1024, 64),
)


@dataclass(frozen=True)
class Probe:
    """A call that is timed.

    Attributes:
        name: the name of its time, such as "bf16 product of 4 rows".
        call: makes the call once.
        work: what the call does: floating-point operations of a product, bytes that
            another op reads and writes.
        times: how many calls one reading makes, so that the shortest are many times the
            clock's tick.
    """

    name: str
    call: Callable[[], object]
    work: int = 0
    times: int = 1


def probes(
    device: torch.device, low: torch.dtype, type_: str | None = None
) -> list[Probe]:
    """The calls for a device and a low dtype, made ready.

    Ops of all sizes share their operands: on a CPU all tensors together take 230 MB.
    They write to memory that is there already, since how long new memory takes depends
    on what the process has freed before.

    Args:
        type_: the type of device whose shapes are used; by default that of `device`.
    """
    shapes = _ON_CPU if (type_ or device.type) == "cpu" else _ELSEWHERE
    one = _filled(1, device=device, dtype=HIGH_DTYPE)
    x, y, out = (_filled(STREAM, device=device, dtype=HIGH_DTYPE) for _ in range(3))
    shorter = [_filled(SIZES[-1], device=device, dtype=low) for _ in range(3)]
    narrow = shorter[0]
    return [
        Probe("start of an op", lambda: torch.neg(one), times=50),
        Probe("stream", lambda: torch.add(x, y, out=out), 3 * x.nbytes),
        *_products(device, HIGH_DTYPE, shapes),
        *_products(device, low, shapes),
        *_ops(x, y, out),
        *_ops(*shorter),
        *(
            Probe(
                f"cast of {size} numbers",
                partial(narrow[:size].copy_, x[:size]),
                x[:size].nbytes + narrow[:size].nbytes,
                _calls(size),
            )
            for size in SIZES
        ),
    ]


@functools.cache
def work_of(low: torch.dtype, type_: str) -> dict[str, int]:
    """The name of each probe, and its work."""
    with compat.on_real_numbers():
        every = probes(torch.device("meta"), low, type_)
    return {probe.name: probe.work for probe in every}


def _filled(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, 0.5, dtype=dtype, device=device)


def _products(
    device: torch.device, dtype: torch.dtype, shapes: Shapes
) -> Iterator[Probe]:
    filled: Any = partial(_filled, device=device, dtype=dtype)
    name, small = short_name(dtype), filled(_SMALL, _SMALL)
    start = f"{name} start of a product"
    yield Probe(start, lambda: functional.linear(small, small), times=20)
    # Of one weight the cache would hold every byte, and the product would seem faster
    # than it is in a model.
    held = [filled(*shapes.weight) for _ in range(shapes.weights)]
    for rows in ROWS:
        x, turns = filled(rows, shapes.weight[1]), itertools.cycle(held)

        # Defaults, since the loop goes on before the probe is called.
        def product(x: torch.Tensor = x, turns: Any = turns) -> torch.Tensor:
            return functional.linear(x, next(turns))

        flops = 2 * rows * math.prod(shapes.weight)
        # A call that is about as short as a tick of the clock is read several times
        # over.
        times = 4 if rows <= ROWS[1] else 1
        yield Probe(f"{name} product of {rows} rows", product, flops, times)
    positions = 2 * shapes.image[0] * math.prod(shapes.image[2:])
    for said, layout in _LAYOUTS.items():
        image, kernel = (
            filled(*shape).contiguous(memory_format=layout)
            for shape in (shapes.image, shapes.kernel)
        )
        convolution = partial(functional.conv2d, image, kernel, padding=1)
        flops = positions * math.prod(shapes.kernel)
        yield Probe(f"{name} convolution{said}", convolution, flops)
    image, filters = filled(*shapes.image), filled(*shapes.filters)
    each = partial(
        functional.conv2d, image, filters, padding=3, groups=shapes.filters[0]
    )
    flops = positions * math.prod(shapes.filters)
    yield Probe(f"{name} convolution of each channel", each, flops)
    batch, length, width = shapes.heads
    heads, flops = filled(*shapes.heads), 2 * batch * length * length * width
    yield Probe(f"{name} batched product", partial(torch.bmm, heads, heads.mT), flops)


def _ops(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> Iterator[Probe]:
    name = short_name(x.dtype)
    for size in SIZES:
        one, other, result = x[:size], y[:size], out[:size]
        light = partial(torch.add, one, other, out=result)
        heavy = partial(torch.erf, one, out=result)
        for kind, call, tensors in (("light", light, 3), ("heavy", heavy, 2)):
            said = f"{name} {kind} op of {size} numbers"
            yield Probe(said, call, tensors * one.nbytes, _calls(size))


def _calls(size: int) -> int:
    return 8 if size == SIZES[0] else 1
