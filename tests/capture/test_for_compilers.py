"""The form in which a rewritten graph is given to a compiler."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.debugging import aot_eager

import autoamp
from autoamp.rewrite.for_compilers import for_compilers
from autoamp.weights.sentinels import copies_of
from benchmarks.compiled import inductors_count
from tests.small_models import BF16, Of

CAST = torch.ops.aten._to_copy.default
ROWS, CLASSES = 64, 500


def logits_and_loss(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    logits = m.head(x)
    return logits, logits.log_softmax(-1).square().mean()


def classifier() -> nn.Module:
    return Of(logits_and_loss, head=nn.Linear(16, CLASSES))


def graph() -> tuple[fx.GraphModule, list[Tensor]]:
    """A rewritten graph whose fp32 result is read inside, and its inputs."""
    seen: list[tuple[Tensor, ...]] = []

    def kept(gm: fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        def run(*args: Tensor) -> Any:
            seen.append(args)
            return gm(*args)

        return run

    converted = autoamp.convert(classifier(), **BF16, backend=kept)
    converted(torch.randn(ROWS, 16))
    (found,) = autoamp.report(converted).graphs
    return found, [t.detach() for t in seen[0]]


def casts_up(gm: fx.GraphModule) -> list[fx.Node]:
    return [
        node
        for node in gm.graph.find_nodes(op="call_function", target=CAST)
        if node.kwargs["dtype"] == torch.float32
    ]


def test_a_result_that_is_read_inside_has_a_cast_of_its_own_for_inductor() -> None:
    gm, inputs = graph()
    assert len(casts_up(gm)) == 1
    assert for_compilers(gm) is gm
    made = for_compilers(gm, inductor=True)
    assert len(casts_up(gm)) == 1
    assert len(casts_up(made)) == 2
    read, result = casts_up(made)
    (output,) = made.graph.find_nodes(op="output")
    assert output not in read.users
    (numbers,) = result.users
    (use,) = numbers.users
    assert use.args == (read, numbers)
    assert list(use.users) == [output]
    for one, other in zip(seen_of(made, inputs), seen_of(gm, inputs), strict=True):
        assert torch.equal(one, other)


def seen_of(gm: fx.GraphModule, inputs: list[Tensor]) -> list[Tensor]:
    """Results, and gradients to which both the result and its reader contribute."""
    given = [t.clone().requires_grad_(t.dtype == torch.float32) for t in inputs]
    logits, loss = gm(*given)
    (loss + (logits * torch.linspace(-1, 1, CLASSES)).sum()).backward()
    grads = [t.grad for t in given if t.grad is not None]
    assert grads
    return [logits, loss, *grads]


def test_a_result_that_nothing_else_reads_is_left() -> None:
    gm, _ = graph()
    (cast,) = casts_up(gm)
    (output,) = gm.graph.find_nodes(op="output")
    for user in [user for user in cast.users if user is not output]:
        user.replace_input_with(cast, gm.graph.find_nodes(op="placeholder")[0])
    assert len(casts_up(for_compilers(gm, inductor=True))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"loss_scale": 8.0}], ids=["plain", "scaled"])
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


@pytest.mark.thorough(but=["RNN-aot_eager"])
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
def test_inductor_trains_with_a_cpp_wrapper() -> None:
    model = nn.Linear(8, 4)
    compiled = autoamp.convert(copy.deepcopy(model), **BF16, backend="inductor")
    eager = autoamp.convert(copy.deepcopy(model), **BF16)
    x = torch.randn(3, 8)
    with torch._inductor.config.patch(cpp_wrapper=True):
        for each in (compiled, eager):
            each(x).square().sum().backward()
    assert torch.allclose(compiled.weight.grad, eager.weight.grad, rtol=2**-7)


@pytest.mark.slow
def test_inductor_gets_weights_of_convolutions_as_it_lays_them() -> None:
    """A depthwise weight is read either way, and says how the convolution computes."""
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1)
    )
    ours = autoamp.convert(model, **BF16, backend="inductor")
    x = torch.randn(2, 4, 12, 12)
    ours(x).sum().backward()
    laid = {
        name: copy.low.stride()
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
        nn.Conv2d(4, 8, 3), **BF16, backend="inductor", unfused=["channels_last"]
    )
    left(x)
    (weight,) = copies_of(left.weight)
    assert weight.low.stride() == left.weight.stride()
