"""`python -m benchmarks.beside_half`: op by op, what a step costs beside pure half.

Each model runs in a process of its own, by autoamp and with all of it in the compute
dtype (convolutional nets with weights and images channels last), in turns.  Some steps
are timed without a profiler; others are taken under torch's profiler, and the time of
each op, without that of the ops inside of it, is put in the group that its name tells.
The rest of a step is Python.  So the groups add up to the whole of a step, and what the
profiler itself costs is told by the two times of a step.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from . import processes, report, turns
from .models import CONVOLVE, MICRO, MICRO_BATCHES
from .processes import Row, new_row
from .setting import Setting
from .step_times import WARM_UP
from .timing import interleaved, ratios
from .traffic import TrafficMode
from .training import SMALL_BATCHES, case_in, names
from .ways import CHANNELS_LAST, Step, low_way, prepared, step_of

ROUNDS, PROFILED = 9, 5
"""Rounds of timed steps, and steps of each way under the profiler."""

STEP = "benchmarks: one step"
PYTHON = "Python and autograd"
OTHER = "other ops"
OPTIMIZER = "optimizer"

_ATEN = {
    "attention": "_scaled_dot_product scaled_dot_product",
    "products": "mm addmm bmm baddbmm linear matmul",
    "convolutions": "mkldnn_conv conv _conv",
    "norms": "native_layer_norm native_batch_norm batch_norm layer_norm _batch_norm"
    " rms_norm linalg_vecdot rsqrt var",
    "softmax and loss": "_softmax softmax _log_softmax log_softmax nll_loss",
    "activations": "gelu silu tanh threshold relu clamp_min sigmoid",
    "casts and copies": "copy_ clone contiguous to _to_copy cat fill_ zero_",
    "sums": "sum mean",
    "other arithmetic": "add mul sub div pow neg where masked_fill exp",
    "embeddings": "embedding index",
}
"""Group to the starts of the names of its ops, without "aten::"."""

GROUPS: Mapping[str, tuple[str, ...]] = {
    OPTIMIZER: ("Optimizer.", "aten::_foreach_add", "aten::_foreach_mul"),
    "copies of weights": ("aten::_foreach_copy_",),
    **{
        group: tuple(f"aten::{name}" for name in names.split())
        for group, names in _ATEN.items()
    },
}
"""Group to the starts of the names of its events; the first that fits is taken."""

WHOLE = ("autoamp::", "Optimizer.", "aten::_foreach_copy_")
"""Starts of the names of events that the ops inside of them count for."""


class Spent(NamedTuple):
    """What the ops of one name take in one step."""

    calls: float
    seconds: float


def group_of(name: str) -> str:
    """The group of an event of the profiler, by its name."""
    if name.startswith("autoamp::attention"):
        return "attention"
    for group, starts in GROUPS.items():
        if name.startswith(starts):
            return group
    return OTHER if "::" in name and "autograd::" not in name else PYTHON


def spent(steps: Mapping[str, Step]) -> dict[str, dict[str, Spent]]:
    """For each way and each name of an event what a step takes.

    Events inside of an event count for themselves.  The ways take turns.
    """
    calls = {way: Counter[str]() for way in steps}
    seconds = {way: Counter[str]() for way in steps}
    for _ in range(PROFILED):
        for way, step in steps.items():
            taken = profile(activities=[ProfilerActivity.CPU], acc_events=True)
            with taken, record_function(STEP):
                step()
            for event in taken.events():
                name = _counted_as(event)
                calls[way][name] += name == event.name
                seconds[way][name] += event.self_cpu_time_total / 1e6
    return {
        way: {
            name: Spent(calls[way][name] / PROFILED, each / PROFILED)
            for name, each in seconds[way].items()
        }
        for way in steps
    }


def _counted_as(event: Any) -> str:
    name, outer = event.name, event.cpu_parent
    while outer is not None:
        if outer.name.startswith(WHOLE):
            name = outer.name
        outer = outer.cpu_parent
    return str(name)


def moved_bytes(step: Step) -> Counter[str]:
    """The bytes that a step reads and writes, by the name of the op."""
    with TrafficMode() as mode:
        step()
    found = Counter[str]()
    for line, count in mode.traffic.by_line().items():
        found[f"aten::{line.op}"] += count
    return found


def ways(name: str, setting: Setting) -> tuple[str, str]:
    """The two ways that are set side by side."""
    last = CHANNELS_LAST if name in CONVOLVE else ""
    return f"autoamp{last}", f"{low_way(setting)}{last}"


def measured(name: str, setting: Setting) -> Row:
    """The times of a step by both ways, and of the ops in it."""
    row, case = new_row(name), case_in(setting, name)
    batches = MICRO_BATCHES if name == MICRO.name else 1
    steps: dict[str, Callable[[], None]] = {}
    for way in ways(name, setting):
        torch.manual_seed(0)
        steps[way] = step_of(case, prepared(case, way, setting), batches)
        for _ in range(WARM_UP):
            steps[way]()
    turns.wait()
    taken = interleaved(steps, ROUNDS)
    ops = spent(steps)
    for way, step in steps.items():
        row["ways"][way] = {
            "seconds": taken[way],
            "ops": {name: [*each] for name, each in ops[way].items()},
            "bytes": moved_bytes(step),
        }
    return row


def _seconds(ops: Mapping[str, Sequence[float]]) -> Counter[str]:
    found = Counter[str]()
    for name, (_, seconds) in ops.items():
        found[group_of(name)] += seconds
    return found


def _calls(ops: Mapping[str, Sequence[float]]) -> Counter[str]:
    found = Counter[str]()
    for name, (calls, _) in ops.items():
        found[group_of(name)] += round(calls)
    return found


def _moved(counted: Mapping[str, int]) -> Counter[str]:
    found = Counter[str]()
    for name, count in counted.items():
        found[group_of(name)] += count
    return found


def _both(row: Row) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    ours, half = row["ways"].values()
    return ours, half


def brief(row: Row) -> str:
    """The ratio of the two times of a step, and the groups that differ most."""
    if len(row["ways"]) < 2:
        return "failed"
    ours, half = _both(row)
    share = ratios({"a": ours["seconds"], "b": half["seconds"]}, "b")["a"]
    more = _seconds(ours["ops"])
    more.subtract(_seconds(half["ops"]))
    most = sorted(more.items(), key=lambda each: -abs(each[1]))[:3]
    said = ", ".join(f"{group} {1e3 * taken:+.1f} ms" for group, taken in most)
    return f"{share:.2f} of {low_way(Setting())}: {said}"


HEADER = ("group", "ms", "in half, ms", "difference", "MB", "in half, MB")
HEADER += ("calls", "in half, calls")


def table(row: Row) -> str:
    """The groups of one model, those that differ most first."""
    ours, half = _both(row)
    times, other_times = _seconds(ours["ops"]), _seconds(half["ops"])
    calls, other_calls = _calls(ours["ops"]), _calls(half["ops"])
    moved, other_moved = _moved(ours["bytes"]), _moved(half["bytes"])
    groups = {*times, *other_times}

    def more(group: str) -> float:
        return times[group] - other_times[group]

    lines = [
        (
            group,
            f"{1e3 * times[group]:.1f}",
            f"{1e3 * other_times[group]:.1f}",
            f"{1e3 * more(group):+.1f}",
            f"{moved[group] / 1e6:.0f}",
            f"{other_moved[group] / 1e6:.0f}",
            f"{calls[group]}",
            f"{other_calls[group]}",
        )
        for group in sorted(groups, key=lambda each: (-abs(more(each)), each))
    ]
    return report.markdown(HEADER, lines)


def heading(row: Row) -> str:
    """The name of a model, and the two times of a step in each way."""
    ours, half = _both(row)
    share = ratios({"a": ours["seconds"], "b": half["seconds"]}, "b")["a"]
    plain, other = (1e3 * statistics.median(w["seconds"]) for w in (ours, half))
    groups, other_groups = (_seconds(w["ops"]) for w in (ours, half))
    seen, other_seen = 1e3 * groups.total(), 1e3 * other_groups.total()
    more = {g: abs(groups[g] - other_groups[g]) for g in {*groups, *other_groups}}
    named = 1 - more.get(OTHER, 0.0) / sum(more.values())
    return f"""\
## {row["name"]}: {share:.2f}

A step takes {plain:.0f} ms, and {other:.0f} ms in half: {plain - other:+.1f} ms. Under
the profiler: {seen:.0f} and {other_seen:.0f} ms, {seen - other_seen:+.1f} ms. Groups
with a name have {named:.0%} of the differences."""


def text(rows: Sequence[Row], setting: Setting, machine: str) -> str:
    """The page."""
    note = f"""\
A training step (forward, backward, SGD) by autoamp beside the same step with all of the
model in {setting.low}, where the time of each goes. The figure in a heading is the
median over {ROUNDS} interleaved rounds of autoamp's time divided by that of the other,
without a profiler. The groups are of {PROFILED} steps under torch's profiler: the time
of an op without that of the ops inside of it, so that they add up to the step. Calls
are those that the profiler sees, views and outer ops among them; bytes are counted at
the dispatcher, those inside of `autoamp::` ops too, and stand with the op that moves
them. {SMALL_BATCHES}"""
    whole = [row for row in rows if not row["failures"]]
    parts = [part for row in whole for part in (heading(row), table(row))]
    return processes.page(rows, machine, note, *parts)


TABLE = processes.ModelTable("beside_half", names, measured, text, brief)

if __name__ == "__main__":
    raise SystemExit(TABLE.main())
