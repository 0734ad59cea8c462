"""`python -m benchmarks.guard`: what it costs to look at all gradients at each step.

Two copies of one model are converted to bf16, one with the guard and one without it,
and take turns; the ratio of their times is taken in each round.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from torch import Tensor, nn

import autoamp

from . import report
from .report import Data, option
from .timing import interleaved, ratios, repeated

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
        given = {"dropout": 0.0, "activation": "gelu", "batch_first": True}
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    width, max(1, width // 64), 4 * width, norm_first=True, **given
                )
                for _ in range(layers)
            )
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.layers(self.table(ids)))
        logits = nn.functional.linear(x, self.table.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


MODELS = {"GPT": ((12, 768, 50257), (4, 128)), "small": ((2, 64, 512), (4, 16))}
"""The layers, width and words of each model, and the shape of its batch."""


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


def measured(name: str) -> list[Data]:
    """The rows of one of `MODELS`."""
    size, shape = MODELS[name]
    torch.manual_seed(0)
    ids = torch.randint(0, 512, shape)
    ways = {way: Way(GPT(*size), ids, way == WAYS[1]) for way in WAYS}
    for each in ways.values():
        repeated(each.training_step, WARM_UP)
    rows = []
    for what in ("step", "training_step"):
        steps = {way: getattr(each, what) for way, each in ways.items()}
        taken = interleaved(steps, ROUNDS)
        row: Data = {"what": f"{name}, {what.replace('_', ' ')}"}
        row |= {way: statistics.median(times) * 1e3 for way, times in taken.items()}
        rows.append({**row, "ratio": ratios(taken, WAYS[0])[WAYS[1]]})
    return rows


def measure(given: argparse.Namespace) -> Data:
    """The rows of one model, or of all."""
    names = [given.model] if given.model else MODELS
    return {"rows": [row for name in names for row in measured(name)]}


def text(data: Data) -> str:
    """The page."""
    lines = [
        [r["what"], *(f"{r[way]:.2f}" for way in WAYS), f"{r['ratio']:.3f}"]
        for r in data["rows"]
    ]
    header = ["", *(f"{way}, ms" for way in WAYS), "ratio"]
    return report.page(data, NOTE, report.markdown(header, lines))


ONE = option("--model", None, "one model alone", choices=[*MODELS])
TABLE = report.Table("guard", measure, text, options=(ONE,))

if __name__ == "__main__":
    raise SystemExit(TABLE.main())
