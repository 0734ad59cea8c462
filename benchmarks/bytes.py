"""`python -m benchmarks.bytes`: bytes that a training step reads and writes.

Each model runs in a process of its own; a finished one is skipped unless `--again`.
`--zoo` measures the models of tests/zoo.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from autoamp.passes.check.saved_bytes import saved_bytes
from autoamp.tools.count import CountingMode

from . import processes, report
from .metrics import ModelCase
from .models import ZOO
from .processes import Row, mean, new_row, ratio, ratio_text
from .report import said
from .setting import Setting
from .traffic import Traffic, TrafficMode
from .training import case_in, in_one_batch
from .ways import CPU_BF16, Prepared, low_way, prepared

WARM_UP = 2
"""Steps before the counted one: the first captures, and an optimizer follows each."""

KINDS = ("step", "forward", "saved")
"""The figures of which the table gives the ratio of autoamp to autocast."""


def ways(setting: Setting) -> tuple[str, ...]:
    """The columns of the table."""
    return ("fp32", "autocast", "autoamp", low_way(setting))


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

A convolution in bf16 whose images have their channels first permutes them in its
kernel, where this count does not look; autoamp permutes outside, where it does.
oneDNN's own log has 2332 MB of reorders in a step of ResNet-50 on 8 images under
autocast and 421 MB by autoamp, so that a convolutional net slightly above 1 here moves
fewer bytes in fact."""


@dataclass(frozen=True)
class StepCount:
    """What one training step came to.

    `refreshed` counts low copies of weights that were made equal to their weights in
    the counted step: after an optimizer step all of them, and their bytes are in the
    forward's.  `saved` is the bytes saved for the backward.
    """

    traffic: Traffic
    saved: int
    refreshed: int

    def as_json(self) -> dict[str, Any]:
        """The figures of the table, as JSON holds them."""
        return {
            "step": self.traffic.bytes(),
            "forward": self.traffic.bytes("forward"),
            "saved": self.saved,
        }


def count_step(case: ModelCase, way: str, setting: Setting = CPU_BF16) -> StepCount:
    """Bytes of a training step of `case`, run in one of the `ways`.

    The step counted is the one after `WARM_UP` steps, each followed by an optimizer's
    step, so that copies of weights kept between calls are out of date and are refreshed
    in it.  The optimizer's own bytes are not counted.  Bytes saved for the backward are
    those of one more forward on the same batch.
    """
    ready = prepared(case, way, setting)
    parameters = list(ready.model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1e-6)

    def fresh() -> Prepared:
        """The model with a batch of its own, which it may write into."""
        return ready._replace(batch=copy.deepcopy(ready.batch))

    def forward(own: Prepared) -> Any:
        torch.manual_seed(0)
        output = own.forward()
        return case.loss(output), output

    def step(own: Prepared) -> None:
        forward(own)[0].backward()

    for _ in range(WARM_UP):
        step(fresh())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    last = fresh()  # the copy of the batch is no part of the step
    with CountingMode(parameters) as counting, TrafficMode() as mode:
        step(last)
    optimizer.zero_grad(set_to_none=True)
    saved = saved_bytes(partial(forward, fresh()), parameters).total
    return StepCount(mode.traffic, saved, counting.counts.refreshed)


def measured(name: str, setting: Setting = CPU_BF16) -> Row:
    """The figures of one model, way by way; a way that fails has its error instead."""
    row, case = new_row(name), case_in(setting, name)
    for way in ways(setting):
        torch._dynamo.reset()
        try:
            row["ways"][way] = count_step(case, way, setting).as_json()
        except Exception as error:  # noqa: BLE001 - the other ways are still counted
            row["failures"][way] = said(error)
    return row


def text(rows: Sequence[Row], setting: Setting, machine: str) -> str:
    """The page: the paper's models, those with attention written out, and the zoo's."""
    kinds: dict[str, list[Row]] = {"paper": [], "written": [], "zoo": []}
    for row in rows:
        zoo, written = row["name"].startswith("zoo/"), row["name"].endswith("_written")
        kinds["zoo" if zoo else "written" if written else "paper"].append(row)
    tables = [table(each, ways(setting)) for each in kinds.values() if each]
    return processes.page(rows, machine, NOTE, *tables)


def table(rows: Sequence[Row], ways: Sequence[str]) -> str:
    """The Markdown table, with the geometric means of its ratios at the foot."""
    cells = [
        [
            row["name"],
            *(_megabytes(row, way) for way in ways),
            *(ratio_text(ratio(row, kind)) for kind in KINDS),
        ]
        for row in rows
    ]
    means = [ratio_text(mean(rows, kind)) for kind in KINDS]
    header = ("model", *(f"{way}, MB" for way in ways))
    header += tuple(f"autoamp / autocast, {kind}" for kind in KINDS)
    foot = ["geometric mean", *("" for _ in ways), *means]
    return report.markdown(header, [*cells, foot])


def _megabytes(row: Row, way: str) -> str:
    if way not in row["ways"]:
        return "failed"
    value = row["ways"][way]["step"] / 1e6
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _brief(row: Row) -> str:
    figures = ", ".join(f"{way} {_megabytes(row, way)}" for way in row["ways"])
    failures = "".join(f"; {way}: {why}" for way, why in row["failures"].items())
    share = ratio_text(ratio(row, "step"))
    return f"{figures} MB; autoamp / autocast {share}{failures}"


TABLE = processes.ModelTable("bytes", in_one_batch, measured, text, _brief)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what is asked and not yet there; 1 if a way to run a model failed."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--zoo", action="store_true", help="the models of tests/zoo")
    given, rest = parser.parse_known_args(arguments)
    return TABLE.main([*rest, *(f"zoo/{name}" for name in ZOO if given.zoo)])


if __name__ == "__main__":
    raise SystemExit(main())
