"""Random programs of the ops that autocast lists, and their errors beside autocast's.

    python -m tests.conformance.attack cuda 1000
    python -m tests.conformance.attack cpu 1000 --first 5000 --low float16

Each program has a seed of its own, and is the same on every machine.  A program whose
error is more than 1.1 times autocast's over a few draws is measured again over many
others, and is reported with its steps where it is so again.
"""

from __future__ import annotations

import argparse
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.against_autocast import ratios
from tests.listed_ops import BLOCKS, ROWS, WIDTH, Call
from tests.small_models import Of
from tests.truth import MARGIN

PLANNED = {"cpu": "cpu", "cuda": "h100"}
FEW, MANY = range(4), range(100, 132)
"""The draws of weights and inputs by which programs are found, and then judged."""

OTHERS: dict[str, Call] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b / 2,
    "mul": lambda a, b: a * b,
    "halve": lambda a, b: a * 0.5,
    "mean": lambda a, b: a - b.mean(-1, keepdim=True),
    "amax": lambda a, b: a - b.amax(-1, keepdim=True),
    "relu": lambda a, b: a.relu(),
    "gelu": lambda a, b: F.gelu(a),
    "silu": lambda a, b: F.silu(a) + b,
    "tanh": lambda a, b: a.tanh(),
    "sigmoid": lambda a, b: a.sigmoid() * b,
    "sqrt": lambda a, b: (a * a + 1).sqrt(),
    "where": lambda a, b: torch.where(a > b, a, b / 2),
    "fp32": lambda a, b: a.float() + b,
    "constant": lambda a, b: a + torch.linspace(-1, 1, WIDTH),
    "pad": lambda a, b: F.pad(a[:, 2:], (1, 1)),
    "slice": lambda a, b: torch.cat([a[:, ::2], b[:, 1::2]], 1),
    "flip": lambda a, b: a.flip(0),
    "roll": lambda a, b: a.roll(1, 1) - b,
    "turn": lambda a, b: a.view(2, 16, 16).transpose(1, 2).reshape(ROWS, WIDTH),
    "chunk": lambda a, b: torch.stack([*a.chunk(2, 0)], 1),
    "expand": lambda a, b: a[:1].expand(ROWS, WIDTH) + b,
    "write": lambda a, b: a.clone().mul_(0.5).add_(b),
    "max_pool": lambda a, b: F.max_pool1d(a[:, None], 2),
    "avg_pool": lambda a, b: F.avg_pool1d(a[:, None], 2),
    "batch_norm": lambda a, b: F.batch_norm(a, None, None, training=True),
    "product": lambda a, b: a @ b.mT / WIDTH,
    "attention": lambda a, b: F.scaled_dot_product_attention(a[None], b[None], a[None]),
    "conv": lambda a, b: F.conv1d(a.view(1, ROWS, WIDTH), b.view(4, ROWS, 4) / 8),
    "einsum": lambda a, b: torch.einsum("ij,kj->ik", a, b) / WIDTH,
    "mv": lambda a, b: (a @ b[0])[:, None] + a,
    "layer_norm": lambda a, b: F.layer_norm(a, (WIDTH,)),
    "softmax": lambda a, b: a.softmax(-1),
    "sum": lambda a, b: a - b.sum(-1, keepdim=True) / WIDTH,
    "cross_entropy": lambda a, b: F.cross_entropy(a, b.softmax(-1), reduction="none"),
}
"""Calls of ops that are on no list, or with which models are full."""

WITHOUT = ("linalg", "fake_quantize", "cholesky", "lu_", "_lu_", "qr", "svd", "geqrf")
WITHOUT += ("inverse", "pinverse", "orgqr", "ormqr", "triangular", "nuclear")
"""Ops whose errors depend on the condition of a matrix, or that jump."""


@dataclass(frozen=True)
class Step:
    """A call of two earlier values; -1 is the last one."""

    name: str
    first: int
    second: int


@cache
def calls(device: str) -> dict[str, Call]:
    """The calls of which programs for `device` are made."""
    listed = {n: c for n, c in BLOCKS[device].items() if not n.startswith(WITHOUT)}
    return {**listed, **OTHERS}


def steps(seed: int, device: str) -> list[Step]:
    """The steps of the program of a seed; those named `linear` have weights."""
    draw = random.Random(seed)
    found = []
    for made in range(2, 2 + draw.randint(2, 7)):
        name = draw.choice([*calls(device), *["linear"] * 20, *[*OTHERS] * 2])
        # Long chains find more than wide graphs.
        first = made - 1 if draw.random() < 0.6 else draw.randrange(made)
        found.append(Step(name, first, draw.randrange(made)))
    return found


def fit(h: Tensor) -> Tensor:
    """The numbers of any tensor as (ROWS, WIDTH), none of them large."""
    flat = h.flatten()
    if len(flat) < ROWS * WIDTH:
        flat = flat.repeat(-(-ROWS * WIDTH // len(flat)))
    return flat[: ROWS * WIDTH].view(ROWS, WIDTH).clamp(-4, 4)


def program(chosen: Sequence[Step], device: str) -> nn.Module:
    """The module that makes these steps, and gives the last two values, weighted.

    The weights are inputs, so that gradients differ from draw to draw also where the
    steps are linear: the error of one gradient says little.
    """

    def forward(m: Any, x: Tensor, first: Tensor, second: Tensor) -> list[Tensor]:
        values = [m.left(x), m.right(x)]
        for number, step in enumerate(chosen):
            a, b = values[step.first], values[step.second]
            if step.name == "linear":
                values.append(getattr(m, f"fc{number}")(a))
            else:
                values.append(fit(calls(device)[step.name](a, b)))
        return [values[-2] * first, values[-1] * second]

    weights = {
        f"fc{number}": nn.Linear(WIDTH, WIDTH)
        for number, step in enumerate(chosen)
        if step.name == "linear"
    }
    ends = {"left": nn.Linear(WIDTH, WIDTH), "right": nn.Linear(WIDTH, WIDTH)}
    return Of(forward, **ends, **weights)


def draws(seed: int) -> Sequence[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(3)]


def worst(
    chosen: Sequence[Step], device: str, low: torch.dtype, seeds: Sequence[int]
) -> float:
    """The largest ratio of an error of ours to autocast's."""
    return max(ratios(program(chosen, device), draws, PLANNED[device], low, seeds))


def surely_worse(chosen: Sequence[Step], device: str, low: torch.dtype) -> float:
    """The ratio over many draws where it is above the margin over few as well, or 0."""
    if worst(chosen, device, low, FEW) <= MARGIN:
        return 0.0
    found = worst(chosen, device, low, MANY)
    return found if found > MARGIN else 0.0


def shrunk(chosen: list[Step], worse: Callable[[list[Step]], bool]) -> list[Step]:
    """Fewer steps that are worse still: no single one can be left out."""
    for at in range(len(chosen)):
        less = _without(chosen, at)
        if less and worse(less):
            return shrunk(less, worse)
    return chosen


def _without(chosen: Sequence[Step], at: int) -> list[Step]:
    """The other steps; readers of the step's value read its first operand."""
    gone = at + 2

    def moved(value: int) -> int:
        value = chosen[at].first if value == gone else value
        return value - (value > gone)

    kept = [step for number, step in enumerate(chosen) if number != at]
    return [Step(s.name, moved(s.first), moved(s.second)) for s in kept]


def main() -> None:
    """Prints each program that is surely less true than autocast's, and a summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device", choices=PLANNED)
    parser.add_argument("count", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--low", choices=["bfloat16", "float16"], nargs="*")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    ran = failed = above = 0
    for seed in range(given.first, given.first + given.count):
        # Each program in one of the two dtypes, if none is named.
        for low in given.low or [("bfloat16", "float16")[seed % 2]]:
            dtype = getattr(torch, low)
            chosen = steps(seed, given.device)
            try:
                found = surely_worse(chosen, given.device, dtype)
            except Exception as error:  # noqa: BLE001 -- counted, and told
                failed += 1
                print(f"{seed} {low} failed: {error!r:.200}", chosen, flush=True)
                continue
            ran += 1
            above += found > 0
            if found:
                less = shrunk(
                    chosen, lambda s, d=dtype: surely_worse(s, given.device, d) > 0
                )
                print(f"{seed} {low} {found:.2f}", chosen, "or", less, flush=True)
        if seed % 50 == 49:
            print(f"{ran} ran, {above} above {MARGIN}, {failed} failed", flush=True)
            torch._dynamo.reset()
    print(f"{ran} ran, {above} above {MARGIN}, {failed} failed")


if __name__ == "__main__":
    main()
