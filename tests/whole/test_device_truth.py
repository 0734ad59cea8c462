"""No placement is less true than the autocast of the device that it is for.

The placements for GPUs are run on this CPU, beside autocast's lists for GPUs
(`reference_autocast.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import autoamp
from benchmarks.errors import Step, output_and_grad_errors, scaled_step
from tests.against_autocast import DEVICES, ratios
from tests.listed_ops import (
    BLOCKS,
    OF_BOTH,
    OF_CPU,
    OF_CUDA,
    ROWS,
    WIDTH,
    WITHOUT_SAMPLE,
    Call,
)
from tests.models import CASES, Case
from tests.planned import planned_for
from tests.quick import one_in
from tests.reference_autocast import LISTS, autocast_of
from tests.small_models import Of
from tests.truth import MARGIN, SCALES

LOW = (torch.bfloat16, torch.float16)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.* is deprecated in favor of:UserWarning"),
]


def block(call: Call) -> nn.Module:
    """Two linear layers, the call, and calls that show how its result was rounded."""

    def forward(m: Any, x: Tensor) -> list[Tensor]:
        h = call(m.left(x), m.right(x))
        return [h.sigmoid() - h / 4, F.gelu(h) - F.relu(h), h - h.mean()]

    return Of(forward, left=nn.Linear(WIDTH, WIDTH), right=nn.Linear(WIDTH, WIDTH))


def draws(seed: int) -> Sequence[Tensor]:
    return [torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))]


FOUND = ("layer_norm", "softmax.int", "adaptive_avg_pool3d", "trace")
"""Ops that were once low although autocast has them in fp32, and a pad is sampled."""


# The rules of both dtypes are on one list, so that CI runs one of them.
@pytest.mark.parametrize(
    "low", [LOW[0], pytest.param(LOW[1], marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize(
    ("device", "name"),
    [
        # The a100 has the rules of the h100.
        *one_in(2, [("h100", name) for name in OF_BOTH]),
        *one_in(2, [("cpu", name) for name in OF_BOTH], first=1),
        *one_in(3, [("h100", name) for name in OF_CUDA], lambda p: p[1] in FOUND),
        *one_in(3, [("cpu", name) for name in OF_CPU], lambda p: p[1] in FOUND),
    ],
)
def test_what_follows_a_listed_op_is_as_true(
    device: str, name: str, low: torch.dtype
) -> None:
    """CI has each op that both devices list on one of them, and every third other.

    Ops that are written alike lie side by side: transforms, samplings, decompositions.
    That no op of a list is low, `test_ceiling_of_devices.py` asks without numbers.
    """
    call = BLOCKS[DEVICES[device]][name]
    assert max(ratios(block(call), draws, device, low)) <= MARGIN


@pytest.mark.parametrize("device", BLOCKS)
def test_each_listed_op_has_a_sample_or_a_reason(device: str) -> None:
    products = LISTS[device]["lower_precision_fp"]
    listed = {n for names in LISTS[device].values() for n in names} - {*products}
    assert listed == BLOCKS[device].keys() | WITHOUT_SAMPLE[device].keys()
    assert not BLOCKS[device].keys() & WITHOUT_SAMPLE[device].keys()


@pytest.mark.parametrize("device", BLOCKS)
def test_each_sample_calls_its_op(device: str) -> None:
    for name, call in BLOCKS[device].items():
        with torch.autograd.profiler.profile() as seen:
            call(*draws(0), *draws(1))
        assert f"aten::{name.partition('.')[0]}" in {
            event.name for event in seen.function_events
        }


# -- whole models ----------------------------------------------------------------------


IN_CI = ("mlp", "unet", "bert")
"""A model each with products alone, with group norms, and with norms that follow sums:
all models take seven minutes, and `test_ceiling_of_devices.py` looks at more in CI."""


def in_float64(batch: Any) -> Any:
    return pytree.tree_map_only(
        Tensor, lambda t: t.double() if t.is_floating_point() else t, batch
    )


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("device", ["a100", "h100"])
@pytest.mark.parametrize(
    "case",
    # CPUs have no low FFT, which autocast leaves low on a GPU.
    [
        pytest.param(c, id=c.name, marks=() if c.name in IN_CI else pytest.mark.slow)
        for c in CASES
        if c.name != "fourier"
    ],
)
def test_models_are_as_true(case: Case, device: str, low: torch.dtype) -> None:
    options: dict[str, Any] = {"precision": low, "do_no_harm": False, "strict": True}
    if low is torch.float16:
        options["loss_scale"] = SCALES[low]
    batches = [case.inputs(s) for s in range(4)]
    ways: list[list[Step]] = []
    with planned_for(device):
        ours = autoamp.convert(case.model(), **options)
        ways.append(steps(ours, case, batches, 1.0, nullcontext))
    region = partial(autocast_of, "cuda", low)
    ways.append(steps(case.model(), case, batches, SCALES[low], region))
    ways.append(steps(case.model(), case, batches, 1.0, nullcontext))
    wide = [in_float64(batch) for batch in batches]
    truth = steps(case.model().double(), case, wide, 1.0, nullcontext)
    found = [output_and_grad_errors(way, truth) for way in ways]
    for mine, autocasts, single in zip(*found, strict=True):
        assert mine <= MARGIN * max(autocasts, single)


def steps(
    model: nn.Module,
    case: Case,
    batches: Sequence[Any],
    scale: float,
    context: Callable[[], AbstractContextManager[Any]],
) -> list[Step]:
    """A training step of each batch, from the same weights and buffers."""
    found, start = [], case.model().state_dict()
    for seed, batch in enumerate(batches):
        model.load_state_dict(copy.deepcopy(start))
        found.append(
            scaled_step(model, case.loss, batch, scale, context=context, seed=seed)
        )
    return found
