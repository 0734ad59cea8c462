"""Hunt a NaN: an fp16 training that takes no step, and the rule that cures it.

The network multiplies the features of an image with each other, as networks for
textures do, and sums the products over the rows of the image.  Each feature is an
ordinary fp16 number, but the sums are larger than 65,504, where fp16 ends.  The loss is
NaN, and autoamp skips each step, so that no weight is spoilt, and warns (on stderr).

`autoamp.find_overflow` names the line, and tries rules until a rule cures it.  The
training then starts again under that rule.

    python examples/nan_hunt.py

The exit status is 1 unless the first training takes no step, the rule puts one op back
into fp32, and the cured training halves its loss.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import autoamp

OPTIONS: dict[str, Any] = {"precision": "fp16", "do_no_harm": False}
"""`do_no_harm=False` converts on any machine, even where fp16 cannot pay."""


class TextureNet(nn.Module):
    """Classifies an image by how its features vary together."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(8, 16)
        self.head = nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 10))

    def forward(self, x: Tensor) -> Tensor:
        features = torch.relu(self.features(x))
        products = features.transpose(1, 2) @ features
        return self.head((products / 8).flatten(1))


def train(
    batches: list[tuple[Tensor, Tensor]], epochs: int, **options: Any
) -> tuple[nn.Module, list[float], int]:
    """The model, the mean loss of each epoch, and the number of steps taken."""
    torch.manual_seed(0)
    model = TextureNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model, optimizer = autoamp.convert(model, optimizer, **options)
    means, taken = [], 0
    for _ in range(epochs):
        losses = []
        for x, y in batches:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            taken += not optimizer.step_was_skipped
        means.append(sum(losses) / len(losses))
    return model, means, taken


def main(argv: list[str] | None = None) -> int:
    """Trains, finds the overflow, trains under the rule; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=10, help="of the cured training")
    epochs = parser.parse_args(argv).epochs

    from sklearn.datasets import load_digits  # takes a second

    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).view(-1, 8, 8) * (255 / 16)
    batches = list(zip(pixels.split(128), torch.tensor(labels).split(128), strict=True))

    print("1. fp16 by the built-in rules, five steps")
    model, means, taken = train(batches[:5], 1, **OPTIONS)
    print(f"   mean loss {means[0]:.3f}, steps taken: {taken} of 5\n")
    if not math.isnan(means[0]) or taken:
        print("This training was to fail, and did not.")
        return 1

    print("2. which op is it?")
    x, y = batches[0]
    found = autoamp.find_overflow(model, x, loss_fn=lambda out: cross_entropy(out, y))
    print(f"{found}\n")
    if found.rule is None:
        print("No rule was found.")
        return 1

    print(f"3. fp16 with {found.proposal}, {epochs} epochs")
    rule = {"deny": found.rule.deny, "keep": found.rule.keep}
    model, means, taken = train(batches, epochs, **OPTIONS, **rule)
    print(f"   mean loss of an epoch {means[0]:.3f} -> {means[-1]:.3f}")
    print(f"   steps taken: {taken} of {epochs * len(batches)}")
    moved = [op for op in autoamp.report(model).ops if "matmul" in op.op]
    print(f"   {moved[0].op} runs in {moved[0].precision}: {moved[0].reason}")
    learned = means[-1] < means[0] / 2 and moved[0].precision == "fp32"
    print("The rule cured it." if learned else "The rule did NOT cure it.")
    return 0 if learned else 1


if __name__ == "__main__":
    sys.exit(main())
