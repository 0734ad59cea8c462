"""Random numbers: drawn as the model draws them in fp32, and no cast for a shape."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp.dtypes import parse_low_dtype
from tests.small_models import Of, rewriting
from tests.truth import relative

WIDTH = 20
"""No multiple of 16: torch's CPU kernels then draw other normal numbers in fp16."""

PRECISIONS = ("bf16", "fp16")
X = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))


def of(function: Callable[..., Any]) -> Of:
    """A model of one function over two layers."""
    torch.manual_seed(0)
    return Of(function, fc=nn.Linear(WIDTH, WIDTH), other=nn.Linear(WIDTH, WIDTH))


rewritten = rewriting(of, lambda: X.clone().requires_grad_(), "bf16", strict=True)


def seeded(call: Callable[..., Any]) -> tuple[Any, Tensor]:
    """What `call` gives from one random state, and the state that it leaves."""
    torch.manual_seed(3)
    with torch.no_grad():
        return call(X), torch.get_rng_state()


def path(m: Of, h: Tensor) -> Tensor:
    """Stochastic depth, as timm writes it."""
    keep = h.new_empty((h.shape[0], 1)).bernoulli_(0.6)
    return m.other(h * keep.div_(0.6))


NOISE: dict[str, Callable[[Of, Tensor], Tensor]] = {
    "randn_like": lambda m, h: torch.randn_like(h),
    "rand_like": lambda m, h: torch.rand_like(h),
    "randint_like": lambda m, h: torch.randint_like(h, 9),
    "normal_": lambda m, h: torch.empty_like(h).normal_(),
    "uniform_": lambda m, h: torch.empty_like(h).uniform_(),
    "exponential_": lambda m, h: h.new_empty(h.shape).exponential_(),
    "bernoulli_": lambda m, h: torch.empty_like(h).bernoulli_(0.3),
    "bernoulli": lambda m, h: torch.bernoulli(h, 0.3),
    "randn": lambda m, h: torch.randn(h.shape),
    "two": lambda m, h: torch.randn_like(h) * 2 + torch.rand_like(h),
}


@pytest.mark.thorough(
    but=[
        "randn_like-bf16",
        "randint_like-bf16",
        "uniform_-bf16",
        "exponential_-fp16",
        "bernoulli-fp16",
        "two-fp16",
    ]
)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", NOISE)
def test_the_draws_are_those_of_the_users_program(kind: str, precision: str) -> None:
    """The same numbers, rounded at most, from the same stream."""
    draw = NOISE[kind]
    model = of(lambda m, x: draw(m, m.fc(x)) + 0 * m.other(x))
    found = rewritten(model, precision=precision)
    (ours, after), (theirs, left) = seeded(found.gm), seeded(model)
    eps = torch.finfo(parse_low_dtype(precision)).eps
    assert relative(ours.double(), theirs.double()) < eps, "a rounding or two"
    assert torch.equal(after, left)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", ["randn_like", "rand_like", "randint_like"])
def test_a_shape_is_read_without_a_cast(kind: str, precision: str) -> None:
    draw = NOISE[kind]
    found = rewritten(lambda m, x: draw(m, m.fc(x)), precision=precision)
    assert "linear" in found.assignment.low
    assert {c.value for c in found.casts if c.kind == "up"} == set()
    assert not found.assignment.decisions[kind].low


@pytest.mark.parametrize("precision", PRECISIONS)
def test_normal_numbers_widen_nothing_and_uniform_ones_do(precision: str) -> None:
    def noisy(m: Of, x: Tensor) -> Tensor:
        h = m.fc(x)
        h = h + torch.randn_like(h) * 0.1
        h = h * torch.empty_like(h).normal_()
        return m.other(h)

    low = rewritten(noisy, precision=precision).assignment.low
    assert {"add", "mul", "mul_1", "linear_1"} <= low
    uniform = of(lambda m, x: m.other((h := m.fc(x)) + torch.rand_like(h)))
    assert "add" not in rewritten(uniform, precision=precision).assignment.low


@pytest.mark.parametrize("asked", ["dtype", "keep", "deny", "wide"])
def test_noise_that_is_asked_for_in_fp32_widens(asked: str) -> None:
    def noisy(m: Of, x: Tensor) -> Tensor:
        h = m.fc(x)
        like = x if asked == "wide" else h
        dtype = {"dtype": torch.float32} if asked == "dtype" else {}
        return m.other(h * torch.randn_like(like, **dtype))

    options = {"keep": {"keep": ("*",)}, "deny": {"deny": ("randn_like",)}}
    found = rewritten(noisy, **options.get(asked, {}))
    assert "mul" not in found.assignment.low


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_mask_of_zeros_and_ones_is_low(precision: str) -> None:
    """Its fp32 form widened every residual branch that stochastic depth drops."""
    model = of(lambda m, x: path(m, m.fc(x)))
    found = rewritten(model, precision=precision)
    names = {"new_empty", "bernoulli_", "div_", "mul", "linear_1"}
    assert names <= found.assignment.low
    (ours, after), (theirs, left) = seeded(found.gm), seeded(model)
    assert torch.equal(after, left)
    eps = torch.finfo(parse_low_dtype(precision)).eps
    assert relative(ours.double(), theirs.double()) < 8 * eps, "roundings in two layers"


def typed(h: Tensor) -> Tensor:
    """Stochastic depth, as torchvision writes it."""
    keep = torch.empty((h.shape[0], 1), dtype=h.dtype)
    keep = keep.bernoulli_(0.6)
    keep.div_(0.6)
    return h * keep


def asked_in_fp32(h: Tensor) -> Tensor:
    keep = torch.empty((h.shape[0], 1), dtype=torch.float32).bernoulli_(0.6)
    return h * keep.div_(0.6)


def as_another(h: Tensor) -> Tensor:
    """The line of the product does not have the value whose dtype was asked for."""
    wide = h.float()
    keep = torch.empty((h.shape[0], 1), dtype=wide.dtype).bernoulli_(0.6)
    return h * keep.div_(0.6)


def read_twice(h: Tensor) -> Tensor:
    """A second reader stands beside another value."""
    wide = h.float()
    keep = torch.empty((h.shape[0], 1), dtype=h.dtype).bernoulli_(0.6)
    return h * keep + (wide + h) * keep


def made_before(h: Tensor) -> Tensor:
    """The name stands for another value when the product reads it."""
    keep = torch.empty((h.shape[0], 1), dtype=h.dtype).bernoulli_(0.6)
    h = h.sin()
    return h * keep


def low_ops(draw: Callable[[Tensor], Tensor], **options: Any) -> set[str]:
    """The ops that run low between two layers; Dynamo notes the line of each call."""
    model = convert(of(lambda m, x: m.other(draw(m.fc(x)))), **options)
    model(X)
    return {row.name for row in autoamp.report(model).ops if row.precision != "fp32"}


def convert(model: nn.Module, precision: str = "bf16") -> nn.Module:
    torch._dynamo.reset()
    return autoamp.convert(model, precision=precision, do_no_harm=False, strict=True)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_mask_in_the_dtype_of_a_low_value_is_low(precision: str) -> None:
    """`dtype=h.dtype`, where `h` is low under autocast."""
    assert {"empty", "bernoulli_", "div_", "mul"} <= low_ops(typed, precision=precision)
    model = of(lambda m, x: m.other(typed(m.fc(x))))
    low = parse_low_dtype(precision)
    assert low is not None
    _, left = seeded(model)
    with torch.autocast("cpu", low):
        theirs, _ = seeded(model)
    ours, after = seeded(convert(model, precision))
    assert torch.equal(after, left)
    assert torch.equal(ours, theirs.float()), "autocast's numbers, to the bit"


@pytest.mark.parametrize("draw", [asked_in_fp32, as_another, read_twice, made_before])
def test_a_mask_of_another_dtype_stays_wide(draw: Callable[[Tensor], Tensor]) -> None:
    assert not {"empty", "mul"} & low_ops(draw)


def test_a_mask_in_the_dtype_of_a_wide_value_is_wide() -> None:
    assert not {"empty", "mul"} & low_ops(lambda h: typed(h.float()))


class Autoencoder(nn.Module):
    """A variational one: its encoder gives a mean and a log variance."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(WIDTH, 2 * WIDTH)
        self.decoder = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        deviation = (log_variance * 0.5).exp()
        return self.decoder(mean + torch.randn_like(deviation) * deviation)


class Jitter(Autoencoder):
    """Noise of one size on what a layer gives, as wide as that."""

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.encoder(x).chunk(2, -1)
        return self.decoder(mean + torch.randn_like(spread) * spread)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", [Autoencoder, Jitter])
def test_reparametrised_models_give_what_they_gave(
    kind: type[nn.Module], precision: str
) -> None:
    """From the same seed; under autocast other noise is drawn where that is low."""
    model = kind()
    low = parse_low_dtype(precision)
    assert low is not None
    found = rewritten(copy.deepcopy(model), precision=precision)
    theirs, left = seeded(model)

    def autocast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", low):
            return model(x).float()

    def off(call: Callable[..., Any]) -> tuple[float, bool]:
        result, after = seeded(call)
        same = torch.equal(after, left)
        return relative(result.double(), theirs.double()), same

    ours, amp = off(found.gm), off(autocast)
    assert ours[1]
    allowed = 8 * torch.finfo(low).eps
    assert ours[0] < allowed, "roundings of two layers and a sum"
    if kind is Jitter:
        assert amp[0] > allowed, "autocast draws other numbers here"
    else:
        assert ours[0] <= 1.1 * amp[0]
    assert "linear_1" in found.assignment.low
