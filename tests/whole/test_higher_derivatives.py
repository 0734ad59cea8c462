"""Second and third derivatives of a converted model, beside torch.autocast's.

The truth is the model in float64.  The error of the gradient of a gradient penalty, as
a root mean square over eight seeds, may be 1.1 times autocast's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import autoamp
from tests.logs import warned
from tests.quick import each_with_one
from tests.says import says
from tests.truth import MARGIN

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated")

Function: Any = torch.autograd.Function  # its `apply` has no types
SEEDS = range(8)
WIDTH = 64
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class SavesInput(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * 3 * x * x


class SavesResult(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = torch.tanh(x)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (result,) = ctx.saved_tensors
        return grad * (1 - result * result)


class SavesBetween(Function):
    """The cosine is a constant of the second derivative, as in torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.cos(), x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        cosine, x = ctx.saved_tensors
        return grad * (cosine + 0.1 * x)


class KeepsOnContext(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.x, ctx.factor, ctx.apart = x, factor, x.detach()
        ctx.result = x.exp()
        return ctx.result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * (ctx.result + ctx.factor * ctx.x + ctx.apart), None


class SetsUp(Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, result = ctx.saved_tensors
        return grad * (x.cos() + 0.1 * result)


class Several(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        mask = (x > 0).to(x.dtype)
        ctx.mark_non_differentiable(mask)
        return x * weight, x.sin(), mask

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Any, _: Any) -> Any:
        x, weight = ctx.saved_tensors
        to_x = first * weight
        if second is not None:
            to_x = to_x + second * x.cos()
        return to_x, first * x if ctx.needs_input_grad[1] else None


class WritesInput(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x.mul_(2).sin_())
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (result,) = ctx.saved_tensors
        return 2 * grad * (1 - result * result)


class UnderAutocast(Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * 3 * x * x


class Nested(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.exp()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * SavesBetween.apply(ctx.saved_tensors[0])


class AsksForGradMode(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * _slope(ctx.saved_tensors[0])


def _slope(x: Tensor) -> Tensor:
    return x.cos() + 0.2 * x if torch.is_grad_enabled() else x.cos()


class HoldsConstant(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            factor = 3 * x
        return grad * factor * x


class Once(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * grad * x


Part = Callable[["Net", Tensor], Tensor]


def hooked(op: Callable[[Tensor], Tensor], hook: Callable[[Tensor], Any]) -> Part:
    """`op` with a hook on its result, which is registered after a first use."""

    def part(net: Net, x: Tensor) -> Tensor:
        value = op(x)
        used = net.middle(value)
        if value.requires_grad:
            value.register_hook(hook)
        return used

    return part


def untraced_hook(grad: Tensor) -> Tensor:
    print(end="")  # the graph breaks at the registration
    return grad * 2


def checkpointed(net: Net, x: Tensor) -> Tensor:
    region = lambda value: SavesResult.apply(net.middle(value)).sigmoid()  # noqa: E731
    return torch.utils.checkpoint.checkpoint(region, x, use_reentrant=False)  # type: ignore[no-any-return]


PARTS: dict[str, Part] = {
    "saved input": lambda _, x: SavesInput.apply(x),
    "saved result": lambda _, x: SavesResult.apply(x),
    "saved between": lambda _, x: SavesBetween.apply(x),
    "context": lambda _, x: KeepsOnContext.apply(x, 0.7),
    "setup_context": lambda _, x: SetsUp.apply(x),
    "several": lambda net, x: sum(Several.apply(x, net.weight)),
    "one of several": lambda net, x: Several.apply(x, net.weight)[0],
    "needs one": lambda net, x: sum(Several.apply(x, net.weight.detach())[:2]),
    "dirty": lambda _, x: WritesInput.apply(x.clone()),
    "custom_fwd": lambda _, x: UnderAutocast.apply(x),
    "nested": lambda _, x: Nested.apply(x),
    "asks": lambda _, x: AsksForGradMode.apply(x),
    "no_grad": lambda _, x: HoldsConstant.apply(x),
    "twice": lambda _, x: SavesInput.apply(SavesResult.apply(SavesInput.apply(x))),
    "hook on tanh": hooked(torch.tanh, lambda grad: grad * 2),
    "hook on a product": hooked(lambda x: x @ x.T @ x / WIDTH, lambda grad: grad * 2),
    "hook that gives none": hooked(torch.sigmoid, lambda _: None),
    "hook that cuts": hooked(torch.sigmoid, lambda grad: grad.clamp(-0.02, 0.02)),
    "untraced hook": hooked(torch.tanh, untraced_hook),
    "checkpoint": checkpointed,
}
LEFT_TO_PYTHON = {
    "nested": "Nested",
    "asks": "AsksForGradMode",
    "no_grad": "HoldsConstant",
}


class Runs(nn.Module):
    def __init__(self, part: Part) -> None:
        super().__init__()
        self.run = part

    def forward(self, net: Net, x: Tensor) -> Tensor:
        return self.run(net, x)


class Net(nn.Module):
    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = Runs(part)
        self.first = nn.Linear(8, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        made = self.part(self, torch.tanh(self.first(x)))
        return self.last(torch.tanh(self.middle(made)))  # type: ignore[no-any-return]


def derivatives(
    net: nn.Module, x: Tensor, low: torch.dtype | None = None
) -> list[Tensor]:
    """The gradients of the parameters after two and after three differentiations."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", low, enabled=low is not None):
        energy = net(x).sum()
    leaves = [*net.parameters()]
    found = []
    for _ in range(2):
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        energy = slope.square().sum()
        given: Any = {"retain_graph": True, "allow_unused": True}
        grads = torch.autograd.grad(energy, leaves, **given)
        some = [g.detach().double().flatten() for g in grads if g is not None]
        found.append(torch.cat(some))
    return found


def error(found: list[Tensor], truth: list[Tensor]) -> Tensor:
    """The relative errors of both derivatives."""
    pairs = zip(found, truth, strict=True)
    return torch.stack([(a - b).norm() / b.norm() for a, b in pairs])


def converted(net: nn.Module, precision: str) -> Any:
    options: Any = {"precision": precision, "do_no_harm": False}
    if precision == "fp16":
        options["loss_scale"] = 256.0
    return autoamp.convert(copy.deepcopy(net), **options)


@pytest.mark.parametrize(("name", "precision"), each_with_one(PARTS, ["bf16", "fp16"]))
def test_no_derivative_is_further_from_the_truth_than_autocasts(
    name: str, precision: str, caplog: pytest.LogCaptureFixture
) -> None:
    """CI has each part in one precision, in turn."""
    net = Net(PARTS[name])
    ours, errors = converted(net, precision), []
    for seed in SEEDS:
        torch.manual_seed(seed)
        weights, x = Net(PARTS[name]).state_dict(), torch.randn(32, 8)
        for each in (net, ours):
            each.load_state_dict(weights)
        truth = derivatives(copy.deepcopy(net).double(), x.double())
        by_autocast = derivatives(net, x, LOW[precision])
        errors.append([error(derivatives(ours, x), truth), error(by_autocast, truth)])
    assert name in LEFT_TO_PYTHON or not warned(caplog)  # all of it is captured
    mine, autocasts = torch.stack([torch.stack(e) for e in errors]).square().mean(0)
    assert (mine.sqrt() <= MARGIN * autocasts.sqrt()).all(), (mine, autocasts)


@pytest.mark.parametrize("name", LEFT_TO_PYTHON)
def test_a_function_that_is_left_to_python_is_named(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    ours = converted(Net(PARTS[name]), "bf16")
    for rows in (4, 5):
        derivatives(ours, torch.randn(rows, 8))
    (line,) = [told for told in warned(caplog) if "derivative" in told]
    says(line, LEFT_TO_PYTHON[name], module="part")
    says(str(autoamp.report(ours)), LEFT_TO_PYTHON[name])


def test_once_differentiable_raises_as_in_torch() -> None:
    net = Net(lambda _, x: Once.apply(x))
    for each in (net, converted(net, "bf16")):
        x = torch.randn(4, 8, requires_grad=True)
        (slope,) = torch.autograd.grad(each(x).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            slope.square().sum().backward()


def test_a_hook_after_the_last_use_is_called_once() -> None:
    called: list[float] = []

    class Hooked(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.part(self, self.first(x)))  # type: ignore[no-any-return]

    ours = converted(Hooked(hooked(torch.tanh, lambda g: g * 3)), "bf16")
    plain = converted(Hooked(lambda net, x: net.middle(torch.tanh(x))), "bf16")
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(4, 8)
    for each in (ours, plain):
        each(x).sum().backward()
        called.append(each.first.weight.grad.norm().item())
    assert called[0] == pytest.approx(3 * called[1], rel=1e-2)


@pytest.mark.parametrize("op", [torch.tanh, torch.exp, torch.sigmoid])
def test_a_returned_value_that_its_op_saves_is_scaled_once(op: Any) -> None:
    class Returns(Net):
        def forward(self, x: Tensor) -> Tensor:
            return op(self.middle(torch.tanh(self.first(x))))  # type: ignore[no-any-return]

    net, x = Returns(PARTS["saved input"]), torch.randn(32, 8)
    ours = converted(net, "fp16")
    truth = derivatives(copy.deepcopy(net).double(), x.double())
    by_autocast = error(derivatives(net, x, torch.float16), truth)
    assert (error(derivatives(ours, x), truth) <= MARGIN * by_autocast).all()
