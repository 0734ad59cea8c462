"""`python -m benchmarks.layouts`: a training step with the channels last, and without.

Each of torchvision's models takes forward and backward in fp32, under autocast, by
autoamp as captured and with the channels last, and in bf16; autocast, autoamp and bf16
also with weights and images that are given channels last.  All take turns in one
process, which keeps the memory that it frees.  The figure of a way is the median over
rounds of its time divided by that of autocast in the same round.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from functools import partial

import torch
from rich.progress import track
from torch import nn

import autoamp

from . import report
from .models import torchvisions
from .report import Data
from .timing import interleaved, keep_freed_memory, ratios, repeated

MODELS = {"resnet18": 128, "resnet50": 128, "mobilenet_v2": 128, "densenet121": 128}
"""Models of torchvision, and the sides of their images in pixels."""

BATCH = 8
BASELINE = "autocast"
WARM_UP = 3
HEADER = (
    "model",
    "autocast, ms",
    "fp32",
    "autoamp, as captured",
    "autoamp, channels last",
    "bfloat16, channels last",
    "autocast, given channels last",
    "autoamp, given channels last",
)
WAYS = ("fp32", "captured", "last", "bfloat16", "autocast given", "autoamp given")
"""The ways of the columns after the first two."""


def steps(name: str, side: int) -> dict[str, Callable[[], None]]:
    """A training step of each way to run one model, on one batch."""
    torch.manual_seed(0)
    model = torchvisions(name)
    image = torch.randn(BATCH, 3, side, side)
    low = {"precision": "bf16", "do_no_harm": False, "strict": True}
    off = {"channels_last": False}
    captured = autoamp.convert(copy.deepcopy(model), **low, fuse=off)
    last = autoamp.convert(copy.deepcopy(model), **low)
    narrow = copy.deepcopy(model).bfloat16().to(memory_format=torch.channels_last)
    moved = image.contiguous(memory_format=torch.channels_last)
    low_image = moved.bfloat16()
    lying = copy.deepcopy(model).to(memory_format=torch.channels_last)
    given = autoamp.convert(copy.deepcopy(lying), **low)

    def autocast(under: nn.Module, image: torch.Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            result = under(image)
        _backward(under, result)

    found: dict[str, Callable[[], None]] = {
        "fp32": lambda: _backward(model, model(image)),
        BASELINE: partial(autocast, copy.deepcopy(model), image),
        "captured": lambda: _backward(captured, captured(image)),
        "last": lambda: _backward(last, last(image)),
        "bfloat16": lambda: _backward(narrow, narrow(low_image)),
        "autocast given": partial(autocast, lying, moved),
        "autoamp given": lambda: _backward(given, given(moved)),
    }
    for step in found.values():
        repeated(step, WARM_UP)
    if "channels last" not in str(autoamp.report(last)):
        raise SystemExit("this CPU's profile has convolutions keep their layouts")
    return found


def _backward(model: nn.Module, result: torch.Tensor) -> None:
    """One backward, and the write to all weights that a step of an optimizer makes."""
    result.float().square().mean().backward()
    weights = [p for p in model.parameters() if p.grad is not None]
    with torch.no_grad():
        torch._foreach_add_(weights, [p.grad for p in weights], alpha=-1e-4)
    model.zero_grad()


def measure(given: argparse.Namespace) -> Data:
    """The time under autocast of each model, and the ratios of the ways."""
    keep_freed_memory()
    found = {}
    wanted = {name: side for name, side in MODELS.items() if given.only in name}
    for name, side in track(wanted.items(), "layouts", transient=True):
        taken = interleaved(steps(name, side), given.rounds)
        milliseconds = 1e3 * statistics.median(taken[BASELINE])
        found[name] = {"milliseconds": milliseconds, "ratios": ratios(taken, BASELINE)}
    return {"rounds": given.rounds, "models": found}


def text(data: Data) -> str:
    """The page."""
    lines = [
        [
            name,
            f"{each['milliseconds']:.0f}",
            *(_cell(each["ratios"].get(way)) for way in WAYS),
        ]
        for name, each in data["models"].items()
    ]
    note = (
        f"A training step in bf16 of {BATCH} images, "
        f"{' '.join(map(str, sorted(set(MODELS.values()))))} pixels wide, with a plain "
        f"step of SGD; times as parts of autocast's, medians of {data['rounds']} "
        "interleaved rounds."
    )
    return report.page(data, note, report.markdown(HEADER, lines))


def _cell(ratio: float | None) -> str:
    return "not measured" if ratio is None else f"{ratio:.2f}"


TABLE = report.Table("layouts", measure, text, options=(report.rounds(11), report.ONLY))

if __name__ == "__main__":
    raise SystemExit(TABLE.main())
