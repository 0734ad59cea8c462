"""Programs whose meaning is easily lost: writes past the tracer, bits, long sums."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import autoamp
from tests.metrics import relative_error
from tests.small_models import Of
from tests.strategies import capture

WIDTH = 8
CLOSE = 0.02  # rounding of two layers; what is tested here is off by 0.3 and more


class Doubled(torch.autograd.Function):
    """Doubles its operand in place."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        a.mul_(2)
        ctx.mark_dirty(a)
        return a

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def of(function: Callable[..., Any]) -> Of:
    """A model of one function, two linear layers and a batch norm."""
    return Of(
        function,
        fc=nn.Linear(WIDTH, WIDTH),
        other=nn.Linear(WIDTH, WIDTH),
        norm=nn.BatchNorm1d(WIDTH),
    )


def pair(function: Callable[..., Any], precision: str = "bf16") -> tuple[Of, Of]:
    """The model in fp32, and a converted copy."""
    torch.manual_seed(0)
    plain = of(function)
    converted = autoamp.convert(
        copy.deepcopy(plain), precision=precision, do_no_harm=False, strict=True
    )
    return plain, converted


def written_by_detach(mod: Of, x: Tensor) -> Tensor:
    before = functional.linear(x, mod.fc.weight.detach().clone())
    mod.fc.weight.detach().mul_(3.0)
    return mod.fc(x) - before


def written_by_data(mod: Of, x: Tensor) -> Tensor:
    mod.fc.weight.data.mul_(3.0)
    return mod.fc(x)


def activation_written_by_data(mod: Of, x: Tensor) -> Tensor:
    hidden = mod.fc(x)
    hidden.data.mul_(3.0)
    return mod.other(hidden)


def written_by_a_function(mod: Of, x: Tensor) -> Tensor:
    """A sub-graph that is not traced into writes to what it is handed."""
    hidden = mod.fc(x)
    before = mod.other(hidden)
    hidden = hidden.clone()
    doubled = Doubled.apply(hidden)
    return mod.other(doubled) + before + hidden


def bits_of_an_activation(mod: Of, x: Tensor) -> Tensor:
    return mod.other((mod.fc(x).view(torch.int32) & -65536).view(torch.float32))


@pytest.mark.thorough(but=["written_by_detach", "written_by_a_function"])
@pytest.mark.filterwarnings(
    # Dynamo's own, when it captures a custom Function.
    "ignore:.*should not be instantiated:DeprecationWarning"
)
@pytest.mark.parametrize(
    "function",
    [
        written_by_detach,
        written_by_data,
        activation_written_by_data,
        bits_of_an_activation,
        written_by_a_function,
    ],
)
def test_writes_and_bits_mean_what_they_meant(function: Callable[..., Any]) -> None:
    plain, converted = pair(function)
    x = torch.randn(4, WIDTH)
    assert relative_error(converted(x), plain(x)) < CLOSE
    assert torch.equal(converted.fc.weight, plain.fc.weight)


@pytest.mark.parametrize("factor", [1e6, 1000000])
def test_factors_beyond_the_range_are_not_cut_off(factor: float) -> None:
    plain, converted = pair(lambda m, x: m.other(m.fc(x) / factor * factor), "fp16")
    x = torch.randn(4, WIDTH)
    assert relative_error(converted(x), plain(x)) < CLOSE


@pytest.mark.thorough
def test_the_gradient_of_a_piece_of_a_weight_used_often_is_exact() -> None:
    def often(mod: Of, x: Tensor) -> Tensor:
        piece, _ = mod.fc.weight.chunk(2)
        # In bf16, 256 + 1 is 256.
        return torch.stack([functional.linear(x, piece) for _ in range(300)]).sum()

    _, converted = pair(often)
    converted(torch.ones(1, WIDTH)).backward()
    assert converted.fc.weight.grad[0].tolist() == [300.0] * WIDTH


def test_batch_norm_in_a_checkpoint_trains() -> None:
    def region(mod: Of, x: Tensor) -> Tensor:
        hidden = checkpoint(
            lambda a: torch.relu(mod.norm(mod.fc(a))), x, use_reentrant=False
        )
        return mod.other(hidden)

    models = pair(region)
    x = torch.randn(16, WIDTH)
    for model in models:
        model(x).sum().backward()
    plain, converted = models
    for name in ("other", "norm", "fc"):
        ours, true = (getattr(m, name).weight.grad for m in (converted, plain))
        assert relative_error(ours, true) < 2 * CLOSE, name
    assert converted.norm.num_batches_tracked == plain.norm.num_batches_tracked


def test_rows_and_sums_may_grow_after_the_capture() -> None:
    norm = nn.LayerNorm(WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm)
    autoamp.convert(model, precision="bf16", do_no_harm=False, strict=True)
    for rows in (4, 6, 16000):
        norm.zero_grad()
        model(torch.randn(rows, WIDTH)).sum().backward()
    assert norm.bias.grad.tolist() == [16000.0] * WIDTH

    plain, converted = pair(lambda m, x: m.fc(x).abs().sum(0) * 1e-3, "fp16")
    for rows in (4, 6, 3000):
        x = torch.full((rows, WIDTH), 30.0)
        assert relative_error(converted(x), plain(x)) < CLOSE


def test_an_lstm_may_change_its_sizes() -> None:
    """Of symbolic sizes its fake result is that of a decomposition."""

    model = Of(
        lambda m, x: m.fc(m.rnn(x)[0]),
        rnn=nn.LSTM(WIDTH, WIDTH, batch_first=True),
        fc=nn.Linear(WIDTH, WIDTH),
    )
    original = copy.deepcopy(model)
    autoamp.convert(model, precision="bf16", do_no_harm=False, strict=True)
    for shape in ((3, 4), (2, 5), (5, 6)):
        x = torch.randn(*shape, WIDTH)
        assert relative_error(model(x), original(x)) < CLOSE


def test_a_tensor_made_inside_a_checkpoint() -> None:
    """The verifier's stand-ins have a device of their own, in the region as outside."""

    def masked(mod: Of, x: Tensor) -> Tensor:
        ahead = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        return (mod.fc(x) @ mod.other(x).t()).masked_fill(ahead, 0.0)

    def function(mod: Of, x: Tensor) -> Tensor:
        return checkpoint(masked, mod, x, use_reentrant=False)

    original, model = pair(function)
    x = torch.randn(4, WIDTH)
    assert relative_error(model(x), original(x)) < CLOSE


def test_a_hook_registered_after_the_capture_is_called() -> None:
    plain, converted = pair(lambda m, x: m.other(m.fc(x)))
    x = torch.randn(4, WIDTH)
    converted(x)
    for model in (plain, converted):
        model.fc.register_forward_hook(lambda _, __, out: out * 2)
    assert relative_error(converted(x), plain(x)) < CLOSE


def test_a_list_given_under_autocast_stays_the_callers() -> None:
    def noting(mod: Of, x: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(mod.fc(x))
        return mod.other(x)

    _, converted = pair(noting)
    seen: list[Tensor] = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        converted(torch.randn(4, WIDTH), seen)
    assert len(seen) == 1


@pytest.mark.parametrize(
    "draw",
    [
        lambda h: torch.randint_like(h, 3),
        lambda h: torch.linspace(h[0, 0], h[0, 1], h.shape[-1]),
    ],
    ids=["randint_like", "linspace"],
)
def test_what_torch_makes_below_autograd_has_no_gradient(
    draw: Callable[[Tensor], Tensor],
) -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            return h + draw(h)

    model, x = Draws(), torch.ones(2, 4)
    model(x).sum().backward()
    expected = model.fc.weight.grad
    model.zero_grad()
    autoamp.convert(model, precision="bf16", do_no_harm=False, strict=True)
    model(x).sum().backward()
    assert torch.equal(model.fc.weight.grad, expected)


@pytest.mark.thorough(but=["arange"])
@pytest.mark.parametrize(
    "factor",
    [
        lambda h, n: torch.arange(0, n * 0.5, 0.5),
        lambda h, n: torch.linspace(h.sum() * 0, n * 0.5, n),
        lambda h, n: torch.full((n,), n * 0.5),
        lambda h, n: functional.leaky_relu(h, 1 / n).sum(1),
        lambda h, n: torch.where(h.sum(1) > n / 7, n**0.5, 0.0 * n),
        lambda h, n: h.sum(1, keepdim=n > 3)[:, 0],
    ],
    ids=["arange", "linspace", "full", "slope", "where", "bool"],
)
def test_numbers_made_of_a_length_that_changes(
    factor: Callable[[Tensor, int], Tensor],
) -> None:
    def forward(m: Of, x: Tensor) -> Tensor:
        n = x.shape[0]
        return m.fc(x) * factor(x, n)[:, None]

    plain, converted = pair(forward)
    for n in (5, 7, 9):
        x = torch.randn(n, WIDTH)
        assert relative_error(converted(x), plain(x)) < CLOSE


@pytest.mark.parametrize(
    "write",
    [
        lambda h, out: torch.special.zeta(h, h, out=out),
        lambda h, out: torch.zeros(h.shape, out=out),
        lambda h, out: torch.sort(h, out=(out, torch.zeros(h.shape).long()))[0],
    ],
    ids=["no low kernel", "factory", "two results"],
)
def test_out_variants_write_fp32_into_what_they_are_given(
    write: Callable[[Tensor, Tensor], Tensor],
) -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            out = torch.zeros_like(x).clone()
            return write(x.clone(), out) @ x, out.clone() @ x

    x = torch.full((2, 2), 2.0)
    gm = autoamp.rewrite(
        capture(Writes(), 1),
        (x,),
        precision="bf16",
        do_no_harm=False,
        allow=["clone", "zeros_like"],
    )
    for found, expected in zip(gm(x), Writes()(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=3 * 2**-8, atol=0)
