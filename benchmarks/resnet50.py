"""`python -m benchmarks.resnet50`: ResNet-50's images per second at two batch sizes.

The experiment that made TensorFlow's automatic mixed precision known: on a V100, fp32
at batch 128 against mixed precision at 128, with the compiler at 128, and with the
compiler at 256.  Each batch size runs in a process of its own; a finished one is
skipped unless `--again`.  V100s have no TF32, in which torch computes fp32
convolutions on later GPUs by default: a line says how fast fp32 is without it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from tests.models.case import Case, labelled

from . import full_models, report, step_times
from .bytes_step import prepared
from .compiled import compiled
from .gpu_cases import batches, images
from .ratios import Row
from .setting import Setting
from .step_times import CPU_BF16, Prepared, Step, rounds, scaler_of, step_of

STEM = "resnet50"
NO_TF32, CHANNELS_LAST = "fp32, no TF32", "autocast, channels last"
EAGER, COMPILED = "autoamp", "autoamp, inductor"
EAGER_WAYS = ("fp32", NO_TF32, "autocast", CHANNELS_LAST, EAGER)
COMPILED_WAYS = ("autocast, inductor", COMPILED)
WAYS = (*EAGER_WAYS, *COMPILED_WAYS)
BATCHES, QUICK_BATCHES = (128, 256), (2, 4)

ASKED = ((EAGER, 0, 2.14), (COMPILED, 0, 2.77), (COMPILED, 1, 3.3))
"""A way, the number of its batch size, and how many times as fast as fp32 it is to be.

These are the figures published for a V100 (16 GB): 365, 780, 1010 and 1205 images/s.
"""


def names(setting: Setting) -> list[str]:
    """The batch sizes."""
    return [f"batch {n}" for n in (QUICK_BATCHES if setting.quick else BATCHES)]


def case_of_batch(name: str, setting: Setting) -> Case:
    """ResNet-50 with so many images."""
    inputs = images(int(name.split()[1]), 64 if setting.quick else 224)
    build = partial(full_models.resnet50, setting.quick)
    return Case(STEM, build, inputs, labelled)


def measured(name: str, setting: Setting) -> Row:
    """The seconds of a training step of each way in each round."""
    case = case_of_batch(name, setting)

    def make(way: str) -> Step:
        if way in COMPILED_WAYS:
            ready = compiled(case, way.partition(",")[0], setting)
        else:
            ready = prepared(case, way.partition(",")[0], setting)
        if way == CHANNELS_LAST:
            ready = with_channels_last(ready)
        step = step_of(case, ready, scaler=scaler_of(way, setting))
        return without_tf32(step) if way == NO_TF32 else step

    makers = {way: partial(make, way) for way in WAYS}
    return step_times.measured(name, makers, setting)


def with_channels_last(ready: Prepared) -> Prepared:
    """The model and its images with the channels last."""
    model, context, (args, kwargs) = ready
    pixels = kwargs["pixel_values"].to(memory_format=torch.channels_last)
    moved = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return moved, context, (args, {**kwargs, "pixel_values": pixels})


def without_tf32(step: Step) -> Step:
    """The step with fp32 convolutions and products computed in fp32."""

    def exact() -> None:
        with no_tf32():
            step()

    return exact


@contextmanager
def no_tf32() -> Iterator[None]:
    """Switches TF32 off in the region."""
    switches = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [each.allow_tf32 for each in switches]
    try:
        for each in switches:
            each.allow_tf32 = False
        yield
    finally:
        for each, was in zip(switches, before, strict=True):
            each.allow_tf32 = was


def images_a_second(row: Row) -> dict[str, float]:
    """Images per second of each way, by its median time."""
    batch = int(row["name"].split()[1])
    return {
        way: batch / statistics.median(found["seconds"])
        for way, found in row["ways"].items()
    }


def table(rows: Sequence[Row]) -> str:
    """Images per second of each way, and how many times fp32's at the first batch."""
    found = {row["name"]: images_a_second(row) for row in rows}
    names = sorted(found, key=lambda name: int(name.split()[1]))
    base = found[names[0]].get("fp32") if names else None

    def cells(name: str, way: str) -> list[str]:
        if way not in found[name]:
            return ["failed", ""]
        rate = found[name][way]
        return [f"{rate:.0f}", f"{rate / base:.2f}" if base else "-"]

    head = [cell for name in names for cell in (f"{name}, images/s", "times fp32")]
    lines = [[way, *(c for name in names for c in cells(name, way))] for way in WAYS]
    return report.markdown(["way", *head], lines)


def verdicts(rows: Sequence[Row], setting: Setting) -> list[str]:
    """A line for each figure asked: what it is here, beside fp32 at the first batch."""
    found = {row["name"]: images_a_second(row) for row in rows}
    sizes = names(setting)
    base = found.get(sizes[0], {}).get("fp32")
    lines = []
    for way, number, asked in ASKED:
        rate = found.get(sizes[number], {}).get(way)
        if base is None or rate is None:
            said = "not measured"
        else:
            got = rate / base
            said = f"{got:.2f}, {'reached' if got >= asked else 'not reached'}"
        lines.append(f"- {way}, {sizes[number]}: asked {asked} times fp32; {said}")
    return lines


def write(rows: Sequence[Row], folder: Path, setting: Setting = CPU_BF16) -> str:
    """Writes the tables, their rows and a plot to `folder`; returns the text."""
    small = f" {batches(quick=True)}" if setting.quick else ""
    note = f"""\
A training step of ResNet-50 in {setting.precision} (forward, backward, SGD; autocast in
fp16 with torch's GradScaler), medians of {rounds(setting)} interleaved rounds.\
{small}"""
    stem = folder / setting.stem(STEM)
    title = "Time of a training step of ResNet-50, torch.autocast = 1"
    tables = [table(rows), "\n".join(verdicts(rows, setting))]
    return step_times.write(stem, rows, note, tables, title=title, setting=setting)


def main(arguments: Sequence[str] | None = None) -> int:
    """Times what is asked and not yet there; 1 if a way to run it failed."""
    return step_times.run(
        "benchmarks.resnet50", arguments, names=names, measured=measured, write=write
    )


if __name__ == "__main__":
    raise SystemExit(main())
