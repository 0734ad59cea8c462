"""Faults that numbers show are found in tests, and scaled gradients by each user."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import autoamp
from autoamp.errors import VerificationError
from autoamp.passes.functions import low_weight, low_weight_unscaled
from tests.passes.check.door import KERNELS, passes, scale_edge
from tests.passes.check.numbers import check_same_calls, proved
from tests.says import says

ATEN = torch.ops.aten


class Lavish(torch.autograd.Function):
    """A sine whose backward is right, and which keeps its cosine beside its operand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.cos())
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[1]


class Frugal(torch.autograd.Function):
    """A sine that keeps its operand alone, as torch's does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].cos()


class Careless(Frugal):
    """A sine that keeps a part of its result as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.sin()
        ctx.save_for_backward(x, y[:1].clone())
        return y


def careless(x: Tensor) -> Tensor:
    return Careless.apply(x)


def lavish(x: Tensor) -> Tensor:
    return Lavish.apply(x)


def frugal(x: Tensor) -> Tensor:
    return Frugal.apply(x)


def nowhere(x: Tensor) -> Tensor:
    raise RuntimeError("no kernel")


def nor_here(x: Tensor) -> Tensor:
    raise RuntimeError("no kernel")


def sine(target: Callable[..., Any]) -> fx.GraphModule:
    """A graph of one call on a trained matrix."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.create_node("call_function", target, (x,), name="y")
    graph.output((y,))
    x.meta["val"] = torch.empty(4, 6, device="meta").requires_grad_()
    y.meta["val"] = torch.empty(4, 6, device="meta").requires_grad_()
    return fx.GraphModule(torch.nn.Module(), graph)


def compare(target: Callable[..., Any]) -> None:
    before, after = sine(ATEN.sin.default), sine(target)
    proved(before, after, KERNELS)


def test_a_kernel_that_keeps_no_more_is_accepted() -> None:
    compare(frugal)


@pytest.mark.usefixtures("numbers_may_differ")
@pytest.mark.parametrize(
    ("target", "told"),
    [
        (lavish, ["96 bytes", "0 were"]),
        (careless, ["24 bytes", "0 were"]),
        (nowhere, ["cannot be run"]),
        (ATEN.cos.default, ["off by"]),
        (torch.square, ["off by"]),
    ],
)
def test_a_kernel_is_refused(target: Callable[..., Any], told: list[str]) -> None:
    with pytest.raises(VerificationError) as refused:
        compare(target)
    says(refused, *told)
    assert refused.value.nodes == ("y",)


@pytest.mark.parametrize("new", [nowhere, nor_here])
def test_calls_that_run_nowhere_are_no_proof(new: Callable[..., Any]) -> None:
    for old in (ATEN.sin.default, nowhere):
        if old is not new:
            with pytest.raises(VerificationError):
                check_same_calls(sine(old), sine(new))
    check_same_calls(sine(ATEN.sin.default), sine(torch.sin))


# -- gradients of a converted model ----------------------------------------------------


def net(**options: Any) -> nn.Module:
    layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    return autoamp.convert(layers, do_no_harm=False, strict=True, **options)


def test_a_gradient_that_would_leave_scaled_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def careless(gm: fx.GraphModule, record: Any) -> tuple[fx.GraphModule, Any]:
        scaled, edge = scale_edge(gm, record)
        targets = [n for n in scaled.graph.nodes if n.target is low_weight_unscaled]
        targets[0].target, targets[0].args = low_weight, targets[0].args[:2]
        return scaled, edge

    monkeypatch.setattr(passes, "scale_edge", careless)
    with pytest.raises(VerificationError) as raised:
        net(precision="fp16")(torch.randn(4, 16))
    says(raised, "scaled")


class Pooled(nn.Module):
    """Returns a norm's result, and reads the result once more before it is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body, self.head = (
            nn.LayerNorm(16),
            nn.Linear(16, 16),
            nn.Linear(16, 4),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.norm(x + self.body(x))
        return hidden, self.head(hidden[torch.arange(len(x)), 0])


def test_a_result_that_is_read_inside_is_in_one_unit() -> None:
    torch.manual_seed(0)
    model, x = Pooled(), torch.randn(3, 5, 16)
    low = autoamp.convert(
        copy.deepcopy(model), precision="fp16", do_no_harm=False, strict=True
    )
    for seen in (0, 1):
        by = torch.randn_like(model(x)[seen])
        exact, found = (
            torch.autograd.grad(
                (m(x)[seen] * by).mean(), [m.norm.weight, m.body.weight]
            )
            for m in (model, low)
        )
        for a, b in zip(exact, found, strict=True):
            assert (a - b).norm() <= 2**-8 * a.norm()  # a scale would be 2**16


def steep_relu(x: Tensor) -> Tensor:
    """The values of `relu`, and twice its gradient."""
    y = torch.relu(x)
    return y + (y - y.detach())


@pytest.mark.usefixtures("numbers_may_differ")
def test_a_kernel_with_another_gradient_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def steep(node: fx.Node) -> Any:
        return steep_relu if node.target is ATEN.relu.default else node.target

    monkeypatch.setattr(passes, "softmax_at", steep)
    with pytest.raises(VerificationError) as raised:
        net(precision="bf16")(torch.randn(4, 16))
    says(raised, "gradient of input 1")
