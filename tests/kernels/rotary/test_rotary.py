"""Rotary position embeddings that are written out run as one call, and are as true."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoamp
from autoamp.kernels.functions.rotary import rotary
from tests.metrics import relative_error
from tests.small_models import converted
from tests.spelled.activations import halves, pairs

HEADS, SIZE, LENGTH = 2, 16, 24


def chunks(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def back(x: Tensor) -> Tensor:
    first, second = x.split(x.shape[-1] // 2, -1)
    return torch.cat((second, -first), dim=-1)


def rolled(x: Tensor) -> Tensor:
    """Halves of other tokens: of the same ones where there are but four."""
    x = halves(x)
    return torch.cat((x[:, :, 4:], x[:, :, :4]), 2)


def by_llama(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos) + (halves(x) * sin)


def written_between(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    straight = x * cos
    x[:1].mul_(2)  # later reads are of `x`, and not of what the call returns
    return straight + halves(x) * sin


SPELLINGS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "llama": by_llama,
    "gpt_neox": lambda x, cos, sin: chunks(x) * sin + x * cos,
    "gpt_j": lambda x, cos, sin: x * cos + pairs(x) * sin,
    "cohere": lambda x, cos, sin: cos * x + sin * pairs(x),
    "turned back": lambda x, cos, sin: x * cos + back(x) * sin,
    "with a difference": lambda x, cos, sin: x * cos - halves(x) * sin,
}

OTHERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "not exchanged": lambda x, cos, sin: x * cos + x * sin,
    "one sign": lambda x, cos, sin: (
        x * cos + torch.cat((x[..., 8:], x[..., :8]), -1) * sin
    ),
    "halves of other lengths": lambda x, cos, sin: (
        x * cos + torch.cat((-x[..., 6:], x[..., :6]), -1) * sin
    ),
    "along the tokens": lambda x, cos, sin: (
        x * cos + torch.cat((-x[..., 12:, :], x[..., :12, :]), -2) * sin
    ),
    "of other tokens": lambda x, cos, sin: x * cos + rolled(x) * sin,
    "the product subtracted": lambda x, cos, sin: halves(x) * sin - x * cos,
    "a weighted sum": lambda x, cos, sin: torch.add(x * cos, halves(x) * sin, alpha=2),
    "written between": lambda x, cos, sin: written_between(x.clone(), cos, sin),
}


class Attention(nn.Module):
    """Attention whose queries and keys are embedded by `embed`."""

    def __init__(self, embed: Callable[..., Tensor], trained: bool = False) -> None:
        super().__init__()
        self.all = nn.Linear(32, 3 * HEADS * SIZE)
        self.out = nn.Linear(HEADS * SIZE, 32)
        self.embed = embed
        angles = torch.outer(torch.arange(LENGTH), 0.1 ** (torch.arange(SIZE) / 4))
        for name, value in (("cos", angles.cos()), ("sin", angles.sin())):
            if trained:
                setattr(self, name, nn.Parameter(value))
            else:
                self.register_buffer(name, value)

    def parts(self, x: Tensor) -> list[Tensor]:
        return [
            part.unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
            for part in self.all(x).chunk(3, -1)
        ]

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.parts(x)
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        q, k = self.embed(q, cos, sin), self.embed(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


def inputs() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, LENGTH, 32, generator=generator)


def stepped(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output of a training step and the gradients of the parameters, in float64."""
    made = model(x)
    made.double().pow(2).mean().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [t.detach().double() for t in (made, *grads)]


def embeddings(model: nn.Module) -> list[Any]:
    """The calls of `rotary` in the graphs that a converted model runs."""
    return [
        node
        for gm in autoamp.report(model).graphs
        for node in gm.graph.nodes
        if node.target is rotary
    ]


@pytest.mark.thorough(but=["llama", "gpt_j", "with a difference"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_an_embedding_is_one_call_and_as_true(spelling: str) -> None:
    torch.manual_seed(0)
    model, x = Attention(SPELLINGS[spelling]), inputs()
    exact = stepped(copy.deepcopy(model).double(), x.double())
    under_autocast = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        result = under_autocast(x)
    result.double().pow(2).mean().backward()
    theirs = [result, *(p.grad for p in under_autocast.parameters())]
    ours = stepped(converted(model), x)
    assert len(embeddings(model)) == 2
    for mine, their, true in zip(ours, theirs, exact, strict=True):
        allowed = 1.05 * relative_error(their.double(), true) + 1e-4
        assert relative_error(mine, true) <= allowed


@pytest.mark.thorough(
    but=[
        "not exchanged",
        "one sign",
        "along the tokens",
        "of other tokens",
        "a weighted sum",
        "written between",
    ]
)
@pytest.mark.parametrize("other", OTHERS)
def test_another_chain_stays_as_it_is(other: str) -> None:
    torch.manual_seed(0)
    model = Attention(OTHERS[other])
    converted(model)(inputs())
    assert not embeddings(model)


def test_the_cast_that_attention_reads_is_part_of_the_call() -> None:
    model = converted(Attention(by_llama))
    model(inputs())
    assert {node.meta["val"].dtype for node in embeddings(model)} == {torch.bfloat16}


def test_trained_angles_have_gradients() -> None:
    torch.manual_seed(0)
    model, x = Attention(by_llama, trained=True), inputs()
    exact = stepped(copy.deepcopy(model).double(), x.double())
    ours = stepped(converted(model), x)
    assert len(embeddings(model)) == 2
    assert len(ours) == len(exact) == 7
    for mine, true in zip(ours, exact, strict=True):
        assert relative_error(mine, true) < 0.03


def test_the_report_counts_it_and_fuse_leaves_it_out() -> None:
    model = converted(Attention(by_llama))
    model(inputs())
    said = "14 ops of the model run as 2 kernels: rotary (2)."
    assert said in str(autoamp.report(model))
    plain = converted(Attention(by_llama), unfused=["rotary"])
    plain(inputs())
    assert not embeddings(plain)
    assert "kernel" not in str(autoamp.report(plain))


@pytest.mark.thorough
def test_a_length_that_changes_is_not_compared() -> None:
    model, x = converted(Attention(by_llama)), inputs()
    for length in (8, 12, 20):
        given = x[:, :length].contiguous()
        expected = autoamp.revert(copy.deepcopy(model))(given)
        assert relative_error(model(given), expected) < 0.02
    assert len(embeddings(model)) == 4  # one graph for 8, one for any other length


@pytest.mark.parametrize("in_pairs", [False, True])
@pytest.mark.parametrize("sign", [-1, 1])
def test_rotary_differentiates_twice(in_pairs: bool, sign: int) -> None:
    torch.manual_seed(0)
    x, v = torch.randn(2, 3, 6, requires_grad=True), torch.randn(2, 3, 6)
    cos, sin = torch.randn(3, 6), torch.randn(3, 6)

    def plainly(x: Tensor) -> Tensor:
        other = pairs(x) if in_pairs else halves(x)
        return x * cos - sign * other * sin

    def kernel(x: Tensor) -> Tensor:
        return rotary(x, cos, sin, torch.float32, sign, in_pairs)

    found = []
    for function in (plainly, kernel):
        result = (function(x) * v).pow(2).sum()
        (first,) = torch.autograd.grad(result, x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), x)
        found.append((result, first, second))
    for mine, true in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, true)


class Viewed(Attention):
    """Views the sum, whose second operand alone lies as the data does."""

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.parts(x)
        q = halves(q) * self.sin + q * self.cos
        q = q.view(-1, LENGTH, SIZE).view(k.shape)
        k = self.embed(k, self.cos, self.sin)
        return self.out((q @ k.mT @ v).transpose(1, 2).flatten(-2)), q, k


@pytest.mark.thorough(but=["llama"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_returned_result_stays_fp32_and_has_the_strides_of_the_sum(
    spelling: str,
) -> None:
    model, x = Viewed(SPELLINGS[spelling]), inputs()
    expected = copy.deepcopy(model)(x)
    found = converted(model, strict=True)(x)
    assert len(embeddings(model)) == 2
    for made, true in zip(found, expected, strict=True):
        assert (made.dtype, made.stride()) == (true.dtype, true.stride())
    for mine, true in zip(found, expected, strict=True):
        assert relative_error(mine, true) < 0.02
