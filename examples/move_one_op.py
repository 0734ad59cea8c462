"""Move one op to another category by a rules file, and prove that the move was right.

The built-in rules keep `exp` in fp32 when the compute dtype is fp16, because `exp`
overflows above 11.09.  In this network the argument of `exp` is never positive, so that
the result lies between 0 and 1.  The author of the network knows that, and no rule can.

1. `report.why("exp")` says why the op is in fp32, and which option would change that.
2. A rules file of two lines moves the op.
3. `autoamp.compare` runs fp32 and fp16 side by side, forward and backward: the error
   stays within the budget that the author sets, and the casts around the op are gone.

    python examples/move_one_op.py

The exit status is 1 unless the op moves, casts disappear, and the budget holds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import autoamp

OPTIONS: dict[str, Any] = {"precision": "fp16", "do_no_harm": False}
"""`do_no_harm=False` converts on any machine, even where fp16 cannot pay."""

RULES = """\
[infer]
exp = "its argument is never positive here: the result lies between 0 and 1"
"""


class Decaying(nn.Module):
    """Features that are damped by a learned rate, as in recurrent language models."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Linear(64, width)
        self.rate = nn.Linear(width, width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x)
        decay = torch.exp(-torch.relu(self.rate(features)))
        return self.head(decay * features)


def main(argv: list[str] | None = None) -> int:
    """Asks, moves, compares; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--width", type=int, default=256, help="features of a layer")
    parser.add_argument(
        "--budget",
        type=float,
        default=2e-3,
        help="largest relative error of output and gradients (default: %(default)g)",
    )
    given = parser.parse_args(argv)

    torch.manual_seed(0)
    model, x = Decaying(given.width), torch.randn(256, 64)

    print("1. why is exp in fp32?\n")
    before = autoamp.explain(model, x, **OPTIONS)
    print(before.why("exp"))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.toml"
        path.write_text(RULES)
        moved = {**OPTIONS, "rules": str(path)}  # laid over the built-in rules
        after = autoamp.explain(model, x, **moved)
        comparisons = [
            autoamp.compare(model, x, **options) for options in (OPTIONS, moved)
        ]
    exp = next(op for op in after.ops if op.name == "exp")
    print(f"\n2. mine.toml moves it:\n\n{RULES}\nexp now runs in {exp.precision}.")

    print("\n3. was that right?\n")
    names = ("built-in rules", "with mine.toml")
    for name, report, found in zip(names, (before, after), comparisons, strict=True):
        casts, errors = report.cast_counts, found.errors
        print(
            f"{name}: {casts.forward} casts in the forward, {casts.backward} in the "
            f"backward; error of the output {errors.output:.2e}, "
            f"of the gradients {errors.gradients:.2e}"
        )

    fewer = after.cast_counts.forward < before.cast_counts.forward
    within = comparisons[1].errors.worst <= given.budget
    print(f"Within the budget of {given.budget:g}: {'yes' if within else 'NO'}.")
    return 0 if exp.precision == "fp16" and fewer and within else 1


if __name__ == "__main__":
    sys.exit(main())
