"""Train BERT with Hugging Face's Trainer: an ordinary script that knows no precision.

    python examples/finetune_bert_trainer.py                # fp32
    autoamp run examples/finetune_bert_trainer.py           # mixed, where that can pay
    autoamp run --precision bf16 --convert-anyway examples/finetune_bert_trainer.py

`AUTOAMP_ENABLE=1 python ...` does the same as `autoamp run ...`.

A small BERT learns from scratch to tell prose from Python: lines of Python's manual
(module `pydoc_data`) against lines of Python's own library.  Both come with Python, so
nothing is downloaded.  A token is one character.

The exit status is 1 if fewer than 80 % of the lines held back are told right.
"""

from __future__ import annotations

import argparse
import inspect
import random
import sys
import tempfile
from pydoc_data.topics import topics
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
)

LENGTH = 48
"""Characters of a line that the network sees."""

WANTED = 0.8
"""The share of lines that must be told right; guessing tells half of them right."""


class Lines(Dataset[dict[str, Any]]):
    """Lines of text, each with its class: 0 is prose, 1 is Python."""

    def __init__(self, lines: list[tuple[str, int]]) -> None:
        self.lines = lines

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        text, label = self.lines[index]
        codes = [min(ord(character), 127) for character in text[:LENGTH]]
        padding = LENGTH - len(codes)
        return {
            "input_ids": torch.tensor(codes + [0] * padding),
            "attention_mask": torch.tensor([1] * len(codes) + [0] * padding),
            "labels": label,
        }


def read_lines(count: int) -> list[tuple[str, int]]:
    """`count` lines in random order, half of them prose and half of them Python."""
    prose = "\n".join(topics.values())
    python = "\n".join(map(inspect.getsource, (argparse, inspect, random)))
    chosen = []
    for label, text in enumerate((prose, python)):
        lines = sorted({line.strip() for line in text.splitlines()})
        long_enough = [line for line in lines if len(line) >= 20]
        few = random.Random(0).sample(long_enough, count // 2)
        chosen += [(line, label) for line in few]
    random.Random(0).shuffle(chosen)
    return chosen


def accuracy(prediction: Any) -> dict[str, float]:
    """The share of lines told right."""
    right = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"accuracy": float(right.mean())}


def main(argv: list[str] | None = None) -> int:
    """Trains and evaluates; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--lines", type=int, default=2000, help="at most 2000")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--width", type=int, default=64, help="768 is BERT base")
    parser.add_argument("--layers", type=int, default=2, help="12 is BERT base")
    given = parser.parse_args(argv)

    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=128,
            hidden_size=given.width,
            num_hidden_layers=given.layers,
            num_attention_heads=max(given.width // 64, 2),
            intermediate_size=4 * given.width,
            max_position_embeddings=LENGTH,
            num_labels=2,
        )
    )
    lines = read_lines(given.lines)
    held_back = len(lines) // 5
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                num_train_epochs=given.epochs,
                per_device_train_batch_size=32,
                per_device_eval_batch_size=32,
                learning_rate=1e-3,
                logging_strategy="epoch",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                dataloader_pin_memory=torch.cuda.is_available(),
            ),
            train_dataset=Lines(lines[held_back:]),
            eval_dataset=Lines(lines[:held_back]),
            compute_metrics=accuracy,
        )
        trainer.train()
        found = trainer.evaluate()["eval_accuracy"]
    print(f"{found:.1%} of {held_back} lines told right; {WANTED:.0%} are wanted")
    return 0 if found >= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
