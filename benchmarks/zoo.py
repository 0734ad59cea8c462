"""A zoo of models beside autocast: `python -m benchmarks.zoo [names]`.

The models are those of tests/zoo, small and with random weights: `make zoo` fetches
timm and torchvision.  tests/conformance/test_zoo.py holds each row to what is promised.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.progress import track

from tests.zoo import BY_NAME

from . import report
from .report import Data, said
from .setting import capability
from .zoo_measure import Pair, Row, measure

_MASK = (
    "captured, transformers makes the causal mask that it leaves out otherwise, and "
    "attention saves it"
)
_FUNCTION = (
    "its activation is a custom autograd.Function, which gets the fp32 values it was "
    "captured with; autocast hands it bf16"
)
_EXACT_NORMS = (
    "some of its layer_norms are over 256 rows or more, where a rule keeps them fp32 "
    "on a CPU, whose kernel sums the weight's gradient in the low dtype"
)
_SCAN = (
    "captured, transformers runs an associative scan, whose states are all saved, "
    "where under autocast it runs a loop over the sequence"
)
_BREAK = (
    "a value crosses a graph break, where it is fp32 as in the model; autocast's stays "
    "bf16"
)
KNOWN: dict[tuple[str, str], str] = {
    ("detr", "saved bytes"): _BREAK,
    ("wav2vec2", "saved bytes"): _BREAK,
    ("wavlm", "saved bytes"): _BREAK,
    ("gpt2", "saved bytes"): _MASK,
    ("gpt_neox", "saved bytes"): _MASK,
    ("mamba", "saved bytes"): _SCAN,
    ("bloom", "saved bytes"): _FUNCTION,
    **{
        (name, "saved bytes"): _EXACT_NORMS
        for name in (
            *("timm_coat", "timm_convnext", "timm_edgenext", "timm_poolformer"),
            *("timm_pvt", "timm_swin", "tv_convnext", "tv_maxvit", "tv_swin"),
            *("tv_swin3d", "tv_swin_v2"),
        )
    },
}
"""Shortfalls we know of and keep, with the reason: (model, how the message begins)."""


def unknown_shortfalls(row: Row) -> list[str]:
    """The shortfalls of a row without those of `KNOWN`."""
    known = tuple(f"{name}: {what}" for name, what in KNOWN)
    return [s for s in row.shortfalls if not s.startswith(known)]


def measure_named(name: str) -> Row:
    """The row of one model; to be called in another process too."""
    torch._dynamo.reset()
    return measure(BY_NAME[name])


HEADER = (
    *("model", "graphs (unchanged)", "casts", "autocast's", "casts, inference"),
    *("autocast's", "flops low", "bf16 output error", "autocast's"),
    *("bf16 gradient error", "autocast's", "fp16 gradient error", "autocast's"),
    *("worst error / limit", "saved bytes", "autocast's"),
)


def table(rows: Sequence[Row]) -> str:
    """The Markdown table; a dagger marks models that autocast itself fails on."""
    return report.markdown(HEADER, [_cells(row) for row in rows])


def _cells(row: Row) -> tuple[str, ...]:
    def error(kind: str) -> tuple[str, str]:
        pair = row.errors[kind]
        return f"{pair.ours:.2e}", f"{pair.autocast:.2e}"

    return (
        row.name + ("†" if row.autocast_failures else ""),
        f"{row.graphs} ({row.unchanged})",
        *map(str, row.casts),
        *map(str, row.casts_inference),
        f"{row.low_share[0]:.1%}",
        *error("bf16 output"),
        *error("bf16 grad"),
        *error("fp16 grad"),
        f"{worst(row):.2f}",
        *map(str, row.saved),
    )


def worst(row: Row) -> float:
    """The largest of a row's errors over its limit."""
    return max(pair.ratio for pair in row.errors.values())


def summary(rows: Sequence[Row]) -> str:
    """What all rows together come to; casts and bytes of those autocast can run."""
    beside = [row for row in rows if "bf16" not in row.autocast_failures]
    ours, theirs = (sum(row.casts[i] for row in beside) for i in (0, 1))
    saved, amp_saved = (sum(row.saved[i] for row in beside) for i in (0, 1))
    graphs = sum(row.graphs for row in rows)
    return (
        f"{len(rows)} of the zoo's {len(BY_NAME)} models, {graphs} graphs. A training "
        f"step of those that autocast can run is {ours} casts, {theirs} under "
        f"autocast, and saves {saved} bytes, {amp_saved} under autocast. Worst error "
        f"over its limit {max(map(worst, rows), default=0.0):.2f}."
    )


def notes(rows: Sequence[Row]) -> list[str]:
    """Where autocast failed, what had a second look, and what fell short."""
    found = [
        f"- † {row.name}, {when}: autocast fails: {why}"
        for row in rows
        for when, why in row.autocast_failures.items()
    ]
    found += [
        f"- {row.name}, {kind} error: medians of {pair.batches} batches, ours "
        f"{pair.ours:.2e}, autocast's {pair.autocast:.2e}"
        for row in rows
        for kind, pair in row.errors.items()
        if pair.batches is not None
    ]
    return found + [f"- {s}" for row in rows for s in row.shortfalls]


def text(data: Data) -> str:
    """The page of what was measured."""
    rows = [row_of(each) for each in data["models"]]
    failed = [f"- {name} failed: {why}" for name, why in data["failures"].items()]
    lines = [data["capability"], "", summary(rows), "", table(rows), ""]
    return "\n".join([*lines, *notes(rows), *failed]) + "\n"


def row_of(data: Data) -> Row:
    """A row as JSON holds it."""
    errors = {kind: Pair(**pair) for kind, pair in data["errors"].items()}
    return Row(**{**data, "errors": errors})


def main() -> int:
    """Prints the table and writes it; 1 if anything fell short."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo")
    parser.add_argument("names", nargs="*", help="models of tests/zoo (all)")
    parser.add_argument("--out", type=Path, help="folder for the results")
    given = parser.parse_args()
    rows: list[Row] = []
    failures: dict[str, str] = {}
    for name in track(given.names or list(BY_NAME), "visiting the zoo"):
        try:
            rows.append(measure_named(name))
        except Exception as error:  # noqa: BLE001 - one failing model must not hide the rest
            failures[name] = said(error)
    models = [asdict(row) for row in rows]
    data = {"capability": capability("cpu"), "models": models, "failures": failures}
    if given.out or not given.names:
        report.write((given.out or report.RESULTS) / "zoo", text(data), data)
    print(text(data))
    missed = [s for row in rows for s in unknown_shortfalls(row)]
    print(json.dumps({"models": len(rows), "missed": len(missed) + len(failures)}))
    return 1 if missed or failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
