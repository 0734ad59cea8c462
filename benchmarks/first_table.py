"""`python -m benchmarks.first_table`: the README's table, out of committed tables.

Nothing is measured here: times are those of `training.json`, bytes of `bytes.json`, and
casts and errors those of the zoo's small models in `zoo.json`.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from .report import RESULTS, markdown

MODELS = {
    "GPT-2": ("gpt2", "gpt2"),
    "BERT": ("bert", "bert"),
    "Llama": ("llama", "llama"),
    "ViT": ("vit", "vit"),
    "ResNet": ("resnet50", "tv_resnet"),
}
"""Title to the names in the tables of times and bytes, and in the zoo's."""

HEADER = (
    "autoamp / autocast",
    "time",
    "bytes moved",
    "bytes saved",
    "casts",
    "gradient error",
)


def rows() -> list[list[str]]:
    """The lines of the table."""
    times, counts = (_ways(table) for table in ("training", "bytes"))
    zoo = {each["name"]: each for each in _document("zoo")["models"]}
    found = []
    for title, (name, in_zoo) in MODELS.items():
        ours, theirs = counts[name]["autoamp"], counts[name]["autocast"]
        seconds = [times[name][way]["seconds"] for way in ("autoamp", "autocast")]
        shares = [a / b for a, b in zip(*seconds, strict=True)]
        error = zoo[in_zoo]["errors"]["bf16 grad"]
        found.append(
            [
                title,
                f"{statistics.median(shares):.2f}",
                f"{ours['step'] / theirs['step']:.2f}",
                f"{ours['saved'] / theirs['saved']:.2f}",
                "{} / {}".format(*zoo[in_zoo]["casts"]),
                f"{error['ours'] / error['autocast']:.2f}",
            ]
        )
    return found


def _document(table: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{table}.json").read_text())
    return found


def _ways(table: str) -> dict[str, dict[str, Any]]:
    """The ways of each model of a table."""
    return {each["name"]: each["ways"] for each in _document(table)["models"]}


def main() -> int:
    """Prints the table."""
    print(markdown(HEADER, rows()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
