"""Random numbers: drawn as the model draws them in fp32, and no cast for a shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.small_models import Of

WIDTH = 20
"""No multiple of 16: torch's CPU kernels then draw other normal numbers in fp16."""

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
X = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))


def of(function: Callable[..., Any]) -> Of:
    """A model of one function over two layers, and one that is as wide again."""
    torch.manual_seed(0)
    layers = {"fc": nn.Linear(WIDTH, WIDTH), "other": nn.Linear(WIDTH, WIDTH)}
    return Of(function, both=nn.Linear(WIDTH, 2 * WIDTH), **layers)


def convert(function: Any, precision: str = "bf16", **options: Any) -> nn.Module:
    torch._dynamo.reset()
    options = {"do_no_harm": False, "strict": True, **options}
    return autoamp.convert(of(function), precision=precision, **options)


def seeded(call: Callable[..., Any]) -> tuple[Any, Tensor]:
    """What `call` gives from one random state, and the state that it leaves."""
    torch.manual_seed(3)
    with torch.no_grad():
        return call(X), torch.get_rng_state()


def low_ops(model: nn.Module) -> set[str]:
    """The nodes that run low; Dynamo notes the line of each call."""
    model(X)
    return {row.name for row in autoamp.report(model).ops if row.is_low}


NOISE: dict[str, Callable[[Tensor], Tensor]] = {
    "randn_like": torch.randn_like,
    "rand_like": torch.rand_like,
    "randint_like": lambda h: torch.randint_like(h, 9),
    "normal_": lambda h: torch.empty_like(h).normal_(),
    "uniform_": lambda h: torch.empty_like(h).uniform_(),
    "exponential_": lambda h: h.new_empty(h.shape).exponential_(),
    "bernoulli_": lambda h: torch.empty_like(h).bernoulli_(0.3),
    "bernoulli": lambda h: torch.bernoulli(h, 0.3),
    "randn": lambda h: torch.randn(h.shape),
    "two": lambda h: torch.randn_like(h) * 2 + torch.rand_like(h),
}


def path(h: Tensor) -> Tensor:
    """Stochastic depth, as timm writes it."""
    keep = h.new_empty((h.shape[0], 1)).bernoulli_(0.6)
    return h * keep.div_(0.6)


def typed(h: Tensor) -> Tensor:
    """Stochastic depth, as torchvision writes it: `h` is low under autocast."""
    keep = torch.empty((h.shape[0], 1), dtype=h.dtype)
    keep = keep.bernoulli_(0.6)
    keep.div_(0.6)
    return h * keep


def variational(m: Any, x: Tensor) -> Tensor:
    """A mean and a log variance, and noise as large as that says."""
    mean, log_variance = m.both(x).chunk(2, -1)
    deviation = (log_variance * 0.5).exp()
    return m.other(mean + torch.randn_like(deviation) * deviation)


def jitter(m: Any, x: Tensor) -> Tensor:
    """Noise on what a layer gives, as wide as that: autocast draws other numbers."""
    mean, spread = m.both(x).chunk(2, -1)
    return m.other(mean + torch.randn_like(spread) * spread)


PROGRAMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "all": lambda m, x: [draw(m.fc(x)) for draw in NOISE.values()] + [m.other(x)],
    "path": lambda m, x: m.other(path(m.fc(x))),
    "typed": lambda m, x: m.other(typed(m.fc(x))),
    "variational": variational,
    "jitter": jitter,
}


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_draws_are_those_of_the_users_program(name: str, precision: str) -> None:
    """The same numbers, rounded a few times at most, from the same stream."""
    function = PROGRAMS[name]
    ours, after = seeded(convert(function, precision))
    theirs, left = seeded(of(function))
    assert torch.equal(after, left)
    eps = torch.finfo(LOW[precision]).eps
    draws = [*NOISE, "other"] if name == "all" else [name]
    pairs = zip(draws, ours, theirs, strict=True) if name == "all" else []
    for draw, mine, true in pairs or [(name, ours, theirs)]:
        allowed = eps if draw in NOISE else 8 * eps
        assert (mine - true).norm() < allowed * true.norm(), draw
    if name == "typed":
        with torch.autocast("cpu", LOW[precision]):
            amp, _ = seeded(of(function))
        assert torch.equal(ours, amp.float()), "autocast's numbers, to the bit"


@pytest.mark.parametrize("precision", LOW)
def test_a_shape_is_read_without_a_cast(precision: str) -> None:
    for kind in ("randn_like", "rand_like", "randint_like"):
        model = convert(lambda m, x, k=kind: NOISE[k](m.fc(x)), precision)
        assert {"linear", kind} & low_ops(model) == {"linear"}
        (record,) = autoamp.report(model).rewritten
        assert not [c for c in record.casts if c.kind == "up"]


def added(m: Any, x: Tensor) -> Tensor:
    h = m.fc(x)
    h = h + torch.randn_like(h) * 0.1
    h = h * torch.empty_like(h).normal_()
    return m.other(h)


def masked(draw: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """What `draw` makes of a low value, before a product."""
    return lambda m, x: m.other(draw(m.fc(x)))


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


def noisy(m: Any, x: Tensor) -> Tensor:
    h = m.fc(x)
    return m.other(h * torch.randn_like(h))


def asked(m: Any, x: Tensor) -> Tensor:
    h = m.fc(x)
    return m.other(h * torch.randn_like(h, dtype=torch.float32))


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any], str, str]] = {
    # Normal numbers widen nothing, and uniform ones do.
    "normal": (added, {}, "add mul mul_1 linear_1", ""),
    "uniform": (masked(lambda h: h + torch.rand_like(h)), {}, "", "add"),
    # Noise that is asked for in fp32 widens.
    "noise in fp32": (asked, {}, "", "mul"),
    "kept": (noisy, {"keep": ("*",)}, "", "mul"),
    "denied": (noisy, {"deny": ("randn_like",)}, "", "mul"),
    "like what is wide": (
        lambda m, x: m.other(m.fc(x) * torch.randn_like(x)),
        {},
        "",
        "mul",
    ),
    # A mask of zeros and ones is low: in fp32 it widens every branch that is dropped.
    "path": (PROGRAMS["path"], {}, "new_empty bernoulli_ div_ mul linear_1", ""),
    "typed": (PROGRAMS["typed"], {}, "empty bernoulli_ div_ mul", ""),
    "typed like a wide value": (
        masked(lambda h: typed(h.float())),
        {},
        "",
        "empty mul",
    ),
    "asked in fp32": (masked(asked_in_fp32), {}, "", "empty mul"),
    "as another": (masked(as_another), {}, "", "empty mul"),
    "read twice": (masked(read_twice), {}, "", "empty mul"),
    "made before": (masked(made_before), {}, "", "empty mul"),
    "variational": (variational, {}, "linear_1", ""),
}
"""A program, options, the nodes that are low, and those that are not."""


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("case", CASES)
def test_noise_is_as_wide_as_it_is_asked_for(case: str, precision: str) -> None:
    function, options, low, high = CASES[case]
    found = low_ops(convert(function, precision, **options))
    assert set(low.split()) <= found
    assert not set(high.split()) & found
