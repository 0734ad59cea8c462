"""The one door to the inside for the tests of this folder: what they ask of it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autoamp.check.changes import TOGETHER as MAY_GROUP
from autoamp.check.compare import differences
from autoamp.options import Options
from autoamp.pipeline import passes
from autoamp.pipeline.run import rewrite_graph
from autoamp.place.devices import Device
from autoamp.rewrite.copied import clean_up, copied
from autoamp.rewrite.rewritten import Rewritten

together: Any = importlib.import_module("autoamp.rewrite.together")

__all__ = [
    "MAY_GROUP", "Device", "clean_up", "copied", "differences", "passes",
    "rewritten_graph", "together",
]  # fmt: skip


def rewritten_graph(
    gm: fx.GraphModule, given: Sequence[Any], precision: str, **options: Any
) -> Rewritten:
    """The record of a graph that the caller has made."""
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return rewrite_graph(gm, given, Options(precision=precision, **options), low)
