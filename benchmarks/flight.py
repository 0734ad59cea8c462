"""`python -m benchmarks.flight`: what a training step costs more with `record=`.

Three copies of one model train in turns in one process: as it is in fp32, converted,
and converted with a recorder.  Then the recorder's own functions are timed alone, in
CPU time of their thread, which other programs on the machine disturb little.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import autoamp
from autoamp.flight import folder
from autoamp.flight.recorder import EVERY, FlightRecorder

from . import report
from .guard import GPT
from .report import commit
from .setting import capability
from .timing import interleaved, ratios

STEM = "flight"
WARM_UP = 8
"""Steps before the first that is timed: by then the recorder knows what it costs."""

WAYS = ("fp32", "converted", "recorded")

NOTE = """\
Milliseconds of a training step (forward, backward, AdamW) on one thread: medians of
interleaved rounds in one process, and the median of the rounds' ratios of "recorded" to
"converted". "own" is the CPU time of the recorder's functions, the mean of a step; "of
fp32" is its part of the fp32 model's step, which is the shortest on a processor that
emulates bf16. "each step" is "own" where each step has a record
(`AUTOAMP_RECORD_EVERY=1`), and "apart" is how many steps apart the recorder chose to
write records. The MLP has three linears of 64 features and reads 16 rows; the GPT has
4 layers of 256 features and GPT-2's words, and reads 4 x 128 tokens."""


class MLP(nn.Module):
    """A model whose step is mostly Python."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((32, 64), (64, 64), (64, 8))
        self.layers = nn.ModuleList(nn.Linear(*each) for each in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def _words() -> Tensor:
    return torch.randint(0, 512, (4, 128))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = {
    "MLP": (MLP, lambda: torch.randn(16, 32), 601),
    "GPT, 4 layers": (lambda: GPT(4, 256, 50257), _words, 5),
}
"""Each model with its input and its rounds."""


class Way:
    """A copy of a model, trained in one of `WAYS`."""

    def __init__(self, name: str, way: str, root: Path) -> None:
        make, data, _ = MODELS[name]
        torch.manual_seed(0)
        self.model, self.data, self.root = make(), data(), root
        if way != WAYS[0]:
            record = root if way == WAYS[2] else None
            autoamp.convert(
                self.model, precision="bf16", do_no_harm=False, record=record
            )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        for _ in range(WARM_UP):
            self.step()

    def step(self) -> None:
        """One training step."""
        self.optimizer.zero_grad()
        self.model(self.data).backward()
        self.optimizer.step()

    def apart(self) -> int:
        """How many steps apart the newest records are."""
        (found,) = folder.rings(self.root)
        return int(found.records[-1]["every"])


@contextmanager
def own_time() -> Iterator[list[float]]:
    """Adds up the CPU seconds of the recorder's functions, in a list of one number."""
    taken = [0.0]

    def timed(method: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(method)
        def run(*args: Any) -> None:
            start = time.thread_time()
            method(*args)
            taken[0] += time.thread_time() - start

        return run

    names = ("begin", "end", "reached", "stepped")
    plain = {name: getattr(FlightRecorder, name) for name in names}
    for name, method in plain.items():
        setattr(FlightRecorder, name, timed(method))
    try:
        yield taken
    finally:
        for name, method in plain.items():
            setattr(FlightRecorder, name, method)


def own(name: str, *, each_step: bool) -> tuple[float, int]:
    """Milliseconds that the recorder takes of a step, and how far its records are."""
    steps = 2 * MODELS[name][2]
    with (
        own_time() as taken,
        tempfile.TemporaryDirectory() as root,
        mock.patch.dict("os.environ", {EVERY: "1" if each_step else ""}),
    ):
        way = Way(name, WAYS[2], Path(root))
        taken[0] = 0.0
        for _ in range(steps):
            way.step()
        autoamp.revert(way.model)
        return taken[0] / steps * 1e3, way.apart()


def measured(name: str) -> dict[str, Any]:
    """The row of one of `MODELS`."""
    with tempfile.TemporaryDirectory() as root:
        ways = {way: Way(name, way, Path(root)) for way in WAYS}
        steps = {way: each.step for way, each in ways.items()}
        taken = interleaved(steps, MODELS[name][2])
        autoamp.revert(ways[WAYS[2]].model)
    del ways, steps
    gc.collect()
    row: dict[str, Any] = {"what": name}
    row |= {way: statistics.median(times) * 1e3 for way, times in taken.items()}
    row["ratio"] = ratios(taken, WAYS[1])[WAYS[2]]
    row["own"], row["apart"] = own(name, each_step=False)
    row["of fp32"] = row["own"] / row[WAYS[0]]
    row["each step"], _ = own(name, each_step=True)
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The Markdown table."""
    heads = ["", *(f"{way}, ms" for way in WAYS), "ratio"]
    heads += ["own, ms", "of fp32", "apart", "each step, ms"]
    lines = [
        [
            r["what"],
            *(f"{r[way]:.2f}" for way in WAYS),
            f"{r['ratio']:.3f}",
            f"{r['own']:.3f}",
            f"{r['of fp32']:.2%}",
            str(r["apart"]),
            f"{r['each step']:.3f}",
        ]
        for r in rows
    ]
    return report.markdown(heads, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Times all steps, and writes and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flight")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    parser.add_argument("--model", choices=[*MODELS], help="one model alone")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    names = [options.model] if options.model else [*MODELS]
    rows = [measured(name) for name in names]
    head = f"{capability('cpu')}; commit {commit()}"
    text = "\n".join([head, "", NOTE, "", table(rows), ""])
    data: dict[str, Any] = {"capability": capability("cpu"), "rows": rows}
    report.write(options.out / STEM, text, data)
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
