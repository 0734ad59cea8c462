"""`python -m benchmarks.pass_time`: what the pass itself costs.

Milliseconds per graph node of the whole pass, normalise to verify, on captured models;
and the seconds `place` takes on a synthetic graph of 8 000 operators.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from . import report
from .capability import capability
from .workloads import Workload, workloads

MS_PER_NODE = 1.0
"""The whole pass must take less than this, per node of the normalised graph."""

PLACEMENT_SECONDS = 1.0
"""Placement of `SYNTHETIC_OPS` operators must take less than this."""

SYNTHETIC_OPS = 8000


@dataclass(frozen=True)
class PassTime:
    """One graph through the pass: its nodes, and the seconds of each stage."""

    name: str
    nodes: int
    total: float
    stages: dict[str, float]

    @property
    def ms_per_node(self) -> float:
        """Milliseconds of the whole pass per node of the normalised graph."""
        return 1e3 * self.total / self.nodes


def time_pass(name: str, gm: fx.GraphModule, inputs: Sequence[Any]) -> PassTime:
    """Sends a graph through the pass once."""
    from autoamp.options import Options
    from autoamp.pipeline.run import rewrite_graph

    options = Options(precision="bf16", do_no_harm=False)
    start = time.perf_counter()
    done = rewrite_graph(gm, inputs, options, torch.bfloat16)
    total = time.perf_counter() - start
    return PassTime(name, len(done.before.graph.nodes), total, dict(done.seconds))


def time_captured(workload: Workload, repeats: int) -> list[PassTime]:
    """The median pass, over `repeats`, of each graph Dynamo captures of a workload."""
    found: list[PassTime] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        name = f"{workload.name} #{len(found)}"
        tries = [time_pass(name, gm, inputs) for _ in range(repeats)]
        found.append(sorted(tries, key=lambda t: t.total)[len(tries) // 2])
        return gm.forward

    torch._dynamo.reset()
    model = workload.build()
    args, kwargs = workload.batch()

    def call() -> Any:
        return type(model).forward(model, *args, **kwargs)

    torch.compile(call, backend=backend)()
    return found


class Chain(nn.Module):
    """Residual blocks of eight operators, two of them matmuls."""

    def __init__(self, ops: int, width: int = 8) -> None:
        super().__init__()
        self.blocks = ops // 8
        self.weight = nn.Parameter(torch.randn(width, width) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.blocks):
            y = functional.layer_norm(x, x.shape[-1:])
            y = functional.linear(y, self.weight)
            y = functional.gelu(y)
            y = y * torch.sigmoid(x)
            y = functional.linear(y, self.weight)
            y = y / (1 + 0.1)
            x = x + y
        return x


def time_synthetic(ops: int = SYNTHETIC_OPS) -> PassTime:
    """The pass on a synthetic graph of at least `ops` nodes."""
    x = torch.randn(4, 8)
    gm = torch.fx.symbolic_trace(Chain(ops), concrete_args={})
    return time_pass(f"synthetic, {ops} ops", gm, [x])


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table and writes it; 1 if a limit is passed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pass_time")
    parser.add_argument("--quick", action="store_true", help="small models")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    options = parser.parse_args(arguments)
    times = [
        found
        for workload in workloads(options.quick)
        if workload.kind == "training"
        for found in time_captured(workload, options.repeats)
    ]
    synthetic = time_synthetic()
    stages = list(synthetic.stages)
    header = ("graph", "nodes", "ms per node", *(f"{s} ms" for s in stages))
    rows = [
        (
            t.name,
            str(t.nodes),
            f"{t.ms_per_node:.2f}",
            *(f"{1e3 * t.stages.get(s, 0.0):.1f}" for s in stages),
        )
        for t in (*times, synthetic)
    ]
    place = synthetic.stages["place"]
    worst = max(t.ms_per_node for t in (*times, synthetic))
    median = statistics.median(t.ms_per_node for t in times)
    verdict = (
        f"median {median:.2f}, worst {worst:.2f} ms per node (limit {MS_PER_NODE}); "
        f"placing {synthetic.nodes} nodes {place:.2f} s (limit {PLACEMENT_SECONDS})"
    )
    table = report.markdown(header, rows)
    text = "\n".join([capability("cpu"), "", table, "", verdict]) + "\n"
    data = {
        "capability": capability("cpu"),
        "graphs": [vars(t) | {"ms_per_node": t.ms_per_node} for t in times],
        "synthetic": vars(synthetic),
    }
    report.write(options.out / "pass_time", text, data)
    print(text)
    return 1 if worst > MS_PER_NODE or place > PLACEMENT_SECONDS else 0


if __name__ == "__main__":
    raise SystemExit(main())
