"""Custom ops run in the precision that their authors have registered for autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.says import says
from tests.small_models import Of, converted

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LIB = torch.library.Library("users_rules", "FRAGMENT")
AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
Body = Callable[..., Tensor]


def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t().to(x.dtype)


def define(name: str, body: Body, *keys: str) -> Any:
    LIB.define(f"{name}(Tensor x, Tensor w) -> Tensor")
    for key in keys or ("CPU", "Meta"):
        LIB.impl(name, body, key)
    return getattr(torch.ops.users_rules, name).default


def registered(
    name: str, dtype: torch.dtype, body: Body, *keys: str, device: str = "cpu"
) -> Any:
    op = define(name, body, *keys)
    torch.library.register_autocast(f"users_rules::{name}", device, dtype, lib=LIB)
    return op


def by_hand(name: str, kernel: Body) -> Any:
    """An op whose autocast kernel is `kernel`, which is given the op first."""
    op = define(name, product)

    def called(_: Any, x: Tensor, w: Tensor) -> Tensor:
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            return kernel(op, x, w)

    LIB.impl(name, called, "AutocastCPU", with_keyset=True)
    return op


@torch.library.custom_op("users_rules::defined", mutates_args=())
def defined(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors
    return grad @ w, grad.t() @ x


defined.register_fake(lambda x, w: x.new_empty(*x.shape[:-1], w.shape[0]))
defined.register_autograd(
    _backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)
defined.register_autocast("cpu", BF16)

FOLLOWED = {
    "custom_op": torch.ops.users_rules.defined.default,
    "define": registered("plain", BF16, product),
    "composite": registered("made", BF16, product, "CompositeImplicitAutograd"),
    "fp32 results": registered("wide", BF16, lambda x, w: product(x, w).float()),
    "whole numbers": registered("top", BF16, lambda x, w: product(x, w).argmax(-1)),
    "by hand": by_hand("cast", lambda op, x, w: op(x.bfloat16(), w.bfloat16())),
    "partly by hand": by_hand("half_cast", lambda op, x, w: op(x.bfloat16(), w)),
    "fp32": registered("high", FP32, product),
    "fp32 by hand": by_hand("hand_high", lambda op, x, w: op(x.float(), w.float())),
}
IN_FP32 = {
    # A kernel that names no dtype.
    "casts its result": by_hand("up", lambda op, x, w: op(x.half(), w.half()).float()),
    "calls twice": by_hand("two", lambda op, x, w: op(x.half(), w) + op(x, w)),
    "calls another op": by_hand("other", lambda op, x, w: x.half() @ w.half().t()),
    # What it names is not what this graph computes in.
    "the other half dtype": registered("other_half", FP16, product),
    "another device": registered("on_gpus", BF16, product, device="cuda"),
}


def Model(op: Body) -> nn.Module:
    """A layer, the op, and a sum that shows how wide the op's result is."""

    def forward(m: Any, x: Tensor) -> Tensor:
        result = op(m.first(x), m.weight)
        return result + result

    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(32, 64))
    return Of(forward, first=nn.Linear(64, 64), weight=weight)


X = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))


def under_autocast(op: Body) -> Tensor:
    with torch.autocast("cpu", dtype=BF16), torch.no_grad():
        result: Tensor = Model(op)(X)
    return result


def row_of(model: nn.Module, op: str) -> Any:
    """The report's row of an op."""
    (row,) = [row for row in autoamp.report(model).ops if row.op == f"{op}.default"]
    return row


def ran(op: Any, x: Tensor = X, **options: Any) -> tuple[Tensor, Any]:
    """The output of a converted model, and the report's row of the op."""
    model = converted(Model(op), **options)
    with torch.no_grad():
        result = model(x)
    return result, row_of(model, str(op.name()))


QUICK = ["custom_op", "fp32 results", "by hand", "fp32 by hand"]


def precision_of(name: str) -> str:
    return "fp32" if name in ("fp32", "fp32 by hand") else "bf16"


@pytest.mark.parametrize("name", FOLLOWED)
def test_results_are_autocasts(name: str) -> None:
    result, row = ran(FOLLOWED[name])
    assert torch.equal(result, under_autocast(FOLLOWED[name]).to(result.dtype))
    assert (row.origin, row.precision) == ("its author", precision_of(name))
    if "by hand" in name:
        says(row.reason, "casts to")


@pytest.mark.usefixtures("bf16_units")
@pytest.mark.parametrize("name", FOLLOWED)
def test_no_price_decides(name: str) -> None:
    _, row = ran(FOLLOWED[name], X[:2], do_no_harm=True)
    assert row.precision == precision_of(name)


@pytest.mark.parametrize("name", IN_FP32)
def test_ops_whose_authors_name_no_dtype_of_ours_stay_fp32(name: str) -> None:
    result, row = ran(IN_FP32[name])
    assert row.precision == "fp32"
    assert result.dtype == FP32
    assert (row.origin == "schema") is (name == "another device")


@pytest.mark.parametrize(
    "option", [{"deny": ["users_rules::plain"]}, {"keep": ["*"]}], ids=["deny", "keep"]
)
def test_the_users_own_word_goes_first(option: dict[str, Any]) -> None:
    _, row = ran(FOLLOWED["define"], **option)
    assert row.precision == "fp32"


def _fill(x: Tensor, w: Tensor) -> None:
    x.fill_(1)


@pytest.mark.usefixtures("bf16_units")
def test_writes_are_not_lost_in_a_cast() -> None:
    LIB.define("fill(Tensor(a!) x, Tensor w) -> ()")
    for key in ("CPU", "Meta"):
        LIB.impl("fill", _fill, key)
    torch.library.register_autocast("users_rules::fill", "cpu", BF16, lib=LIB)

    def call(x: Tensor, w: Tensor) -> Tensor:
        x = x.clone()
        torch.ops.users_rules.fill.default(x, w)
        return x

    model = autoamp.convert(Model(call), precision="bf16", strict=True)
    with torch.no_grad():
        result = model(X)
    assert row_of(model, "users_rules::fill").precision == "fp32"
    assert torch.equal(result, torch.full_like(result, 2))


def test_gradients_are_autocasts() -> None:
    op = FOLLOWED["custom_op"]
    exact, theirs, ours = Model(op).double(), Model(op), converted(Model(op))
    exact(X.double()).square().sum().backward()
    with torch.autocast("cpu", dtype=BF16):
        theirs(X).float().square().sum().backward()
    ours(X).square().sum().backward()
    found = (each.parameters() for each in (exact, theirs, ours))
    for true, its, mine in zip(*found, strict=True):
        off = [(p.grad.double() - true.grad).norm() for p in (mine, its)]
        assert off[0] <= 1.1 * off[1]


@pytest.mark.parametrize("name", ["custom_op", "define"])
def test_exported_programs_follow_too(name: str) -> None:
    op = FOLLOWED[name]
    program = torch.export.export(Model(op), (X,))
    graph = autoamp.rewrite(program, (X,), precision="bf16", do_no_harm=False)
    with torch.no_grad():
        assert torch.equal(graph(X), under_autocast(op).float())


class Silu(torch.autograd.Function):
    """Computes what torch's SiLU does."""

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


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, None, "undecorated"], ids=str)
def test_no_kernel_overrides_custom_fwd(dtype: Any) -> None:
    """Without it, a Function that computes a SiLU runs as the kernel of one."""
    function: Any = type("Function", (Silu,), {})
    if dtype != "undecorated":
        wrap = torch.amp.custom_fwd(device_type="cpu", cast_inputs=dtype)
        function.forward = staticmethod(wrap(Silu.forward))
    model = Of(
        lambda m, x: m.last(function.apply(m.first(x))),
        first=nn.Linear(64, 64),
        last=nn.Linear(64, 64),
    )
    converted(model)(X).sum().backward()
    rows = autoamp.report(model).ops
    if dtype == "undecorated":
        assert "silu" in [row.kernel for row in rows]
    else:
        assert {row.kernel for row in rows} == {""}
        assert rows[1].op == "autoamp_custom_function"
        assert "custom_fwd" in rows[1].reason
