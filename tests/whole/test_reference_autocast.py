"""The region that stands for a GPU's autocast does what torch's autocast does.

Its mechanism is held to torch's own by the lists of the CPU, where both can run, and
its lists of CUDA by the dispatcher and by torch's own test cases.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from benchmarks.errors import Step
from tests.conformance import autocast_rows
from tests.metrics import training_step
from tests.models import BY_NAME, CASES, Case
from tests.quick import each_with_one
from tests.reference_autocast import LISTS, autocast_of

LOW = (torch.bfloat16, torch.float16)
OLDER_TORCH = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""Than the one that the lists are written for."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    # Of an rms_norm, and of ops that torch's own cases call although they are old.
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
    pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated"),
    pytest.mark.filterwarnings("ignore:Using torch.cross without"),
    pytest.mark.filterwarnings("ignore:An output with one or more elements"),
]


# -- the lists -------------------------------------------------------------------------


@functools.cache
def registered(device: str) -> set[str]:
    """The ops for which this torch has a kernel of autocast on `device`."""
    # In a process of its own: what other tests trace may leave registrations behind.
    code = f"""
import torch
for op in torch._C._dispatch_get_all_op_names():
    if torch._C._dispatch_has_kernel_for_dispatch_key(op, "Autocast{device.upper()}"):
        print(op)
"""
    asked = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    return {line.removeprefix("aten::") for line in asked.stdout.splitlines()}


@pytest.mark.skipif(OLDER_TORCH, reason="the lists are those of a newer torch")
@pytest.mark.parametrize("device", LISTS)
def test_the_lists_are_what_the_dispatcher_has(device: str) -> None:
    listed = [name for names in LISTS[device].values() for name in names]
    assert len(listed) == len(set(listed))
    # Only CUDA builds register cuDNN's op, for which recurrent layers stand here.
    assert registered(device) - {"_cudnn_rnn"} == set(listed)


# -- the policies ----------------------------------------------------------------------


NO_CPU_KERNEL = {"_thnn_fused_lstm_cell", "_thnn_fused_gru_cell"} | {
    f"cudnn_convolution{kind}" for kind in ("", "_transpose")
}


def rows_of(device: str, low: torch.dtype) -> list[autocast_rows.Row]:
    return list(autocast_rows.rows(device, low, on="cpu"))


@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("device", LISTS)
def test_torchs_own_cases_compute_in_the_dtype_they_name(
    device: str, low: torch.dtype
) -> None:
    wrong: dict[str, Any] = {}
    for row in rows_of(device, low):
        if row.name.rpartition("-")[2] in NO_CPU_KERNEL:
            continue
        try:
            found: Any = computed_in(row)
        except RuntimeError as error:
            found = str(error).partition("\n")[0]
        expected = row.says and {row.says}
        if found != expected and not (row.says is None and "unsafe" in str(found)):
            wrong[row.name] = found
    assert not wrong


def computed_in(row: autocast_rows.Row) -> set[torch.dtype]:
    """The dtypes of what a row gives; fp32 of what has no floats (`eq`)."""
    with torch.no_grad(), autocast_of(row.device, row.low):
        made = row.function(*row.args, **row.kwargs)
    tensors = [t for t in pytree.tree_leaves(made) if isinstance(t, Tensor)]
    floats = {t.dtype for t in tensors if t.is_floating_point()}
    return floats or {torch.float32}


def test_an_op_outside_of_the_region_is_left_alone() -> None:
    x = torch.randn(4, 4)
    with autocast_of("cuda", torch.bfloat16):
        low = x @ x
        assert low.softmax(-1).dtype == torch.float32
        with torch.autocast("cuda", enabled=False):
            assert (x @ x).dtype == torch.float32
    assert (low.dtype, (x @ x).dtype) == (torch.bfloat16, torch.float32)
    assert low.softmax(-1).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cuda")


# -- the mechanism ---------------------------------------------------------------------


def outcome(
    case: Case, context: Callable[[], AbstractContextManager[Any]]
) -> Step | str:
    """A training step, or the type of the error where torch has no kernel."""
    try:
        return training_step(case.model(), case.loss, case.inputs(0), context=context)
    except RuntimeError as error:
        return type(error).__name__


def bits(step: Step | str) -> list[Any]:
    """The bits of outputs, gradients and buffers, so that NaNs are alike too."""
    if isinstance(step, str):
        return [step]
    tensors = pytree.tree_leaves((step.output, step.grads, step.buffers))
    return [
        (t.dtype, t.contiguous().numpy(force=True).tobytes())
        if t.dtype != torch.bfloat16
        else (t.dtype, t.contiguous().view(torch.int16).numpy(force=True).tobytes())
        for t in tensors
        if isinstance(t, Tensor)
    ]


@pytest.mark.parametrize(
    ("case", "low"),
    each_with_one(CASES, LOW),
    ids=lambda each: each.name if isinstance(each, Case) else str(each),
)
def test_the_cpus_lists_give_every_bit_of_torchs_autocast(
    case: Case, low: torch.dtype
) -> None:
    """CI has each model in one dtype, in turn: the lists are the same for both."""
    # Without its cache, which adds the gradients of a weight's uses in low precision.
    theirs = functools.partial(torch.autocast, "cpu", low, cache_enabled=False)
    ours = functools.partial(autocast_of, "cpu", low)
    assert bits(outcome(case, ours)) == bits(outcome(case, theirs))


def test_the_lists_of_another_device_are_seen() -> None:
    case = BY_NAME["unet"]
    theirs = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    ours = functools.partial(autocast_of, "cuda", torch.bfloat16)
    assert bits(outcome(case, ours)) != bits(outcome(case, theirs))
