"""A training is the same to the bit whatever the defaults of the process are."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import autoamp
from tests.small_models import Of

CPU: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
STEPS = 6
BAD = 3
"""The step whose loss overflows."""


class Passing(TorchFunctionMode):
    """Changes nothing."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default(setter: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


def _dtype(value: torch.dtype) -> Callable[[], AbstractContextManager[object]]:
    return lambda: default(torch.set_default_dtype, value, torch.float32)


PROCESSES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "float64": _dtype(torch.float64),
    "bfloat16": _dtype(torch.bfloat16),
    "float16": _dtype(torch.float16),
    # What is made without a device has no memory there.
    "meta": lambda: default(torch.set_default_device, "meta", None),
    "deterministic": lambda: default(torch.use_deterministic_algorithms, True, False),
    "function mode": Passing,
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp16": {"precision": "fp16"},
    "bf16": {"precision": "bf16"},
}


def _attention(m: Any, x: Tensor) -> Tensor:
    x = m.group(m.batch(m.conv(x)).relu()).transpose(1, 2)
    q, k, v = m.qkv(m.layer(x)).chunk(3, -1)
    scores = 0.35 * q @ k.transpose(1, 2)
    mask = torch.ones(*scores.shape[1:], dtype=torch.bool, device="cpu").triu(1)
    return m.out(x + scores.masked_fill(mask, float("-inf")).softmax(-1) @ v)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Of(
        _attention,
        conv=nn.Conv1d(4, 8, 3, padding=1, **CPU),
        batch=nn.BatchNorm1d(8, **CPU),
        group=nn.GroupNorm(2, 8, **CPU),
        layer=nn.LayerNorm(8, **CPU),
        qkv=nn.Linear(8, 24, **CPU),
        out=nn.Linear(8, 2, **CPU),
    )


def _trained(
    precision: str, round_making: AbstractContextManager[object]
) -> tuple[list[float], list[Tensor], object]:
    """The losses, the state and the loss scale's report after a few steps."""
    draws = torch.Generator("cpu").manual_seed(1)
    model = _model()
    with round_making:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        options = PRECISIONS[precision]
        autoamp.convert(model, optimizer, strict=True, do_no_harm=False, **options)
    losses = []
    for step in range(STEPS):
        x = torch.randn(5, 4, 6, generator=draws, **CPU)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if step == BAD:
            loss = loss * torch.full((), torch.inf, **CPU)
        loss.backward()
        optimizer.step()
        assert optimizer.step_was_skipped == (step == BAD)  # type: ignore[attr-defined]
        losses.append(float(loss.detach()))
    return losses, [*model.state_dict().values()], autoamp.report(model).loss_scale


@functools.cache
def _plainly(precision: str) -> tuple[list[float], list[Tensor], object]:
    return _trained(precision, contextlib.nullcontext())


def _equals_plainly(precision: str, found: tuple[Any, list[Tensor], object]) -> None:
    plain = _plainly(precision)
    assert found[0] == plain[0]
    assert found[2] == plain[2]
    assert all(map(torch.equal, found[1], plain[1]))


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_training_under_defaults_of_the_process(precision: str, process: str) -> None:
    _plainly(precision)
    with PROCESSES[process]():
        found = _trained(precision, contextlib.nullcontext())
    _equals_plainly(precision, found)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_model_converted_in_inference_mode_is_trained(precision: str) -> None:
    _equals_plainly(precision, _trained(precision, torch.inference_mode()))
