"""Attention that is written out runs as torch's kernel, where that is at least as true.

More spellings, with masks of all kinds, are in tests/spelled/attention.py.  Here is
what is left alone, and what else stays as it was.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import autoamp
from autoamp.passes.decide.devices import Device
from autoamp.passes.kernels.table import ATTENTION
from tests.spelled.attention import nano_gpt, timm, xformers
from tests.spelled.data import Situation
from tests.spelled.layers import HEADS, SIZE, WIDTH, Layer, Spelling
from tests.spelled.masks import buffered
from tests.spelled.measure import Subject, judged


@pytest.fixture(autouse=True)
def a_device_whose_kernel_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "attends_by_products", False)


BATCH, LENGTH = 3, 24
Way = Callable[[Layer, Tensor, Tensor, Tensor], Tensor]
min_gpt = nano_gpt(buffered, -math.inf)
THREE = pytest.mark.parametrize(
    "way", [timm, min_gpt, xformers], ids=["timm", "min_gpt", "xformers"]
)


def later() -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


def flat(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.reshape(-1, LENGTH, SIZE) for t in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)) * SIZE**-0.5
    weights = scores.masked_fill(later(), -torch.inf).softmax(-1)
    return torch.bmm(weights, v).view(-1, HEADS, LENGTH, SIZE)


def by_letters(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    similar = torch.einsum("b h i d, b h j d -> b h i j", q * 0.25, k)
    similar = similar.masked_fill(later(), -torch.finfo(similar.dtype).max)
    weights = similar.softmax(dim=-1, dtype=similar.dtype)
    return torch.einsum("...ij,...jd->...id", weights, v)


def in_place(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    scores /= math.sqrt(SIZE)
    scores.masked_fill_(later(), -torch.inf)
    return scores.softmax(-1) @ v


def by_hand(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(SIZE)
    powers = torch.exp(scores - scores.max(-1, keepdim=True).values)
    return (powers / powers.sum(-1, keepdim=True)) @ v


def two_masks(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) * 0.25
    padded = torch.arange(LENGTH) >= torch.tensor([LENGTH, 5])[:, None, None, None]
    scores = scores.masked_fill(later(), -torch.inf).masked_fill(padded, -1e30)
    return scores.softmax(-1) @ v


def slopes(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """ALiBi: what is added is no mask, and stays in fp32."""
    return (q @ k.transpose(-2, -1) + torch.arange(float(LENGTH)) * -8).softmax(-1) @ v


def made(way: Way, seed: int = 0) -> Layer:
    torch.manual_seed(seed)
    return Layer(Spelling(way, 3)).eval()


def given() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, LENGTH, WIDTH, generator=generator)


def converted(model: nn.Module, **options: Any) -> Any:
    return autoamp.convert(
        copy.deepcopy(model), **{"precision": "bf16", "do_no_harm": False, **options}
    )


def seen(call: Callable[[Tensor], Any], model: nn.Module, x: Tensor) -> list[Tensor]:
    """The result and all gradients of a call, in float64."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    result = call(x)
    result.square().sum().backward()
    grads = [x.grad, *(p.grad for p in model.parameters())]
    return [t.detach().double() for t in (result, *grads) if t is not None]


def exactly(model: nn.Module, x: Tensor) -> list[Tensor]:
    """What `seen` sees of the same model in float64."""
    exact = copy.deepcopy(model).double()
    torch.set_default_dtype(torch.float64)
    try:
        return seen(exact, exact, x.double())
    finally:
        torch.set_default_dtype(torch.float32)


def attentions(model: nn.Module) -> int:
    """How many written attentions of a model run as torch's."""
    return sum(op.kernel == ATTENTION for op in autoamp.report(model).ops)


def total_error(ours: list[Tensor], true: list[Tensor]) -> float:
    assert len(ours) == len(true) > 3
    errors = [(a - b).norm() / b.norm() for a, b in zip(ours, true, strict=True)]
    return float(sum(errors))


@pytest.mark.parametrize(
    "way",
    [flat, by_letters, in_place, by_hand, two_masks, slopes],
    ids=lambda way: way.__name__,
)
def test_it_runs_as_one_kernel_at_least_as_true_as_autocast(way: Way) -> None:
    verdict = judged(Subject(Spelling(way, 3), Situation(length=LENGTH), "bf16"))
    assert not verdict.fails, str(verdict)
    assert verdict.kernels == [ATTENTION]


# -- what is left alone ----------------------------------------------------------------


def bart(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.reshape(-1, LENGTH, SIZE) for t in (q * SIZE**-0.5, k, v))
    scores = torch.bmm(q, k.transpose(1, 2))
    seen = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.long).tril()
    inverted = 1.0 - seen.to(q.dtype)
    mask = inverted.masked_fill(inverted.to(torch.bool), torch.finfo(q.dtype).min)
    scores = scores.view(-1, HEADS, LENGTH, LENGTH) + mask
    weights = functional.softmax(scores.view(-1, LENGTH, LENGTH), dim=-1)
    weights = functional.dropout(weights, p=0.1, training=False)
    return torch.bmm(weights, v).view(-1, HEADS, LENGTH, SIZE)


def trained_bias(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) + m.bias[:LENGTH]).softmax(-1) @ v


def trained_scale(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) * m.weight[0]).softmax(-1) @ v


def capped(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.transpose(-2, -1) / 30).tanh() * 30).softmax(-1) @ v


def reads_weights(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.transpose(-2, -1)).softmax(-1)
    return weights @ v + weights[..., :1]


def dropped(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.transpose(-2, -1)).softmax(-1)
    return functional.dropout(weights, 0.5, training=True) @ v


def over_queries(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)).softmax(-2) @ v


def values_first(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.transpose(-2, -1)).softmax(-1)
    return (v.transpose(-2, -1) @ weights).transpose(-2, -1)


def narrow_values(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    halves = v.chunk(2, -1)
    weights = (q @ k.transpose(-2, -1)).softmax(-1) @ halves[0]
    return torch.cat([weights, halves[1]], -1)


def weak_mask(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)).masked_fill(later(), -5.0).softmax(-1) @ v


def negative(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)).masked_fill(later(), torch.inf)
    return (scores * -0.25).softmax(-1) @ v


def scaled_mask(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)).masked_fill(later(), -1e9)
    return (scores * 1e-9).softmax(-1) @ v


def writes_between(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.clone()
    scores = q @ k.transpose(-2, -1)
    q.zero_()
    return scores.softmax(-1) @ v + q


def writes_later(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    numbers = torch.zeros(LENGTH, LENGTH)
    result = (q @ k.transpose(-2, -1) + numbers).softmax(-1) @ v
    numbers.fill_(2.0)
    return result * numbers[0, 0]


def biased_in_place(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A gradient flows to a row of what is added, by another name."""
    numbers = torch.zeros(HEADS, LENGTH, LENGTH)
    numbers[0].add_(m.bias[:LENGTH])
    return (q @ k.transpose(-2, -1) + numbers).softmax(-1) @ v


def shifted_before_a_fill(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1)
    scores = scores - scores.amax(-1, keepdim=True)
    return scores.masked_fill(later(), -1e4).softmax(-1) @ v


def regional(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return (q @ k.transpose(-2, -1)).softmax(-1) @ v


LEFT = (
    *(trained_bias, trained_scale, capped, reads_weights, dropped),
    *(over_queries, values_first, narrow_values, weak_mask, negative, scaled_mask),
    *(writes_between, writes_later, biased_in_place, shifted_before_a_fill),
    *(regional, bart),
)


@pytest.mark.parametrize("way", LEFT, ids=lambda way: way.__name__)
def test_other_attention_is_left_alone(way: Way) -> None:
    model, x = made(way), given()
    ours, plain = converted(model), converted(model, fuse={"attention": False})
    torch.manual_seed(0)
    found = seen(ours, ours, x)
    assert attentions(ours) == 0
    torch.manual_seed(0)
    expected = seen(plain, plain, x)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"fuse": False},
        {"fuse": {ATTENTION: False}},
        {"keep": ["drop"]},
        {"deny": ["softmax"]},
        {"infer": ["matmul"]},
    ],
    ids=str,
)
def test_it_can_be_switched_off(options: dict[str, Any]) -> None:
    ours = converted(made(timm), **options)
    ours(given())
    assert attentions(ours) == 0


def test_a_hook_between_the_calls_sees_the_weights() -> None:
    weights: list[Tensor] = []
    ours = converted(made(min_gpt))
    ours.drop.register_forward_hook(lambda *given: weights.append(given[2].detach()))
    ours(given())
    assert weights[0].sum(-1).allclose(torch.ones(BATCH, HEADS, LENGTH), atol=1e-2)
    assert attentions(ours) == 0


# -- what stays as it was --------------------------------------------------------------


@THREE
def test_it_is_differentiated_twice(way: Way) -> None:
    model, x = made(way), given()

    def slopes_of_slopes(model: nn.Module) -> list[Tensor]:
        z = x.clone().requires_grad_()
        model.zero_grad()
        (slope,) = torch.autograd.grad(model(z).square().sum(), z, create_graph=True)
        (slope.square().sum() + model(z).sum()).backward()
        weights = (model.before.weight, model.after.weight)
        return [
            t.double() for t in (slope.detach(), z.grad, *(p.grad for p in weights))
        ]

    expected = slopes_of_slopes(model)
    ours, plain = converted(model), converted(model, fuse=False)
    error = total_error(slopes_of_slopes(ours), expected)
    assert attentions(ours) == 1
    assert error <= 1.05 * total_error(slopes_of_slopes(plain), expected)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@THREE
def test_a_scaled_loss_gives_the_same(way: Way, precision: str) -> None:
    model, x = made(way), given()
    found = []
    for scale in ("off", 64.0):
        ours = converted(model, precision=precision, loss_scale=scale)
        found.append(seen(ours, ours, x))
        assert attentions(ours) == 1
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 2**-8 * b.norm()


def test_checkpointed_attention_is_recognised_and_right() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = made(timm)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    model, x = Outer(), given()
    ours, plain = converted(model), converted(model.inner)
    for a, b in zip(seen(ours, ours, x), seen(plain, plain, x), strict=True):
        assert (a - b).norm() <= 2**-8 * b.norm()


@pytest.mark.parametrize("backend", ["eager", lookup_backend("aot_eager")])
def test_lengths_may_change(backend: Any) -> None:
    torch._dynamo.reset()
    ours, plain = converted(made(min_gpt), backend=backend), made(min_gpt)
    for length in (24, 8, 17, 31):
        x = torch.randn(2, length, WIDTH)
        error = (ours(x) - plain(x)).norm() / plain(x).norm()
        assert error <= 2**-6
    graphs = len(autoamp.report(ours).graphs)
    assert graphs > 1
    assert attentions(ours) == (graphs if backend == "eager" else 0)


def test_the_result_may_be_viewed_and_written_to() -> None:
    def written(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        rows = heads.view(-1, SIZE)
        rows[0] = 0
        return heads.mul_(2)

    model, x = made(written), given()
    ours, plain = converted(model), converted(model, fuse=False)
    expected = seen(model, model, x)
    error = total_error(seen(ours, ours, x), expected)
    assert attentions(ours) == 1
    assert error <= 1.05 * total_error(seen(plain, plain, x), expected)


def test_what_functions_of_functions_find() -> None:
    model, x = converted(made(timm)), given()
    found = torch.func.grad(lambda t: model(t).square().sum())(x)
    expected = torch.func.grad(lambda t: made(timm)(t).square().sum())(x)
    assert (found - expected).norm() <= 2**-6 * expected.norm()


def test_weights_are_kept_no_more() -> None:
    def kept(model: nn.Module) -> int:
        """How many tensors of the size of the weights are kept for the backward."""
        shapes = []

        def pack(tensor: Tensor) -> Tensor:
            shapes.append(tuple(tensor.shape[-2:]))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(given())
        return shapes.count((LENGTH, LENGTH))

    model = made(timm)
    assert kept(converted(model, fuse=False)) >= 2
    assert kept(converted(model)) == 0
