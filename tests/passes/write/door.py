"""The one door to the inside for the tests of this folder: what they ask of it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autoamp.passes import list as passes
from autoamp.passes.check.allowed_changes import MADE_AGAIN as MAY_MAKE_AGAIN
from autoamp.passes.check.allowed_changes import TOGETHER as MAY_GROUP
from autoamp.passes.check.compare import differences
from autoamp.passes.decide.devices import Device
from autoamp.passes.graph_record import Rewritten
from autoamp.passes.run import rewrite_graph
from autoamp.passes.write.copied import clean_up, copied
from autoamp.passes.write.hoist_weight_casts import read_wide
from autoamp.training.options import Options

made_again_functions: Any = importlib.import_module(
    "autoamp.passes.functions.made_again"
)
sums: Any = importlib.import_module("autoamp.passes.decide.sums")
together: Any = importlib.import_module("autoamp.passes.write.grouped_weight_casts")

__all__ = [
    "MAY_GROUP", "MAY_MAKE_AGAIN", "Device", "clean_up", "copied", "differences",
    "made_again_functions", "passes", "read_wide", "rewritten_graph",
    "sums", "together",
]  # fmt: skip


def rewritten_graph(
    gm: fx.GraphModule, given: Sequence[Any], precision: str, **options: Any
) -> Rewritten:
    """The record of a graph that the caller has made."""
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return rewrite_graph(gm, given, Options(precision=precision, **options), low)
