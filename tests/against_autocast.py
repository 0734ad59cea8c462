"""How far a placement is from the truth, beside the autocast of its device.

The placement may be for a GPU, which nobody needs: `autocast_of` stands for autocast
there, and the kernels are this CPU's on both sides.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from autoamp.passes.decide.devices import named_device
from autoamp.passes.run import rewrite_graph
from autoamp.training.options import Options
from tests.reference_autocast import autocast_of
from tests.strategies import capture
from tests.truth import SCALES, leaves, relative, run

DEVICES = {"cpu": "cpu", "a100": "cuda", "h100": "cuda"}
"""Names of devices, each with torch's name of its type."""


def autocast_on(device: str, low: torch.dtype) -> AbstractContextManager[Any]:
    """A region of autocast of a device of `DEVICES`: torch's own on the CPU."""
    if device == "cpu":
        return torch.autocast("cpu", low)
    return autocast_of(DEVICES[device], low)


def ratios(
    model: nn.Module,
    draws: Callable[[int], Sequence[Tensor]],
    device: str,
    low: torch.dtype,
    seeds: Sequence[int] = range(8),
) -> list[float]:
    """Errors over autocast's: of outputs, then of gradients of inputs and weights.

    An error is the root of the mean square over the seeds, each of which draws weights
    and inputs.  Where fp32 itself is further off than autocast, fp32 is the measure.
    """
    precision = "fp16" if low is torch.float16 else "bf16"
    options = Options(precision=precision, do_no_harm=False, strict=True)
    on = None if device == "cpu" else named_device(device, low)
    graph = capture(model, len(draws(0)))
    gm = rewrite_graph(graph, leaves(draws(0)), options, low, device=on).gm
    squares: list[list[float]] = []
    for seed in seeds:
        torch.default_generator.manual_seed(seed)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
        given = draws(seed)
        exact = [x.double() if x.is_floating_point() else x for x in given]
        truth = run(copy.deepcopy(model).double(), exact)
        ours = run(gm, given, None, SCALES[low], list(model.parameters()))
        theirs = run(model, given, autocast_on(device, low), SCALES[low])
        single = run(model, given)
        found = [
            [relative(value, true) ** 2 for value, true in zip(way, truth, strict=True)]
            for way in (ours, theirs, single)
        ]
        squares.append([x for way in found for x in way])
    sums = [math.sqrt(sum(column)) for column in zip(*squares, strict=True)]
    third = len(sums) // 3
    ours_, theirs_, single_ = sums[:third], sums[third : 2 * third], sums[2 * third :]
    return [
        our / max(their, one, 1e-12)
        for our, their, one in zip(ours_, theirs_, single_, strict=True)
    ]
