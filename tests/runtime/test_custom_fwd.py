"""Custom Functions under `torch.amp.custom_fwd` run as under autocast, to the bit."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.variables.misc import AutogradFunctionVariable
from torch.utils.checkpoint import checkpoint

import autoamp
from tests.metrics import relative_error
from tests.quick import each_with_one
from tests.says import says
from tests.small_models import BF16 as LOW
from tests.small_models import Of, converted

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
X = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
CPU_FWD = functools.partial(torch.amp.custom_fwd, device_type="cpu")
CPU_BWD = torch.amp.custom_bwd(device_type="cpu")
BODIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda x, w: x @ w.t(),
    "names its dtype": lambda x, w: torch.zeros(16, 64, dtype=x.dtype) + x @ w.t(),
    "follows another": lambda x, w: x.float().to(w.dtype) @ w.t(),
    "fp32 result": lambda x, w: (x @ w.t()).float(),
    "several ops": lambda x, w: torch.softmax(x @ w.t(), -1) * x.exp(),
}


def plainly(function: Any) -> Any:
    """In the place of a decorator."""
    return function


def function(
    forward: Callable[[Tensor, Tensor], Tensor],
    decorator: Callable[..., Any],
    backward_decorator: Callable[..., Any] = CPU_BWD,
) -> Any:
    """A Function of two tensors and a number, and of two results."""

    def called(ctx: Any, x: Tensor, w: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w)
        ctx.factor = factor
        y = forward(x, w) * factor
        return y, y.sum(-1)

    def backward(ctx: Any, y: Tensor, total: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        grad = (y + total[:, None]).to(x.dtype) * ctx.factor
        return grad @ w.to(x.dtype), grad.t() @ x, None

    parts = {"forward": decorator(called), "backward": backward_decorator(backward)}
    static = {name: staticmethod(part) for name, part in parts.items()}
    return type("Product", (torch.autograd.Function,), static)


class Model(nn.Module):
    """A layer, the Function, sums that show how wide its results are, a layer."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def called(self, x: Tensor) -> Any:
        return self.function.apply(x, self.weight, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        y, total = self.called(self.first(x))
        y, total = y + y, total + total
        result: Tensor = self.last(y) + total[:, None]
        return result


def run(model: nn.Module, *, grad: bool = True) -> list[Tensor]:
    """The result of a model, and the gradients of its parameters."""
    with torch.set_grad_enabled(grad):
        result = model(X).float()
    if not grad:
        return [result]
    result.square().mean().backward()
    grads = [p.grad for p in model.parameters()]
    assert all(g is not None for g in grads)
    return [result.detach(), *(g for g in grads if g is not None)]


def ours(model: nn.Module, **options: Any) -> list[Tensor]:
    return run(converted(model, strict=False), **options)


def by_autocast(model: nn.Module, **options: Any) -> list[Tensor]:
    # Each use has its own cast, so that both sides sum gradients alike.
    amp = torch.autocast("cpu", dtype=BF16, cache_enabled=False)
    model.forward = amp(model.forward)
    return run(model, **options)


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(map(torch.equal, found, expected)) and len(found) == len(expected)


def reason_of(model: nn.Module) -> str:
    rows = autoamp.report(model).ops
    (reason,) = [r.reason for r in rows if r.op == "autoamp_custom_function"]
    return reason


PRODUCT = function(BODIES["product"], CPU_FWD(cast_inputs=BF16))
PLAIN = function(BODIES["product"], plainly, plainly)

Called = Callable[[Any, Tensor], Any]

CASTS = itertools.product([BF16, FP16, FP32, None], BODIES)


def check_no_further_off(
    found: list[Tensor], autocasts: list[Tensor], exact: list[Tensor]
) -> None:
    for mine, its, true in zip(found, autocasts, exact, strict=True):
        assert relative_error(mine, true) <= 1.1 * relative_error(its, true)


@pytest.mark.parametrize(("cast", "grad"), each_with_one(CASTS, [True, False]))
def test_results_and_gradients_are_autocasts(
    cast: tuple[torch.dtype | None, str], grad: bool
) -> None:
    dtype, body = cast
    applied = function(BODIES[body], CPU_FWD(cast_inputs=dtype))
    expected = by_autocast(Model(applied), grad=grad)
    found = run(converted(Model(applied)), grad=grad)
    if dtype in (BF16, FP32) or body == "product":
        assert same(found, expected)
    # After fp16 results autocast goes on in fp16, and autoamp in fp32; an operand that
    # nobody casts is as wide in the body as it is in the model.
    check_no_further_off(found, expected, run(Model(applied), grad=grad))


def within(enabled: bool) -> Called:
    """In a region of the model's own, which goes first."""

    def called(m: Any, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=BF16, enabled=enabled):
            y, total = m.function.apply(x.float(), m.weight, 2.0)
        return y.float(), total.float()

    return called


def of_half_operands(m: Any, x: Tensor) -> Any:
    y, total = m.function.apply(x.bfloat16(), m.weight.bfloat16(), 2.0)
    assert y.dtype == BF16
    return y.float(), total.float()


def checkpointed(m: Any, x: Tensor) -> Any:
    return checkpoint(Model.called, m, x, use_reentrant=False)


def checkpointed_by_reentry(m: Any, x: Tensor) -> Any:
    return checkpoint(Model.called, m, x, use_reentrant=True)


def written_to(m: Any, x: Tensor) -> Any:
    y, total = m.function.apply(x, m.weight, 2.0)
    return y.add_(1), total.mul_(2)


def given_twice(m: Any, x: Tensor) -> Any:
    y, total = m.function.apply(m.weight, m.weight, 2.0)
    return x + y[:16], total[:16]


EXACT = [within(True), within(False), of_half_operands]
CLOSE = [checkpointed, checkpointed_by_reentry, written_to, given_twice]


@pytest.mark.parametrize("called", EXACT + CLOSE, ids=lambda called: called.__name__)
def test_it_is_autocasts_wherever_it_is_called(called: Called) -> None:
    """To the bit, or no further off."""

    def model() -> nn.Module:
        return type("Calls", (Model,), {"called": called})(PRODUCT)

    grad = called is not written_to
    found, expected = ours(model(), grad=grad), by_autocast(model(), grad=grad)
    assert same(found, expected) or called in CLOSE
    check_no_further_off(found, expected, run(model(), grad=grad))


class InNoRegion(Model):
    """A region in code that is left to Python."""

    @torch._dynamo.disable(recursive=False)
    def called(self, x: Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            return self.within(x)

    def within(self, x: Tensor) -> Any:
        return super().called(x)


class Nested(Model):
    def __init__(self, applied: Any) -> None:
        super().__init__(applied)
        self.inner = Of(lambda m, *args: applied.apply(*args))

    def called(self, x: Tensor) -> Any:
        return self.inner(x, self.weight, 2.0)


@pytest.mark.parametrize(
    ("kind", "options"),
    [(InNoRegion, {}), (Nested, {"keep": ["inner"]}), (Nested, {"keep": ["*"]})],
    ids=str,
)
def test_the_users_own_word_goes_first(kind: Any, options: dict[str, Any]) -> None:
    found, plain = (run(converted(kind(f), **options)) for f in (PRODUCT, PLAIN))
    assert same(found, plain)


def test_a_function_that_fails_low_stays_fp32() -> None:
    wide = torch.randn(64, 64)
    applied = function(lambda x, _: x @ wide, CPU_FWD(cast_inputs=BF16))
    with pytest.raises(RuntimeError, match="same dtype"):
        by_autocast(Model(applied))
    model = converted(Model(applied))
    plain = function(lambda x, _: x @ wide, plainly, plainly)
    assert same(run(model), run(converted(Model(plain))))
    says(reason_of(model), "stays fp32")


def test_the_report_says_so_and_questions_can_be_asked() -> None:
    model = converted(Model(PRODUCT))
    found = run(model)
    assert not torch.equal(found[0], run(Model(PRODUCT))[0])
    says(reason_of(model), "autocast", "bf16")
    assert autoamp.compare(Model(PRODUCT), X, **LOW).errors.output > 0
    assert autoamp.explain(Model(PRODUCT), X, **LOW) is not None


def test_the_older_decorator_counts_on_its_own_device_alone() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        old = torch.cuda.amp.custom_fwd(cast_inputs=FP32)
        applied = function(BODIES["product"], old, torch.cuda.amp.custom_bwd)
    found, expected = ours(Model(applied)), by_autocast(Model(applied))
    assert torch.equal(found[0], expected[0])
    check_no_further_off(found, expected, run(Model(applied)))


def test_gradients_in_fp16() -> None:
    applied = function(BODIES["product"], CPU_FWD(cast_inputs=FP16))
    model = converted(Model(applied), precision="fp16", loss_scale=16.0)
    for mine, its in zip(run(model), run(Model(applied)), strict=True):
        assert relative_error(mine, its) < 5e-3


def test_a_function_with_a_setup_context() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        @CPU_FWD(cast_inputs=BF16)
        def forward(x: Tensor, w: Tensor, factor: float) -> tuple[Tensor, Tensor]:
            y = x @ w.t() * factor
            return y, y.sum(-1)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs[:2])

        @staticmethod
        def backward(ctx: Any, y: Tensor, total: Tensor) -> tuple[Any, ...]:
            x, w = ctx.saved_tensors
            grad = (y + total[:, None]).float() * 2
            return grad @ w.float(), grad.t() @ x.float(), None

    for mine, its in zip(
        ours(Model(Product)), by_autocast(Model(Product)), strict=True
    ):
        assert relative_error(mine, its) < 1e-2


def test_dynamo_is_left_as_it_was() -> None:
    before = AutogradFunctionVariable.call_apply
    ours(Model(PRODUCT))
    assert AutogradFunctionVariable.call_apply is before
