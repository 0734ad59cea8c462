"""Small saved reports, and their documents, for the tests of diffs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from autoamp.passes.report_rows import CastRow, OpRow, SavedGraph, SavedReport

LINE = "net.py:{}: y = {}(x)"


def named(ops: Iterable[tuple[str, str, str]], graph: int = 0) -> tuple[OpRow, ...]:
    """Ops from (op, module, precision), with the names FX gives: add, add_1, add_2.

    Source lines are numbered from 1, so that an op inserted early moves all of them.
    """
    counts: dict[str, int] = {}
    found = []
    for line, (op, module, precision) in enumerate(ops, 1):
        number = counts[op] = counts.get(op, -1) + 1
        found.append(
            OpRow(
                graph=graph,
                body="",
                name=f"{op}_{number}" if number else op,
                op=f"aten::{op}.default",
                precision=precision,
                reason=f"a reason for {precision}",
                module=module,
                source=LINE.format(line, op),
            )
        )
    return tuple(found)


def layers(count: int, precision: str = "bf16") -> list[tuple[str, str, str]]:
    """(op, module, precision) of `count` layers of a linear, an add and a relu."""
    ops = ("linear", "add", "relu")
    return [(op, f"h.{n}", precision) for n in range(count) for op in ops]


def saved(
    *graphs: Sequence[tuple[str, str, str]],
    casts: tuple[CastRow, ...] = (),
    model: str = "Net",
    path: str = "a.json",
) -> SavedReport:
    """A report of graphs; the casts are those of the first graph."""
    return SavedReport(
        path,
        model,
        "bf16",
        tuple(
            SavedGraph(n, "", "CPU", named(ops, n), casts if n == 0 else ())
            for n, ops in enumerate(graphs)
        ),
    )


def cast(value: str, kind: str = "down", size: int = 64) -> CastRow:
    return CastRow(0, "", f"{value}_cast", value, kind, "bf16", size)


def document(report: SavedReport) -> dict[str, Any]:
    """The JSON document that `load` makes `report` of."""
    graphs = [
        {"graph": g.graph, "body": g.body, "device": g.device} for g in report.graphs
    ]
    return {
        "schema": "autoamp.report",
        "version": 1,
        "model": report.model,
        "compute_dtype": report.compute_dtype,
        "graphs": graphs,
        "ops": [vars(op) for g in report.graphs for op in g.ops],
        "casts": [vars(each) for g in report.graphs for each in g.casts],
    }


def text(report: SavedReport) -> str:
    return json.dumps(document(report))
