"""`python -m benchmarks.meshes`: steps of Llama on many devices, and what a plan takes.

Each plan is made in a process of its own, whose time and peak memory are measured: the
prediction has to stay cheap for models that no single device holds.  Nothing that is
predicted is measured here.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import asdict

import autoamp
from autoamp.messages import bytes_text, seconds_text

from . import report
from .processes import ModelTable, Row, commits, failures, new_row
from .setting import Setting, capability

DEVICE = "cuda:sm_90"
LIMIT_S = 1800

LLAMA = {
    "7B": "hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, "
    "num_attention_heads=32",
    "70B": "hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, "
    "num_attention_heads=64, num_key_value_heads=8",
}
CASES = {
    f"{size}, tp={tp}, pp={pp}": (size, f"tp={tp},pp={pp}")
    for size, tp, pp in (
        ("7B", 1, 1), ("7B", 8, 1), ("70B", 1, 1), ("70B", 8, 1), ("70B", 8, 4),
    )
}  # fmt: skip

HEADER = (
    "model", "devices", "way", "step", "not computing", "peak memory", "fits",
    "sent by a device",
)  # fmt: skip
COST = ("model", "seconds", "processor seconds", "peak memory of the process")

NOTE = f"""\
A training step of Llama, 1 sample of 1,024 tokens for each micro-batch, AdamW, bf16, as
`autoamp plan --mesh` predicts it for {DEVICE}, with 8 devices a node and 400 Gb/s for
each. These are predictions: no GPU ran. "Not computing" is the part of a step in which
the device waits, or steps its weights. The second table has what each plan took,
in a process of its own: one plan gives all its numbers of devices."""


def measured(name: str, _: Setting) -> Row:
    """The plan of one case, and what this process took to make it."""
    size, mesh = CASES[name]
    begin = time.perf_counter()
    found = autoamp.plan(
        f"transformers:LlamaConfig({LLAMA[size]})",
        mesh=mesh,
        device=DEVICE,
        precision="bf16",
    )
    seconds = time.perf_counter() - begin
    used = resource.getrusage(resource.RUSAGE_SELF)
    return new_row(
        name,
        machine=capability("cpu"),
        memory=found.memory,
        notes=found.notes,
        seconds=seconds,
        processor_seconds=used.ru_utime + used.ru_stime,
        peak_bytes=used.ru_maxrss * 1024,  # Linux counts in KiB
        scales=[asdict(scale) for scale in found.scales],
    )


def brief(row: Row) -> str:
    """A row in one line."""
    if row["failures"]:
        return "; ".join(row["failures"].values())
    return f"{row['seconds']:.0f} s, {bytes_text(row['peak_bytes'])}"


def _lines(row: Row) -> list[list[str]]:
    lines = []
    for scale in row["scales"]:
        for way in scale["ways"]:
            peak = max(stage["peak"] for stage in way["stages"])
            sent = sum(each["wire"] for each in way["transfers"])
            lines.append(
                [
                    f"{row['name'].partition(',')[0]}, {scale['mesh']}",
                    f"{scale['devices']:,}",
                    way["name"],
                    seconds_text(way["seconds"]),
                    f"{1 - way['compute'] / way['seconds']:.0%}",
                    bytes_text(peak),
                    "yes" if peak <= row["memory"] else "no",
                    bytes_text(sent),
                ]
            )
    return lines


def text(rows: Sequence[Row], _: Setting, __: str) -> str:
    """The page; each row says where it was planned."""
    done = [row for row in rows if not row["failures"]]
    cost = [
        [
            row["name"],
            f"{row['seconds']:.0f}",
            f"{row['processor_seconds']:.0f}",
            bytes_text(row["peak_bytes"]),
        ]
        for row in done
    ]
    machine = "; ".join(sorted({row["machine"] for row in done}))
    parts = [
        NOTE,
        f"{machine}; commit {commits(rows)}.",
        report.markdown(HEADER, [line for row in done for line in _lines(row)]),
        report.markdown(COST, cost),
        "\n".join(failures(rows)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


TABLE = ModelTable(
    "meshes",
    lambda _: [*CASES],
    measured,
    text,
    brief,
    limit=LIMIT_S,
    anywhere=False,
)

if __name__ == "__main__":
    raise SystemExit(TABLE.main())
