"""`python -m benchmarks`: every workload, every peer, one table."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from autoamp.counted.ops import count_ops
from autoamp.counted.saved import saved_bytes

from . import report
from .capability import capability
from .peers import BASELINE, Peer, Prepared, peers, ready
from .timing import interleaved, ratios, seconds
from .workloads import Workload, workloads

HEADER = (
    "workload",
    "kind",
    "peer",
    "time / fp32",
    "casts",
    "weights refreshed",
    "saved MB",
    "first call s",
)


def _measured(
    workload: Workload, prepared: Prepared, first: float, device: str
) -> dict[str, Any]:
    """Casts of one timed step and bytes saved by one forward, after the first call."""
    parameters = list(prepared.model.parameters())
    found: dict[str, Any] = {"first_call_seconds": first, "casts": None}
    if not prepared.peer.fused:
        counts = count_ops(prepared.step, parameters)
        found |= {
            "casts": counts.casts.total(),
            "weights_refreshed": counts.refreshed,
            "low_share": counts.low_share,
        }
    if workload.kind != "inference":

        def forward() -> Any:
            output = prepared.forward()
            return prepared.loss(output), output

        saved = saved_bytes(forward, parameters)
        found["saved_bytes"] = saved.total
        found["saved_weight_copies"] = saved.weight_copies
    found["device"] = device
    return found


def run(
    workload: Workload, chosen: Sequence[Peer], rounds: int, device: str
) -> dict[str, dict[str, Any]]:
    """Figures of each peer on one workload; a peer that fails has only "failed"."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    original = workload.build().to(device)
    found: dict[str, dict[str, Any]] = {}
    alive: dict[str, Prepared] = {}
    for peer in chosen:
        try:
            prepared = ready(workload, original, peer, device)
            first = seconds(prepared.step, device)
            prepared.step()  # some back ends compile again for the second call
            found[peer.name] = _measured(workload, prepared, first, device)
        except Exception as error:  # noqa: BLE001 - told in the table, beside the others
            found[peer.name] = {"failed": f"{type(error).__name__}: {error}"}
        else:
            alive[peer.name] = prepared
    taken = interleaved({n: p.step for n, p in alive.items()}, rounds, device)
    for name, ratio in ratios(taken, BASELINE).items():
        found[name] |= {"time_ratio": ratio, "seconds": taken[name]}
    return found


def rows(workload: Workload, found: dict[str, dict[str, Any]]) -> list[list[str]]:
    """The lines of the table for one workload."""
    lines = []
    for name, got in found.items():
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
        lines.append([workload.name, workload.kind, name, *cells])
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is asked, prints the table, writes it; 1 if autoamp failed anywhere."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    parser.add_argument("--rounds", type=int, help="timed rounds (7 quick, else 15)")
    parser.add_argument("--only", default="", help="workloads whose name holds this")
    parser.add_argument("--peers", default="", help="comma-separated (all)")
    options = parser.parse_args(arguments)
    names = [n.strip() for n in options.peers.split(",") if n.strip()]
    known = {peer.name: peer for peer in peers()}
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"unknown peers {unknown}; there are {list(known)}")
    chosen = [p for p in known.values() if not names or p.name in [BASELINE, *names]]
    rounds = options.rounds or (7 if options.quick else 15)
    wanted = [w for w in workloads(options.quick) if options.only in w.name]
    if not wanted:
        parser.error(f"no workload holds {options.only!r} in its name")
    lines: list[list[str]] = []
    results: list[dict[str, Any]] = []
    with Progress(transient=True) as progress:
        task = progress.add_task("", total=len(wanted))
        for workload in wanted:
            title = f"{workload.name} ({workload.kind})"
            progress.update(task, description=title)
            found = run(workload, chosen, rounds, options.device)
            lines += rows(workload, found)
            results.append({"workload": title, "peers": found})
            progress.advance(task)
            gc.collect()
    line = capability(options.device)
    note = f"{line}; median of {rounds} interleaved rounds"
    note += ", small sizes" if options.quick else ""
    failed = [
        f"{r['workload']}, {name}: {got['failed'].splitlines()[0]}"
        for r in results
        for name, got in r["peers"].items()
        if "failed" in got
    ]
    text = "\n".join([note, "", report.markdown(HEADER, lines), "", *failed]) + "\n"
    stem = f"{options.device}-quick" if options.quick else options.device
    data = {"capability": line, "rounds": rounds, "results": results}
    report.write(options.out / stem, text, data)
    print(text)
    ours = [got for r in results for n, got in r["peers"].items() if "autoamp" in n]
    return 1 if any("failed" in got for got in ours) else 0


if __name__ == "__main__":
    raise SystemExit(main())
