"""`python -m benchmarks.guard`: what it costs to look at all gradients at each step.

Two copies of one model are converted to bf16, one with the guard and one without it,
and take turns; the ratio of their times is taken in each round.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import autoamp

from . import report
from .capability import capability
from .processes import commit
from .timing import interleaved, ratios

STEM = "guard"
ROUNDS = 11
WARM_UP = 2
WAYS = ("guard=False", "guard=True")

NOTE = f"""\
Milliseconds, the median of {ROUNDS} interleaved rounds, and the median of the rounds'
ratios: bf16, AdamW. "GPT" has the sizes of GPT-2's 124 M parameters, and reads 4 x 128
tokens; "small" has 2 layers of 64 features and reads 4 x 16 tokens, so that its weights
take next to no time to look at. A step follows a backward; "training step" is forward,
backward and step."""


class GPT(nn.Module):
    """A transformer of GPT-2's shape, whose head shares the table of words."""

    def __init__(self, layers: int, width: int, words: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width,
                max(1, width // 64),
                4 * width,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        logits = nn.functional.linear(self.norm(x), self.table.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


MODELS: dict[str, tuple[Callable[[], GPT], tuple[int, int]]] = {
    "GPT": (lambda: GPT(12, 768, 50257), (4, 128)),
    "small": (lambda: GPT(2, 64, 512), (4, 16)),
}


class Way:
    """A model that is trained with the guard, or without it."""

    def __init__(self, model: nn.Module, ids: Tensor, guard: bool) -> None:
        autoamp.convert(model, precision="bf16", do_no_harm=False, guard=guard)
        self.model, self.ids = model, ids
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def training_step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.ids).backward()
        self.optimizer.step()

    def step(self) -> None:
        self.optimizer.step()


def measured(name: str) -> list[dict[str, Any]]:
    """The rows of one of `MODELS`."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    ids = torch.randint(0, 512, shape)
    ways = {way: Way(make(), ids, way == WAYS[1]) for way in WAYS}
    for each in ways.values():
        for _ in range(WARM_UP):
            each.training_step()
    rows = []
    for what in ("step", "training_step"):
        steps = {way: getattr(each, what) for way, each in ways.items()}
        taken = interleaved(steps, ROUNDS)
        row: dict[str, Any] = {"what": f"{name}, {what.replace('_', ' ')}"}
        row |= {way: statistics.median(times) * 1e3 for way, times in taken.items()}
        rows.append({**row, "ratio": ratios(taken, WAYS[0])[WAYS[1]]})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The Markdown table."""
    lines = [
        [r["what"], *(f"{r[way]:.2f}" for way in WAYS), f"{r['ratio']:.3f}"]
        for r in rows
    ]
    return report.markdown(["", *(f"{way}, ms" for way in WAYS), "ratio"], lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Times all steps, and writes and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guard")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    parser.add_argument("--model", choices=[*MODELS], help="one model alone")
    options = parser.parse_args(arguments)
    names = [options.model] if options.model else [*MODELS]
    rows = [row for name in names for row in measured(name)]
    head = f"{capability('cpu')}; commit {commit()}"
    text = "\n".join([head, "", NOTE, "", table(rows), ""])
    data: dict[str, Any] = {"capability": capability("cpu"), "rows": rows}
    report.write(options.out / STEM, text, data)
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
