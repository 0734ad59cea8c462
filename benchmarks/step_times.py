"""Times of a step, way by way: measured in turn, and set beside autocast's."""

from __future__ import annotations

import random
import statistics
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from autoamp.passes.speeds.clock import seconds_of
from autoamp.tools.bench_memory import Held
from autoamp.tools.bench_step import ratio

from . import report, turns
from .models import CONVOLVE
from .processes import Row, new_row
from .report import said
from .setting import Setting
from .ways import CHANNELS_LAST, CPU_BF16, Step

BASELINE = "autocast"
WARM_UP, FP16_WARM_UP = 3, 12
ROUNDS, ROUNDS_ON_GPU, QUICK_ROUNDS = 11, 7, 3
STEPS_ON_GPU = 4
"""Steps of a timed round on a GPU: nobody waits for it between them, as in training."""


def measured(
    name: str,
    steps: Mapping[str, Callable[[], Step]],
    setting: Setting = CPU_BF16,
) -> Row:
    """The seconds of each way in each round; a way that fails has its error instead.

    Args:
        steps: for each way the function that makes its step.
    """
    row = new_row(name)
    ready, held = {}, {}
    for way, make in steps.items():
        try:
            torch.manual_seed(0)
            before = Held(torch.device(setting.device))
            warmed = partial(_warmed, make, warm_up(setting))
            ready[way] = turns.prepared_beside_others(warmed)
            held[way] = before.more()
        except Exception as error:  # noqa: BLE001 - the other ways are still timed
            traceback.print_exc()
            row["failures"][way] = said(error)
    if turns.wait():
        for step in ready.values():  # their memory went back to the device
            step()
    times = 1 if setting.device == "cpu" else STEPS_ON_GPU
    taken = interleaved(ready, rounds(setting), setting.device, times)
    row["ways"] = {way: {"seconds": seconds} for way, seconds in taken.items()}
    if setting.device != "cpu":
        for way, step in ready.items():
            counted = _counted(step, held[way], setting.device)
            row["ways"][way].update(counted)
    return row


def _warmed(make: Callable[[], Step], times: int) -> Step:
    step = make()
    for _ in range(times):
        step()
    return step


def interleaved(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    device: str = "cpu",
    times: int = 1,
) -> dict[str, list[float]]:
    """Seconds of each step in each round, in turn; a round takes it several `times`.

    Each round shuffles the steps, so that no step mostly follows the same other (whose
    memory it finds in the cache, or whose heat it finds in the clock); alike each time.
    """
    order = random.Random(0)
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name in order.sample(list(steps), len(steps)):
            seconds = seconds_of(steps[name], torch.device(device), times)
            taken[name].append(seconds)
    return taken


def ratios(taken: Mapping[str, list[float]], baseline: str) -> dict[str, float]:
    """For each name the median over rounds of its time divided by the baseline's."""
    base = taken[baseline]
    return {name: ratio(times, base, paired=True)[0] for name, times in taken.items()}


def rounds(setting: Setting) -> int:
    """Timed rounds."""
    if setting.quick:
        return QUICK_ROUNDS
    return ROUNDS if setting.device == "cpu" else ROUNDS_ON_GPU


def warm_up(setting: Setting) -> int:
    """Steps before the timed ones; a dynamic loss scale takes some to settle."""
    return WARM_UP if setting.precision != "fp16" or setting.quick else FP16_WARM_UP


def shares(row: Row, base: str = BASELINE) -> dict[str, float]:
    """For each way the median over rounds of its time divided by that of `base`."""
    ways = row["ways"].items()
    taken = {way: each["seconds"] for way, each in ways if "seconds" in each}
    return ratios(taken, base) if base in taken else {}


def brief(row: Row) -> str:
    """The shares of a row in one line."""
    return ", ".join(f"{way} {share:.2f}" for way, share in shares(row).items())


def table(rows: Sequence[Row], ways: Sequence[str], base: str = BASELINE) -> str:
    """The Markdown table of shares of a way's time, geometric means at the foot."""
    found = {row["name"]: shares(row, base) for row in rows}
    others = [way for way in ways if way != base]
    lines = []
    for row in rows:
        taken = row["ways"].get(base, {}).get("seconds")
        time = without_figure(row, base, base)
        if taken:
            time = f"{1e3 * statistics.median(taken):.0f}"
        cells = [
            f"{found[row['name']][way]:.2f}"
            if way in found[row["name"]]
            else without_figure(row, way, base)
            for way in others
        ]
        lines.append([row["name"], time, *cells])
    means = []
    for way in others:
        every = [each[way] for each in found.values() if way in each]
        means.append(f"{statistics.geometric_mean(every):.2f}" if every else "-")
    header = ("model", f"{base}, ms", *others)
    return report.markdown(header, [*lines, ["geometric mean", "", *means]])


def _on_gpu(way: Mapping[str, Any] | None) -> str:
    if way is None or "peak" not in way:
        return "failed"
    memory = f"{(way['held'] + way['peak']) / 2**20:.0f}"
    if "kernels" not in way:
        return memory
    return f"{memory}, {way['kernels']}, {1e3 * way['busy']:.1f}"


GPU_NOTE = f"""\
On the GPU: the memory of a way (its weights and copies, and the most that a step
allocates beside them), the kernels of a step, and the time in which they run: a step
that takes longer waits for Python. A timed round is {STEPS_ON_GPU} steps between which
nobody waits for the GPU."""


def ways_of(name: str, ways: Sequence[str]) -> list[str]:
    """The ways that a model has: without a convolution none is channels last."""
    has = name in CONVOLVE
    return [way for way in ways if has or not way.endswith(CHANNELS_LAST)]


def without_figure(row: Row, way: str, base: str = BASELINE) -> str:
    """What stands in the place of a figure that a row does not have."""
    if way not in ways_of(row["name"], [way]):
        return "-"
    failed = {way, "all", base} & set(row["failures"])
    return "failed" if failed else "not measured"


def gpu_tables(rows: Sequence[Row], setting: Setting) -> list[str]:
    """What was counted on a GPU, if there was one."""
    if setting.device == "cpu":
        return []
    ways = [*dict.fromkeys(way for row in rows for way in row["ways"])]
    header = ("model", *(f"{way}: MiB, kernels, ms" for way in ways))
    lines = [
        [row["name"], *(_on_gpu(row["ways"].get(way)) for way in ways)] for row in rows
    ]
    return [GPU_NOTE, report.markdown(header, lines)]


def _kernels(step: Callable[[], None], device: str) -> dict[str, Any]:
    """The kernels of a step: how many, and the seconds they run.

    Copies and fills of memory count as kernels.
    """
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as taken:
        step()
        torch.cuda.synchronize(device)
    every = [
        event.self_device_time_total / 1e6
        for event in taken.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return {"kernels": len(every), "busy": sum(every)}


def _counted(step: Callable[[], None], held: int, device: str) -> dict[str, Any]:
    """The memory and the kernels of a step, as the rows of the tables hold them.

    `held` is the bytes that its way keeps between steps.
    """
    peak = Held(torch.device(device)).peak(step)
    found = {"held": held, "peak": peak}
    try:
        return found | _kernels(step, device)
    except RuntimeError:  # a machine may forbid its counters
        traceback.print_exc()
        return found
