"""The gradients that torch's attention kernel gives, beside those of autocast.

The kernel's backward reads its result, which is rounded; autocast rounds the scores.
Which of the two is nearer to float64 depends on the scores.
"""

from __future__ import annotations

import statistics

import pytest
import torch
from torch import Tensor

from tests.test_attention import (
    BATCH, HEADS,
    HEADS_FIRST,
    LENGTH,
    WIDTH,
    Attention,
    Way,
    annotated,
    converted,
    exactly,
    min_gpt,
    seen,
    timm,
)

SEEDS = 8
SIZE = HEADS * WIDTH


def ratios(way: Way, sharpness: float) -> tuple[float, float]:
    """Our error over autocast's, in the geometric mean over models and batches.

    Args:
        sharpness: factor of the weights of queries and keys.

    Returns:
        The ratio for the gradients of those weights, and for the bias of the keys.
    """
    of_weights, of_bias = [], []
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        model = Attention(way).eval()
        with torch.no_grad():
            model.project.weight[: 2 * SIZE] *= sharpness
        x = torch.randn(BATCH, LENGTH, SIZE)*SPREAD + torch.randn(BATCH,1,SIZE)*(SPREAD<1)
        true, ours = exactly(model, x), converted(model)
        found = seen(ours, ours, x)
        with torch.autocast("cpu", torch.bfloat16):
            base = seen(model, model, x)
        weights, bias = (
            [_error(each[place], true[place], rows) for each in (found, base)]
            for place, rows in ((2, slice(2 * SIZE)), (3, slice(SIZE, 2 * SIZE)))
        )
        of_weights.append(weights[0] / weights[1])
        of_bias.append(bias[0] / bias[1])
    return statistics.geometric_mean(of_weights), statistics.geometric_mean(of_bias)


def _error(found: Tensor, true: Tensor, rows: slice) -> float:
    return float((found[rows] - true[rows]).norm())

import sys
SPREAD=float(sys.argv[1])
for way in (timm, min_gpt, annotated):
    for s in (.2,1.,4.):
        print(way.__name__, s, ratios(way, s))
