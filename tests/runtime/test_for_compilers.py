"""The form in which a rewritten graph is given to a compiler."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager

import autoamp
from autoamp.training.sentinels import copies_of
from benchmarks.compiled import inductors_count
from tests.small_models import BF16, Of

ROWS, CLASSES = 64, 500


def logits_and_loss(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    logits = m.head(x)
    return logits, logits.log_softmax(-1).square().mean()


def classifier() -> nn.Module:
    return Of(logits_and_loss, head=nn.Linear(16, CLASSES))


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"loss_scale": 8.0}, marks=pytest.mark.slow)],
    ids=["plain", "scaled"],
)
def test_the_kernels_of_the_loss_read_16_bits(options: dict[str, float]) -> None:
    """Beside autocast the result is written in fp32, and its gradient read."""
    x = torch.randn(ROWS, 16)

    def count(model: nn.Module, *, autocast: bool) -> int:
        with inductors_count() as found:
            with torch.autocast("cpu", torch.bfloat16, autocast):
                _, loss = model(x)
            loss.backward()
        return found["bytes"]

    ours = autoamp.convert(classifier(), **{**BF16, **options}, backend="inductor")
    theirs = torch.compile(classifier())
    logits = ROWS * CLASSES
    most = count(theirs, autocast=True) + 6 * logits + 2 * logits
    assert count(ours, autocast=False) <= 1.01 * most


@pytest.mark.parametrize(
    "backend", [aot_eager, pytest.param("inductor", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_left_out_of_graphs_for_compilers(
    kind: type[nn.RNNBase], backend: Any
) -> None:
    def through(m: nn.Module, x: Tensor) -> Tensor:
        result: Tensor = m.head(m.steps(x)[0])
        return result

    model = Of(through, steps=kind(8, 8), head=nn.Linear(8, 4))
    ours = autoamp.convert(copy.deepcopy(model), **BF16, backend=backend)
    x = torch.randn(5, 2, 8)
    result = ours(x)
    result.sum().backward()
    assert (result - model(x)).norm() <= 2**-6 * result.norm()
    assert ours.steps.weight_hh_l0.grad is not None
    report = autoamp.report(ours)
    assert [row.op for row in report.ops if row.is_low] == ["aten::linear.default"]
    assert any("rnn.py" in place for place, _ in report.skipped)


@pytest.mark.slow
def test_inductor_gets_weights_of_convolutions_as_it_lays_them() -> None:
    """A depthwise weight is read either way, and says how the convolution computes."""
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1)
    )
    ours = autoamp.convert(model, **BF16, backend="inductor")
    x = torch.randn(2, 4, 12, 12)
    ours(x).sum().backward()
    ours(x)  # a second call before a step, from which on copies are kept
    laid = {
        name: copy.kept.stride()
        for name, p in model.named_parameters()
        for copy in copies_of(p)
    }
    assert laid["0.weight"] == (36, 1, 12, 4)
    assert laid["1.weight"] == (9, 1, 3, 1)
    assert laid["0.bias"] == (1,)
    for p in model.parameters():
        assert p.grad is not None
        assert p.grad.stride() == p.stride()
    left = autoamp.convert(
        nn.Conv2d(4, 8, 3), **BF16, backend="inductor", fuse={"channels_last": False}
    )
    for _ in range(2):
        left(x)
    (weight,) = copies_of(left.weight)
    assert weight.kept.stride() == left.weight.stride()
