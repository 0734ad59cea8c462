"""Custom ops run in the precision that their authors have registered for autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LIB = torch.library.Library("users_rules", "FRAGMENT")
AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


def in_fp32(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w.t().to(x.dtype)).float()


def largest(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w.t()).argmax(-1)


def define(name: str, body: Callable[..., Tensor], *keys: str) -> Any:
    LIB.define(f"{name}(Tensor x, Tensor w) -> Tensor")
    for key in keys or ("CPU", "Meta"):
        LIB.impl(name, body, key)
    return getattr(torch.ops.users_rules, name).default


def registered(name: str, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    op = define(name, *args, **kwargs)
    torch.library.register_autocast(f"users_rules::{name}", "cpu", dtype, lib=LIB)
    return op


def by_hand(name: str, kernel: Callable[..., Tensor]) -> Any:
    """An op whose autocast kernel is `kernel`, which is given the op first."""
    op = define(name, lambda x, w: x @ w.t().to(x.dtype))

    def called(_: Any, x: Tensor, w: Tensor) -> Tensor:
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            return kernel(op, x, w)

    LIB.impl(name, called, "AutocastCPU", with_keyset=True)
    return op


@torch.library.custom_op("users_rules::defined", mutates_args=())
def defined(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


@defined.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], w.shape[0])


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors
    return grad @ w, grad.t() @ x


defined.register_autograd(_backward, setup_context=_save)
defined.register_autocast("cpu", BF16)

FOLLOWED = {
    "custom_op": torch.ops.users_rules.defined.default,
    "define": registered("plain", BF16, product),
    "composite": registered("made", BF16, product, "CompositeImplicitAutograd"),
    "fp32 results": registered("wide", BF16, in_fp32),
    "whole numbers": registered("largest", BF16, largest),
    "by hand": by_hand("cast", lambda op, x, w: op(x.bfloat16(), w.bfloat16())),
    "partly by hand": by_hand("half_cast", lambda op, x, w: op(x.bfloat16(), w)),
    "fp32": registered("high", FP32, product),
    "fp32 by hand": by_hand("hand_high", lambda op, x, w: op(x.float(), w.float())),
}
HIGH = {FOLLOWED["fp32"], FOLLOWED["fp32 by hand"]}
UNREADABLE = {
    "casts its result": by_hand("up", lambda op, x, w: op(x.half(), w.half()).float()),
    "calls twice": by_hand("two", lambda op, x, w: op(x.half(), w) + op(x, w)),
    "calls another op": by_hand("other", lambda op, x, w: x.half() @ w.half().t()),
}


class Model(nn.Module):
    """A layer, the op, and a sum that shows how wide the op's result is."""

    def __init__(self, op: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.op = op
        self.first = nn.Linear(64, 64)
        self.weight = nn.Parameter(torch.randn(32, 64))

    def forward(self, x: Tensor) -> Tensor:
        result = self.op(self.first(x), self.weight)
        return result + result


def under_autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=BF16), torch.no_grad():
        result: Tensor = model(x)
    return result


def row_of(model: nn.Module, op: str) -> Any:
    """The report's row of an op."""
    rows = autoamp.report(model).ops
    (row,) = [row for row in rows if row.op == f"{op}.default"]
    return row


def converted(op: Any, x: Tensor, **options: Any) -> tuple[Tensor, Any]:
    """The output of a converted model, and the report's row of the op."""
    options = {"precision": "bf16", "strict": True, "do_no_harm": False, **options}
    model = autoamp.convert(Model(op), **options)
    with torch.no_grad():
        result = model(x)
    return result, row_of(model, str(op.name()))


X = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))


QUICK = [
    *("custom_op", "composite", "fp32 results"),
    *("by hand", "partly by hand", "fp32 by hand"),
]


@pytest.mark.thorough(but=QUICK)
@pytest.mark.parametrize("name", FOLLOWED)
def test_results_are_autocasts(name: str) -> None:
    op = FOLLOWED[name]
    expected = under_autocast(Model(op), X)
    result, row = converted(op, X)
    assert torch.equal(result, expected.to(result.dtype))
    assert row.origin == "its author"
    assert row.precision == ("fp32" if op in HIGH else "bf16")


@pytest.mark.thorough(but=QUICK)
@pytest.mark.usefixtures("bf16_units")
@pytest.mark.parametrize("name", FOLLOWED)
def test_no_price_decides(name: str) -> None:
    _, row = converted(FOLLOWED[name], X[:2], do_no_harm=True)
    assert row.precision == ("fp32" if FOLLOWED[name] in HIGH else "bf16")


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_kernel_that_names_no_dtype_leaves_the_op_in_fp32(name: str) -> None:
    result, row = converted(UNREADABLE[name], X)
    assert row.precision == "fp32"
    assert "does not tell its dtypes" in row.reason
    assert result.dtype == FP32


def test_the_other_half_dtype_leaves_the_op_in_fp32() -> None:
    _, row = converted(registered("other_half", FP16, product), X)
    assert row.precision == "fp32"
    assert "registered fp16 for autocast, and this graph computes in bf16" in row.reason


def test_another_device_says_nothing() -> None:
    op = define("on_gpus", product)
    torch.library.register_autocast("users_rules::on_gpus", "cuda", BF16, lib=LIB)
    _, row = converted(op, X)
    assert row.precision == "fp32"
    assert row.origin == "schema"


@pytest.mark.usefixtures("bf16_units")
def test_writes_are_not_lost_in_a_cast() -> None:
    LIB.define("fill(Tensor(a!) x, Tensor w) -> ()")
    for key in ("CPU", "Meta"):
        LIB.impl("fill", lambda x, w: _fill(x), key)
    torch.library.register_autocast("users_rules::fill", "cpu", BF16, lib=LIB)
    op = torch.ops.users_rules.fill.default

    def call(x: Tensor, w: Tensor) -> Tensor:
        x = x.clone()
        op(x, w)
        return x

    model = autoamp.convert(Model(call), precision="bf16", strict=True)
    with torch.no_grad():
        result = model(X)
    row = row_of(model, "users_rules::fill")
    assert row.precision == "fp32"
    assert torch.equal(result, torch.full_like(result, 2))


def _fill(x: Tensor) -> None:
    x.fill_(1)


@pytest.mark.parametrize(
    "option", [{"deny": ["users_rules::plain"]}, {"keep": ["*"]}], ids=["deny", "keep"]
)
def test_the_users_own_word_goes_first(option: dict[str, Any]) -> None:
    _, row = converted(FOLLOWED["define"], X, **option)
    assert row.precision == "fp32"


def test_gradients_are_autocasts() -> None:
    op = FOLLOWED["custom_op"]
    model, other = Model(op), autoamp.convert(Model(op), precision="bf16", strict=True)
    with torch.autocast("cpu", dtype=BF16):
        model(X).float().square().sum().backward()
    other(X).square().sum().backward()
    for mine, its in zip(other.parameters(), model.parameters(), strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        exact = _exact_gradient(op, mine.shape)
        assert _error(mine.grad, exact) <= 1.1 * _error(its.grad, exact)


def _exact_gradient(op: Any, shape: torch.Size) -> Tensor:
    model = Model(op).double()
    model(X.double()).square().sum().backward()
    (found,) = [p.grad for p in model.parameters() if p.shape == shape]
    assert found is not None
    return found


def _error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("name", ["custom_op", "define"])
def test_exported_programs_follow_too(name: str) -> None:
    model = Model(FOLLOWED[name])
    program = torch.export.export(model, (X,))
    graph = autoamp.rewrite(program, (X,), precision="bf16", do_no_harm=False)
    with torch.no_grad():
        result = graph(X)
    assert torch.equal(result, under_autocast(model, X).float())


def silu(dtype: torch.dtype | None, *, decorated: bool = True) -> Any:
    """A Function that computes what torch's SiLU does."""

    class Silu(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * torch.sigmoid(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            s = torch.sigmoid(x)
            result: Tensor = grad * (s * (1 + x * (1 - s)))
            return result

    if decorated:
        wrapped = torch.amp.custom_fwd(
            Silu.forward, device_type="cpu", cast_inputs=dtype
        )
        Silu.forward = staticmethod(wrapped)  # type: ignore[method-assign]
    return Silu


def activated(function: Any) -> nn.Module:
    class Activated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.last(function.apply(self.first(x)))
            return result

    return Activated()


@pytest.mark.thorough(but=["torch.float32", "torch.float16", "None"])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, None], ids=str)
def test_no_kernel_overrides_custom_fwd(dtype: torch.dtype | None) -> None:
    model = activated(silu(dtype))
    autoamp.convert(model, precision="bf16", do_no_harm=False, strict=True)
    model(X).sum().backward()
    rows = autoamp.report(model).ops
    assert {row.kernel for row in rows} == {""}
    assert rows[1].op == "autograd_function_apply"
    assert "under torch.amp.custom_fwd" in rows[1].reason


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_a_function_without_custom_fwd_is_still_a_kernel() -> None:
    model = activated(silu(None, decorated=False))
    autoamp.convert(model, precision="bf16", do_no_harm=False, strict=True)
    model(X).sum().backward()
    assert "silu" in [row.kernel for row in autoamp.report(model).ops]
