"""The table of `python -m benchmarks.bytes`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from . import processes, report
from .bars import bytes_svg
from .bytes_models import case_of
from .bytes_step import WARM_UP, WAYS, count_step
from .capability import capability
from .processes import commit, commits, failures, said
from .ratios import KINDS, Row, mean, ratio

STEM = "bytes"

HEADER = (
    "model",
    *(f"{way}, MB" for way in WAYS),
    *(f"autoamp / autocast, {kind}" for kind in KINDS),
    "bound, MB",
    "autoamp / bound",
)

NOTE = f"""\
Bytes that kernels read and write in one training step, forward and backward, without
the optimizer, counted at the dispatcher; 1 MB is 10^6 bytes. Views count nothing, a
broadcast dimension counts once, a fused kernel counts its inputs and outputs. Every
column has the same batch and the model's own loss; dropout is 0. The step counted
comes after {WARM_UP} steps of an optimizer, which changed all weights: the refresh of
autoamp's low copies of the weights is included (in the forward), as autocast's casts
are.
"saved" is the bytes saved for the backward. "_written" has its attention written out,
as transformers' `attn_implementation="eager"` has it; on a CPU with units for bf16,
whose products are faster than its kernel of attention, it stays written out.

"bound" is the least that a placement under the ceiling can come to: a cut in which
every op has the bytes of its own call as price and a cast inside the graph has none.
The low copy of each weight and its fp32 gradient are in it, since no placement goes
without them. A step lies above its bound by the casts that norms, losses and residual
streams in fp32 need, because torch's kernels on CPUs write the dtype that they read; it
lies below where a later edit of the graph fuses calls that were placed one by one
(rotary embeddings).

A convolution in bf16 whose images have their channels first permutes them in its
kernel, where this count does not look; autoamp permutes outside, where it does.
oneDNN's own log has 2332 MB of reorders in a step of ResNet-50 on 8 images under
autocast and 421 MB by autoamp, so that a convolutional net slightly above 1 here moves
fewer bytes in fact."""

in_a_process = partial(processes.in_a_process, module="benchmarks.bytes")


def measured(name: str) -> Row:
    """The figures of one model, way by way; a way that fails has its error instead."""
    row: Row = {"name": name, "commit": commit(), "ways": {}, "failures": {}}
    for way in WAYS:
        torch._dynamo.reset()
        try:
            row["ways"][way] = count_step(case_of(name), way).as_json()
        except Exception as error:  # noqa: BLE001 - the other ways are still counted
            row["failures"][way] = said(error)
    return row


def fill(
    names: Sequence[str],
    folder: Path,
    *,
    again: bool = False,
    take: Callable[[str], Row] = in_a_process,
) -> str:
    """Counts the models named that `folder` has no whole row of; returns the table."""
    return processes.fill(
        *(names, folder / STEM), take=take, write=write, brief=_brief, again=again
    )


def write(rows: Sequence[Row], folder: Path) -> str:
    """Writes bytes.md, bytes.json and bytes.svg to `folder`; returns the text."""
    rows = sorted(rows, key=lambda row: row["name"].startswith("zoo/"))
    written = [row for row in rows if row["name"].endswith("_written")]
    rest = [row for row in rows if row not in written]
    paper = [row for row in rest if not row["name"].startswith("zoo/")]
    zoo = [row for row in rows if row["name"].startswith("zoo/")]
    parts = [f"{capability('cpu')}; commit {commits(rows)}", "", NOTE]
    for part in (paper, written, zoo):
        if part:
            parts += ["", table(part)]
    failed = failures(rows)
    parts += ["", "Not counted:", "", *failed] * bool(failed)
    text = "\n".join(parts) + "\n"
    report.write(
        folder / STEM, text, {"capability": capability("cpu"), "models": list(rows)}
    )
    (folder / STEM).with_suffix(".svg").write_text(bytes_svg(paper, zoo))
    return text


def table(rows: Sequence[Row]) -> str:
    """The Markdown table, with the geometric means of its ratios at the foot."""
    cells = [
        [
            row["name"],
            *(_megabytes(row, way) for way in WAYS),
            *(_ratio(ratio(row, kind)) for kind in KINDS),
            *_bound(row),
        ]
        for row in rows
    ]
    means = [_ratio(mean(rows, kind)) for kind in KINDS]
    return report.markdown(
        HEADER, [*cells, ["geometric mean", *("" for _ in WAYS), *means, "", ""]]
    )


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _bound(row: Row) -> tuple[str, str]:
    """The bound, and autoamp's bytes as a part of it; "-" where it was not counted."""
    found = row["ways"].get("autoamp", {})
    if not found.get("bound"):
        return "-", "-"
    return _in_mb(found["bound"]), _ratio(found["step"] / found["bound"])


def _megabytes(row: Row, way: str) -> str:
    return _in_mb(row["ways"][way]["step"]) if way in row["ways"] else "failed"


def _in_mb(count: float) -> str:
    value = count / 1e6
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _brief(row: Row) -> str:
    figures = ", ".join(f"{way} {_megabytes(row, way)}" for way in WAYS)
    failures = "".join(f"; {way}: {why}" for way, why in row["failures"].items())
    return f"{figures} MB; autoamp / autocast {_ratio(ratio(row, 'step'))}{failures}"
