"""The gradients of attention, beside those of autocast and of float64.

The backward of torch's kernels reads the result of the attention, which is rounded;
autocast rounds scores and weights.  Ours rounds neither.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import autoamp
from autoamp.passes.functions.attention import (
    BACKWARD,
    LONG,
    Kind,
    attention,
)
from tests.small_models import BF16
from tests.spelled.layers import HEADS, SIZE, WIDTH

OLDER_TORCH = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


def no_units() -> dict[torch.dtype, str]:
    """A CPU that multiplies fp32 alone."""
    return {}


def bf16_units() -> dict[torch.dtype, str]:
    """A CPU that multiplies bf16."""
    return {torch.bfloat16: "amx_bf16"}


@pytest.fixture(params=[no_units, bf16_units])
def units(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without units for bf16, and one with."""
    monkeypatch.setattr("autoamp.compat.cpu_low_precision_units", request.param)


@pytest.mark.usefixtures("units")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("batch", "heads", "queries", "keys", "width"),
    [(2, 3, 5, 7, 16), (3, 6, 130, 130, 64), (1, 17, 300, 40, 128), (1, 1, 1, 1, 8)],
)
@pytest.mark.parametrize("masked", ["", "causal", "added", "by head", "bool", "2d"])
def test_the_fp32_backward(  # noqa: PLR0917
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    width: int,
    masked: str,
    dtype: torch.dtype,
) -> None:
    """Its error against float64 is that of rounding the result of the forward."""
    torch.manual_seed(0)
    one, two = (batch, queries, heads, width), (batch, keys, heads, width)
    given = [torch.randn(s).to(dtype).transpose(1, 2) for s in (one, two, two)]
    masks = {
        "added": (torch.rand(batch, 1, queries, keys) < 0.3).to(dtype) * -1e4,
        "by head": (torch.rand(1, heads, 1, keys) < 0.3).to(dtype) * -1e4,
        "bool": torch.rand(batch, 1, queries, keys) < 0.7,
        "2d": torch.rand(queries, keys) < 0.7,
    }
    mask = masks.get(masked)
    if mask is not None and mask.dtype == torch.bool:
        mask[..., 0] = True
    options = {"attn_mask": mask, "is_causal": masked == "causal", "scale": 0.2}
    grad = torch.randn(one).to(dtype).transpose(1, 2)

    def gradients(call: Callable[..., Tensor], wide: torch.dtype) -> list[Tensor]:
        operands = [t.to(wide).detach().requires_grad_() for t in given]
        added = mask if mask is None or mask.dtype == torch.bool else mask.to(wide)
        result = call(*operands, **(options | {"attn_mask": added}))
        if wide == dtype and call is attention:
            assert result.grad_fn.name() == "_AttentionBackward"
        return list(torch.autograd.grad(result, operands, grad.to(wide)))

    true = gradients(functional.scaled_dot_product_attention, torch.float64)
    ours = gradients(attention, dtype)
    torchs = gradients(functional.scaled_dot_product_attention, dtype)
    for mine, theirs, exact, operand in zip(ours, torchs, true, given, strict=True):
        assert mine.stride() == operand.stride()
        error, base = ((t.double() - exact).norm() for t in (mine, theirs))
        assert error <= max(base, torch.finfo(dtype).eps / 2 * exact.norm())


DATA: dict[str, Callable[[list[Tensor]], None]] = {
    "plain": lambda given: None,
    "large scores": lambda given: (given[0].mul_(60), given[1].mul_(60)),  # type: ignore[dict-item]
    "keys alike": lambda given: given[1].mul_(0.2).add_(5),  # type: ignore[dict-item]
    "values alike": lambda given: given[2].mul_(0.05).add_(30),  # type: ignore[dict-item]
    "one large value": lambda given: given[2][:, :, 3].mul_(1000),  # type: ignore[dict-item]
    "small": lambda given: [t.mul_(1e-4) for t in given],  # type: ignore[dict-item]
}


@pytest.mark.usefixtures("units")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", DATA)
def test_it_is_as_true_as_torchs_whatever_the_data(name: str, causal: bool) -> None:
    torch.manual_seed(0)
    given = list(torch.randn(4, 2, 3, 96, 32).unbind())
    DATA[name](given)
    low = [t.bfloat16() for t in given]

    def gradients(call: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        operands = [t.to(dtype).requires_grad_() for t in low[:3]]
        result = call(*operands, is_causal=causal)
        return list(torch.autograd.grad(result, operands, low[3].to(dtype)))

    true = gradients(functional.scaled_dot_product_attention, torch.float64)
    ours = gradients(attention, torch.bfloat16)
    torchs = gradients(functional.scaled_dot_product_attention, torch.bfloat16)
    for mine, theirs, exact in zip(ours, torchs, true, strict=True):
        error, base = ((t.double() - exact).norm() for t in (mine, theirs))
        assert error <= base * 1.02


@pytest.mark.usefixtures("units")
def test_parts_of_an_attention_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads and queries that are taken apart give what they give together."""
    given = [torch.randn(2, 4, 160, 16).bfloat16() for _ in range(4)]
    kinds, numbers = [Kind.SCALE, Kind.CAUSAL], [0.25, -torch.inf]
    whole = BACKWARD(given[3], *given[:3], [], kinds, numbers, False)
    monkeypatch.setattr(FILE, "_ROOM", 2**13)
    apart = BACKWARD(given[3], *given[:3], [], kinds, numbers, False)
    for one, other in zip(whole, apart, strict=True):
        assert (one.double() - other.double()).norm() <= 2**-8 * one.norm()


FILE = importlib.import_module("autoamp.passes.functions.attention")


def test_only_where_it_is_faster() -> None:
    def name(length: int, **options: Any) -> str:
        q = torch.randn(1, 2, length, 8, dtype=torch.bfloat16, requires_grad=True)
        result = attention(
            q, q, q, **options
        )  # held: torch 2.11 frees the node with it
        return result.grad_fn.name()

    assert name(LONG - 1) == "_AttentionBackward"
    assert name(LONG) == "ScaledDotProductFlashAttentionForCpuBackward0"
    assert name(8, dropout_p=0.5) != "_AttentionBackward"
    bias = torch.zeros(8, 8, dtype=torch.bfloat16, requires_grad=True)
    assert name(8, attn_mask=bias) != "_AttentionBackward"


@pytest.mark.parametrize("masked", [False, True])
def test_it_can_be_differentiated_twice(masked: bool) -> None:
    torch.manual_seed(0)
    operands = [torch.randn(2, 2, 6, 8, requires_grad=True) for _ in range(3)]
    mask = torch.ones(6, 6, dtype=torch.bool).tril() if masked else None

    def slopes(call: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        given = [t.detach().to(dtype).requires_grad_() for t in operands]
        once = torch.autograd.grad(
            call(*given, attn_mask=mask).square().sum(), given, create_graph=True
        )
        return list(torch.autograd.grad(sum(g.square().sum() for g in once), given))

    def chain(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> Tensor:
        scores = q @ k.mT / 8**0.5
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        return scores.softmax(-1) @ v

    true = slopes(chain, torch.float64)
    for found, exact in zip(slopes(attention, torch.bfloat16), true, strict=True):
        assert (found.double() - exact).norm() <= 2**-5 * exact.norm()


def test_a_models_own_attention_has_it_unless_it_is_left_out() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            parts = self.project(x).chunk(3, -1)
            heads = (t.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for t in parts)
            return functional.scaled_dot_product_attention(*heads)

    def backwards(model: nn.Module) -> int:
        model(torch.randn(2, 8, WIDTH))  # the capture, which checks gradients itself
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
            model(torch.randn(2, 8, WIDTH)).sum().backward()
        return sum("autoamp::attention_backward" in e.name for e in found.events())

    model = Own()

    def converted(**options: Any) -> nn.Module:
        twin: nn.Module = autoamp.convert(copy.deepcopy(model), **BF16, **options)
        return twin

    assert backwards(converted()) == 1
    assert backwards(converted(fuse={"attention_backward": False})) == 0
    assert backwards(converted(fuse=False)) == 0


@pytest.mark.parametrize("empty", range(4))
def test_operands_without_numbers(empty: int) -> None:
    """The kernel for CPUs ends the process where there are no heads (torch 2.13)."""
    if empty == 1 and OLDER_TORCH:
        pytest.skip("before torch 2.13 torch's own attention ends the process there")
    shape = [2, 3, 4, 8]
    shape[empty] = 0
    q, k, v = (torch.ones(shape, dtype=torch.bfloat16) for _ in range(3))
    result = attention(q.requires_grad_(), k, v)
    result.sum().backward()
    assert q.grad is not None
    assert q.grad.shape == result.shape == torch.Size(shape)


@pytest.mark.usefixtures("units")
@pytest.mark.parametrize("of_numbers", [False, True])
def test_a_query_that_sees_no_key_has_no_part_in_gradients(of_numbers: bool) -> None:
    """A query that is not a number leaves gradients that are none, as in torch."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 40, 8).to(torch.bfloat16).unbind()
    mask = torch.rand(1, 2, 40, 40) < 0.5
    mask[..., 0] = True
    mask[:, :, 3] = False
    added = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)

    def gradients(q: Tensor, call: Any, wide: torch.dtype) -> tuple[Tensor, ...]:
        given = [t.to(wide).detach().requires_grad_() for t in (q, k, v)]
        result = call(*given, attn_mask=added.to(wide) if of_numbers else mask)
        return torch.autograd.grad(result.sum(), given)

    sdpa = functional.scaled_dot_product_attention
    ours = gradients(q, attention, torch.bfloat16)
    for mine, exact in zip(ours, gradients(q, sdpa, torch.float64), strict=True):
        error = (mine.double() - exact).norm()
        assert error <= torch.finfo(torch.bfloat16).eps * exact.norm()
    assert not ours[0][:, :, 3].any()
    q[:, :, 5] = torch.nan
    nans = [g.isnan().any().item() for g in gradients(q, attention, torch.bfloat16)]
    assert nans == [True, True, True]


def test_an_infinity_stays_where_it_was() -> None:
    q, k, v = torch.randn(3, 1, 1, 4, 8).to(torch.bfloat16).unbind()
    v[..., 0, 3] = torch.inf
    result = attention(q.requires_grad_(), k, v, scale=1.0)
    assert result.isfinite().all(-2).tolist() == [[[c != 3 for c in range(8)]]]


def test_a_checkpoint_gives_each_saved_tensor_once() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.attended, x, use_reentrant=False)

        def attended(self, x: Tensor) -> Tensor:
            q = self.layer(x)[:, None]
            return functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    torch._dynamo.reset()
    torch.manual_seed(0)
    plain, x = Net(), torch.randn(2, 8, 16)
    ours = copy.deepcopy(plain)
    autoamp.convert(ours, precision="bf16", do_no_harm=False, strict=True)
    found = []
    for model in (ours, plain):
        model(x).sum().backward()
        assert model.layer.weight.grad is not None
        found.append(model.layer.weight.grad)
    assert (found[0] - found[1]).norm() < 2**-5 * found[1].norm()
