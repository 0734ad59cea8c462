"""How far a model's outputs and gradients are from the truth, beside torch.autocast's.

The truth is the model in float64, and a model may be at most 1.1 times as far from it
as torch.autocast, or as fp32 itself.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoamp.passes.run import rewrite_graph
from autoamp.training.options import Options
from tests.strategies import capture

MARGIN = 1.1
"""How many times autocast's error ours may be."""

SCALES = {torch.bfloat16: 1.0, torch.float16: 2.0**8}
"""The loss scale of both: fp16 gradients of these small models need one."""


@dataclass(frozen=True)
class Errors:
    """Relative errors of outputs and then of gradients, inputs' before parameters'."""

    ours: tuple[float, ...]
    autocast: tuple[float, ...]
    fp32: tuple[float, ...]

    def worst(self) -> float:
        """The largest ratio of an error of ours to what it is measured by."""
        return max(
            ours / max(amp, single, 1e-12)
            for ours, amp, single in zip(
                self.ours, self.autocast, self.fp32, strict=True
            )
        )


def errors(
    model: nn.Module, given: Sequence[Tensor], low: torch.dtype, **options: Any
) -> Errors:
    """The errors of `model` rewritten for `low`, of autocast and of fp32."""
    precision = "fp16" if low is torch.float16 else "bf16"
    chosen = Options(**{"precision": precision, "do_no_harm": False, **options})
    exact = [x.double() if x.is_floating_point() else x for x in given]
    truth = run(copy.deepcopy(model).double(), exact)
    fp32 = run(copy.deepcopy(model), given)
    amp = run(copy.deepcopy(model), given, torch.autocast("cpu", low), SCALES[low])
    mine = copy.deepcopy(model)
    traced = leaves(given)
    gm = rewrite_graph(capture(mine, len(given)), traced, chosen, low).gm
    ours = run(gm, given, scale=SCALES[low], parameters=list(mine.parameters()))

    def off(found: list[Tensor]) -> tuple[float, ...]:
        return tuple(map(relative, found, truth))

    return Errors(off(ours), off(amp), off(fp32))


def relative(found: Tensor, true: Tensor) -> float:
    """The norm of the difference over the norm of the truth; infinite for a NaN."""
    off = float(torch.linalg.vector_norm(found - true))
    size = float(torch.linalg.vector_norm(true))
    if math.isnan(off):
        return math.inf
    return off / size if size else off


def run(
    model: nn.Module,
    given: Sequence[Tensor],
    context: AbstractContextManager[Any] | None = None,
    scale: float = 1.0,
    parameters: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Outputs and gradients in float64, of a fixed random projection of the outputs."""
    given = leaves(given)
    with context or contextlib.nullcontext():
        outputs = [t for t in pytree.tree_leaves(model(*given)) if _floats(t)]
    generator = torch.Generator().manual_seed(5)
    loss = torch.zeros((), dtype=torch.float64)
    for out in outputs:
        weights = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        loss = loss + (out.double() * weights).sum()
    wanted = [x for x in given if x.requires_grad]
    wanted += list(model.parameters()) if parameters is None else list(parameters)
    gradients = torch.autograd.grad(loss * scale, wanted, allow_unused=True)
    found = [o.detach().double() for o in outputs]
    for leaf, gradient in zip(wanted, gradients, strict=True):
        none = torch.zeros_like(leaf) if gradient is None else gradient
        found.append(none.double() / scale)
    return found


def leaves(given: Sequence[Tensor]) -> list[Tensor]:
    """Copies of `given`, the floats of which take gradients."""
    return [x.detach().clone().requires_grad_(x.is_floating_point()) for x in given]


def _floats(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
