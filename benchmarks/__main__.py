"""`python -m benchmarks`: every workload, every way to run it, one table."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from typing import Any

import torch
from rich.progress import track

from autoamp.passes.check.saved import saved_bytes
from autoamp.tools.count import count_ops

from .models import Workload, workloads
from .report import Data, Table, markdown, option, page, said
from .setting import Setting
from .step_times import ways_of
from .timing import interleaved, ratios, seconds
from .ways import CHANNELS_LAST, INDUCTOR, Prepared, Step, prepared, step_of

BASELINE = "fp32"
PEERS = {
    BASELINE: "fp32",
    "autocast": "autocast",
    "autocast, channels last": f"autocast{CHANNELS_LAST}",
    "compile": f"fp32{INDUCTOR}",
    "compile + autocast": f"autocast{INDUCTOR}",
    "model.bfloat16()": "bfloat16",
    "autoamp": "autoamp",
    "autoamp inductor": f"autoamp{INDUCTOR}",
}
"""The name of each peer in the table, and its way."""

HEADER = (
    *("workload", "kind", "peer", "time / fp32", "casts", "weights refreshed"),
    *("saved MB", "first call s"),
)


def ready(workload: Workload, way: str, setting: Setting) -> tuple[Prepared, Step]:
    """The workload run one way, and the step that is timed.

    An inference step is one forward without gradients.
    """
    torch.manual_seed(0)
    made = prepared(workload.case, way, setting)
    if workload.kind != "inference":
        return made, step_of(workload.case, made, workload.steps)
    made.model.eval()

    def infer() -> None:
        with torch.no_grad():
            made.forward()

    return made, infer


def _measured(
    workload: Workload, made: Prepared, step: Step, first: float, fused: bool
) -> Data:
    """Casts of one timed step and bytes saved by one forward, after the first call."""
    parameters = list(made.model.parameters())
    found: Data = {"first_call_seconds": first, "casts": None}
    if not fused:  # casts vanish into generated kernels, where none can be counted
        counts = count_ops(step, parameters)
        found |= {
            "casts": counts.casts.total(),
            "weights_refreshed": counts.refreshed,
            "low_share": counts.low_share,
        }
    if workload.kind != "inference":

        def forward() -> Any:
            output = made.forward()
            return workload.case.loss(output), output

        saved = saved_bytes(forward, parameters)
        found["saved_bytes"] = saved.total
        found["saved_weight_copies"] = saved.weight_copies
    return found


def run(workload: Workload, peers: Sequence[str], rounds: int, device: str) -> Data:
    """Figures of each peer on one workload; a peer that fails has only "failed"."""
    torch._dynamo.reset()
    found: Data = {}
    alive: dict[str, Step] = {}
    model = workload.case.name.removesuffix("_b")
    for peer in peers:
        if not ways_of(model, [PEERS[peer]]):
            continue
        try:
            way = PEERS[peer]
            made, step = ready(workload, way, Setting(device))
            first = seconds(step, device)
            step()  # some back ends compile again for the second call
            found[peer] = _measured(workload, made, step, first, way.endswith(INDUCTOR))
        except Exception as error:  # noqa: BLE001 - told in the table, beside the others
            found[peer] = {"failed": said(error)}
        else:
            alive[peer] = step
    taken = interleaved(alive, rounds, device)
    for name, ratio in ratios(taken, BASELINE).items():
        found[name] |= {"time_ratio": ratio, "seconds": taken[name]}
    return found


def rows(title: str, found: Data) -> list[list[str]]:
    """The lines of the table for one workload."""
    name, _, kind = title.rpartition(" (")
    lines = []
    for peer, got in found.items():
        if "failed" in got:
            cells = ["failed", "", "", "", ""]
        else:
            casts = got["casts"]
            saved = got.get("saved_bytes")
            cells = [
                f"{got['time_ratio']:.2f}",
                "fused" if casts is None else str(casts),
                "" if casts is None else str(got["weights_refreshed"]),
                "" if saved is None else f"{saved / 1e6:.2f}",
                f"{got['first_call_seconds']:.2f}",
            ]
        lines.append([name, kind.removesuffix(")"), peer, *cells])
    return lines


def measure(given: argparse.Namespace) -> Data:
    """The figures of the workloads and peers that are asked for."""
    names = [n.strip() for n in given.peers.split(";") if n.strip()]
    if unknown := sorted(set(names) - set(PEERS)):
        raise SystemExit(f"unknown peers {unknown}; there are {[*PEERS]}")
    peers = [p for p in PEERS if not names or p in (BASELINE, *names)]
    wanted = [w for w in workloads(given.quick) if given.only in w.name]
    if not wanted:
        raise SystemExit(f"no workload holds {given.only!r} in its name")
    rounds = given.rounds or (7 if given.quick else 15)
    results = []
    for workload in track(wanted, "workloads", transient=True):
        found = run(workload, peers, rounds, given.device)
        title = f"{workload.name} ({workload.kind})"
        results.append({"workload": title, "peers": found})
        gc.collect()
    note = f"median of {rounds} interleaved rounds"
    note += ", small sizes" if given.quick else ""
    return {"note": note, "rounds": rounds, "results": results}


def text(data: Data) -> str:
    """The page: the table, and why peers failed."""
    lines = [
        r for each in data["results"] for r in rows(each["workload"], each["peers"])
    ]
    failed = [
        f"{each['workload']}, {name}: {got['failed']}"
        for each in data["results"]
        for name, got in each["peers"].items()
        if "failed" in got
    ]
    return page(data, markdown(HEADER, lines), *["\n".join(failed)] * bool(failed))


def good(data: Data) -> bool:
    """Whether autoamp failed nowhere."""
    every = [item for each in data["results"] for item in each["peers"].items()]
    return not any("failed" in got for name, got in every if "autoamp" in name)


TABLE = Table(
    "__main__",
    measure,
    text,
    options=(
        option("--quick", False, "small sizes, few rounds", action="store_true"),
        option("--device", "cpu", choices=("cpu", "cuda")),
        option("--rounds", None, "timed rounds (7 quick, else 15)", type=int),
        option("--only", "", "workloads whose name holds this"),
        option("--peers", "", "separated by semicolons (all)"),
    ),
    stem=lambda given: given.device + "-quick" * given.quick,
    good=good,
)

if __name__ == "__main__":
    raise SystemExit(TABLE.main())
