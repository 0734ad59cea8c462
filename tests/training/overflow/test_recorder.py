"""The steps that a recorder adds to a trail, for one graph without a conversion."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autoamp.passes.node_by_node import Runner
from autoamp.training.blame.recorder import Recorder
from autoamp.training.blame.trail import OUTSIDE, Step, Trail
from tests.says import says


def recorded(function: Callable[..., Any], *given: Tensor) -> Recorder:
    """The recorder of one run of `function`, captured as a graph."""
    recorder = Recorder(Trail(), exact=True)
    Runner(make_fx(function)(*given), [recorder]).run(*given)
    return recorder


def test_a_write_through_a_view_made_the_values_of_its_base() -> None:
    def function(x: Tensor) -> Tensor:
        base = x * 2
        base[0].fill_(math.inf)
        return base + 1

    trail = recorded(function, torch.ones(2, 3)).trail
    (filled,) = [s for s in trail.steps if "fill_" in s.location.op]
    (added,) = [s for s in trail.steps if "add" in s.location.op]
    assert added.operands == [filled]


def test_what_is_stacked_was_made_where_it_overflowed() -> None:
    trail = Trail()
    first, second, unknown, whole = (torch.ones(()) for _ in range(4))
    trail.add(Step(None, 1.0, torch.float16), [first])
    overflowed = trail.add(Step(None, math.inf, torch.float16), [second])
    Recorder(trail).joined(whole, [unknown, first, second])
    assert trail.maker(whole) is overflowed


def test_python_code_between_graphs_is_named_by_its_line() -> None:
    x = torch.ones(3, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        made = x.exp()  # between
    (step,) = [s for s in recorded(torch.neg, made).trail.steps if not s.operands]
    assert (step.location.kind, step.location.op) == (OUTSIDE, "Exp")
    says(step.location.source, "x.exp()", line=f"{Path(__file__).name}:")
