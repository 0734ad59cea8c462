"""Masks that attention can do without: those that are causal, and that hide no key."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autoamp
from autoamp.passes.kernels.table import CAUSAL_MASK, NO_MASK
from tests.small_models import Of

LENGTH = 12
LOWEST = torch.finfo(torch.float32).min
Mask = Callable[[int], Tensor]


def rows(n: int) -> Tensor:
    return torch.arange(n)[:, None]


def columns(n: int) -> Tensor:
    return torch.arange(n)[None]


def lower(n: int) -> Tensor:
    return torch.ones(n, n).tril()


def counted(n: int) -> Tensor:
    return torch.ones(n, dtype=torch.long).cumsum(0)


def written_to(n: int) -> Tensor:
    mask = lower(n).bool()
    mask[:, 3].fill_(False)
    return mask


def assigned_to(n: int) -> Tensor:
    mask = lower(n)
    mask[1:, 2] = 0.0
    return mask.bool()


def packed(n: int) -> Tensor:
    """As transformers 5 makes it, of positions that also tell texts apart."""
    position = torch.arange(n)[None].expand(2, -1)
    texts = (position.diff(prepend=position[:, :1] - 1) != 1).cumsum(-1)
    batch = torch.arange(2)[:, None, None, None]
    query, key = torch.arange(n)[None, None, :, None], torch.arange(n)[None, None, None]
    same_text = texts[batch, query] == texts[batch, key]
    later = position[batch, key] <= position[batch, query]
    return torch.ones((), dtype=torch.bool) & later & same_text


def packed_of_two(n: int) -> Tensor:
    """The same, of positions that begin anew."""
    position = torch.arange(n)[None].expand(2, -1) % 5
    texts = (position.diff(prepend=position[:, :1] - 1) != 1).cumsum(-1)
    batch = torch.arange(2)[:, None, None, None]
    query, key = torch.arange(n)[None, None, :, None], torch.arange(n)[None, None, None]
    return (texts[batch, query] == texts[batch, key]) & (key <= query)


CAUSAL: dict[str, Mask] = {
    "packed": packed,
    "repeated": lambda n: (columns(n) <= rows(n))[None, None].repeat(2, 3, 1, 1),
    "columns up to rows": lambda n: columns(n) <= rows(n),
    "rows from columns": lambda n: rows(n) >= columns(n),
    "not beyond": lambda n: ~(columns(n) > rows(n)),
    "below the next": lambda n: columns(n) < rows(n) + 1,
    "of ones": lambda n: lower(n).bool(),
    "equal to one": lambda n: lower(n) == 1,
    "with four dimensions": lambda n: lower(n).bool().view(1, 1, n, n),
    "expanded": lambda n: lower(n).bool().expand(2, 3, n, n),
    "infinities": lambda n: torch.full((n, n), -torch.inf).triu(1),
    "filled": lambda n: torch.zeros(n, n).masked_fill(~lower(n).bool(), -torch.inf),
    "chosen": lambda n: torch.where(lower(n) > 0, 0.0, -torch.inf),
    "times the lowest": lambda n: (1.0 - lower(n)) * LOWEST,
    "part of a larger one": lambda n: lower(2 * n).bool()[:n, :n],
    "from the middle of one": lambda n: lower(2 * n).bool()[n:, n:],
    "a window of all": lambda n: (
        (columns(n) <= rows(n)) & (columns(n) > rows(n) - LENGTH)
    ),
    "counted": lambda n: counted(n)[None] <= counted(n)[:, None],
    "taken from the end": lambda n: columns(n) <= torch.arange(n)[rows(n) - n],
}

FOR_KNOWN_SIZES = (
    "repeated",
    "part of a larger one",
    "from the middle of one",
    "a window of all",
    "counted",
    "taken from the end",
    "the end of a larger one",
)
"""Masks that are computed where sizes are numbers, and stay where one is symbolic."""

NONE: dict[str, Mask] = {
    "ones": lambda n: torch.ones(n, n, dtype=torch.bool),
    "zeros": lambda n: torch.zeros(n, n),
    "one zero": lambda n: torch.zeros(1, 1, 1, 1),
    "one column": lambda n: torch.ones(n, 1, dtype=torch.bool),
    "positions": lambda n: (torch.arange(n)[:, None] >= 0).expand(n, n),
    "as transformers makes it": lambda n: (
        (torch.arange(n) + 0)[None, None, :, None] >= 0
    ).expand(2, -1, n, n),
    "the end of a larger one": lambda n: lower(2 * n).bool()[n:, :n],
    "filled nowhere": lambda n: torch.zeros(n, n).masked_fill(
        torch.arange(n)[None] < 0, -torch.inf
    ),
    "chosen everywhere": lambda n: torch.where(
        torch.arange(n)[None] >= 0, torch.zeros(n, n), LOWEST
    ),
}

OTHERS: dict[str, Mask] = {
    "packed, of two texts": packed_of_two,
    "repeated rows": lambda n: (columns(n) <= torch.arange(n // 2)[:, None]).repeat(
        n // (n // 2) + 1, 1
    )[:n],
    "the first key alone": lambda n: (torch.arange(n) < 1)[None],
    "written to": written_to,
    "assigned to": assigned_to,
    "one more": lambda n: torch.ones(n, n).tril(1).bool(),
    "and the next": lambda n: columns(n) < rows(n) + 2,
    "turned": lambda n: (columns(n) <= rows(n)).T,
    "a window": lambda n: (columns(n) <= rows(n)) & (columns(n) > rows(n) - 4),
    "a prefix": lambda n: torch.cat([torch.ones(n, 3), lower(n)[:, : n - 3]], 1).bool(),
    "every second": lambda n: columns(n) * 2 <= rows(n),
    "of one text alone": lambda n: (
        (torch.arange(2)[:, None, None, None] > 0) | lower(n).bool()
    ),
    "weak": lambda n: torch.full((n, n), -1e4).triu(1),
    "distances": lambda n: (columns(n) - rows(n)).abs() * -1e4,
    "ones but the last": lambda n: (torch.arange(n) < n - 1)[None].expand(n, n),
    "a constant": lambda n: torch.full((n, n), -1.0),
    "one that is added": lambda n: torch.ones(n, n),
    "not a number": lambda n: torch.zeros(n, n) * torch.inf,
}

KERNEL = {
    **dict.fromkeys(CAUSAL, CAUSAL_MASK),
    **dict.fromkeys(NONE, NO_MASK),
    **dict.fromkeys(OTHERS, ""),
}
"""What attention with each mask is found to be where sizes are numbers."""


def in_order(positions: Callable[[int], Tensor]) -> Mask:
    return lambda n: positions(n)[:, None] >= positions(n)


def starting(start: int, dtype: torch.dtype) -> Mask:
    return in_order(lambda n: (torch.arange(n) + start).to(dtype))


ROUNDED: dict[str, Mask] = {
    "float32": starting(2**24, torch.float32),
    "float16": starting(2**11, torch.float16),
    "bfloat16": starting(2**8, torch.bfloat16),
    "int32": starting(2**31 - 6, torch.int32),
    "int16": starting(2**15 - 6, torch.int16),
    "int8": starting(2**7 - 6, torch.int8),
    "uint8": starting(2**8 - 6, torch.uint8),
    "int64": in_order(lambda n: torch.arange(n) + (2**63 - 6)),
    "a product": in_order(lambda n: torch.arange(n) * 2**61),
    "a symbolic product": in_order(lambda n: torch.arange(n) + n * 2**60),
    "a difference": lambda n: (
        torch.arange(n, dtype=torch.uint8)[:, None] - torch.arange(n, dtype=torch.uint8)
        >= 0
    ),
    "a negative": in_order(lambda n: -torch.arange(n, dtype=torch.uint8)),
    "a sum": in_order(lambda n: torch.full((n,), 2.0**23).cumsum(0) * 3),
    "a start": in_order(lambda n: torch.arange(2**24, 2**24 + n).float()),
    "a start in float32": in_order(
        lambda n: torch.arange(2**24, 2**24 + n, dtype=torch.float32)
    ),
    "a part": in_order(lambda n: torch.arange(n + 2**24).float()[2**24 :]),
    "back again": in_order(lambda n: (torch.arange(n) + 2**24).float() - 2**24),
    "beside whole numbers": lambda n: (
        (torch.arange(n) + 2**24)[:, None].float() >= torch.arange(n) + 2**24
    ),
    "read in float32": lambda n: (
        ((torch.arange(n) + 2**24)[:, None] - torch.zeros(n))
        >= (torch.arange(n) + 2**24)
    ),
}
"""Masks of positions that some dtype rounds, or that wrap around in it."""


class Attending(nn.Module):
    def __init__(self, mask: Mask, **options: Any) -> None:
        super().__init__()
        self.project, self.mask, self.options = nn.Linear(24, 72), mask, options

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(x).view(len(x), -1, 3, 3, 8).permute(2, 0, 3, 1, 4)
        mask = self.mask(x.shape[1])
        return functional.scaled_dot_product_attention(
            *parts.unbind(), mask, **self.options
        )


def converted(model: nn.Module, **options: Any) -> nn.Module:
    torch._dynamo.reset()
    options = {"precision": "bf16", "do_no_harm": False, "strict": True} | options
    return autoamp.convert(copy.deepcopy(model), **options)


def found(model: nn.Module) -> list[str]:
    """For each graph what its attention was found to be."""
    report = autoamp.report(model)
    names = {op.graph: op.kernel for op in report.ops if op.kernel}
    return [names.get(at, "") for at in range(len(report.graphs))]


@pytest.mark.parametrize("name", KERNEL)
def test_a_mask_goes_or_stays_for_lengths_that_change(name: str) -> None:
    torch.manual_seed(0)
    model = Attending((CAUSAL | NONE | OTHERS)[name])
    ours = converted(model)
    for length in (LENGTH, 7, 9, 31):
        x = torch.randn(2, length, 24)
        made, true = ours(x), model(x)
        assert torch.equal(made.isnan(), true.isnan())
        assert true.isnan().all() or (made - true).norm() < 2**-6 * true.norm()
    of_any_size = "" if name in FOR_KNOWN_SIZES else KERNEL[name]
    assert found(ours) == [KERNEL[name], of_any_size]


@pytest.mark.parametrize("name", ["chosen", "ones", "a window"])
def test_gradients_are_those_of_the_mask(name: str) -> None:
    torch.manual_seed(0)
    model = Attending((CAUSAL | NONE | OTHERS)[name], scale=0.3)
    ours = converted(model)
    plain = converted(model, fuse={CAUSAL_MASK: False, NO_MASK: False})
    x, slopes = torch.randn(2, LENGTH, 24), []
    for each in (model, ours, plain):
        each(x).square().sum().backward()
        slopes.append(each.project.weight.grad)
    for slope in slopes[1:]:
        assert (slope - slopes[0]).norm() < 0.02 * slopes[0].norm()
    assert found(ours) == [KERNEL[name]]
    assert found(plain) == [""]


def test_a_mask_that_is_added_in_place_is_read_and_not_written() -> None:
    def causal(n: int) -> Tensor:
        mask = lower(n).bool()
        torch.zeros(n, n).masked_fill_(mask, 1.0)
        return mask

    ours = converted(Attending(causal))
    ours(torch.randn(2, LENGTH, 24))
    assert found(ours) == [CAUSAL_MASK]


def kernels_and_errors(masks: dict[str, Mask]) -> tuple[list[int], dict[str, float]]:
    """The graphs of calls that are told that they are causal, and each mask's error.

    The masks are read by one graph for a known length, and by one for other lengths.
    """
    torch.manual_seed(0)
    model = nn.ModuleList(map(Attending, masks.values()))
    ours = converted(Of(lambda of, x: [each(x) for each in of.all], all=model))
    errors = dict.fromkeys(masks, 0.0)
    for length in (LENGTH, 7):
        x = torch.randn(2, length, 24)
        for name, each, made in zip(masks, model, ours(x), strict=True):
            error = (made - each(x)).norm() / each(x).norm()
            errors[name] = max(errors[name], error.item())
    ops = autoamp.report(ours).ops
    return [op.graph for op in ops if op.kernel == CAUSAL_MASK], errors


def test_positions_that_a_dtype_cannot_hold_prove_nothing() -> None:
    told, errors = kernels_and_errors(ROUNDED)
    assert {name: e for name, e in errors.items() if not e < 2**-6} == {}
    assert 1 not in told  # what a known length makes of them is computed


def test_numbers_are_compared_in_the_dtype_that_a_kernel_reads() -> None:
    """In float32 a tenth is not Python's tenth, which float64 holds."""
    told, errors = kernels_and_errors(
        {"a tenth": lambda n: (torch.ones(n, n).triu(1) * 0.1) != 0.1}
    )
    assert errors["a tenth"] < 2**-6
    assert told == [0, 1]


def test_a_mask_of_other_queries_than_keys() -> None:
    """The first query sees the first key alone, as `is_causal` has it."""

    class Across(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(8, 8)

        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            q, k = (self.project(t)[:, None] for t in (q, k))
            shown = (
                torch.arange(k.shape[-2])[None] <= torch.arange(q.shape[-2])[:, None]
            )
            return functional.scaled_dot_product_attention(q, k, k, shown)

    for queries, keys in ((5, 9), (9, 5), (1, 6), (6, 1)):
        model = Across()
        given = torch.randn(2, queries, 8), torch.randn(2, keys, 8)
        ours = converted(model)
        error = (ours(*given) - model(*given)).norm() / model(*given).norm()
        assert error < 2**-6


@pytest.mark.parametrize("written", [False, True])
def test_a_bias_is_read_by_itself_where_no_key_is_hidden(written: bool) -> None:
    """As T5's encoder has it: the bias is learnt, and one for all layers."""

    def attend(m: Any, x: Tensor) -> Tensor:
        n = x.shape[1]
        shown = (torch.arange(n)[None, None, :, None] >= 0).expand(2, 1, n, n)
        bias = m.bias(torch.arange(n)[None, :] % 4).permute(2, 0, 1)[None]
        bias = bias + torch.zeros(n, 1)
        for layer in (m.a, m.b):
            q = layer(x).view(2, n, 3, 8).transpose(1, 2)
            mask = torch.where(shown, bias, LOWEST)
            if written:
                bias += 1.0
            x = (
                functional.scaled_dot_product_attention(q, q, q, mask)
                .transpose(1, 2)
                .flatten(2)
            )
        return x

    torch.manual_seed(0)
    parts = {name: nn.Linear(24, 24) for name in "ab"}
    model = Of(attend, bias=nn.Embedding(4, 3), **parts)
    x = torch.randn(2, LENGTH, 24)
    true = copy.deepcopy(model)
    ours = converted(model)
    for each in (ours, true):
        each(x).square().sum().backward()
    assert found(ours) == ["" if written else NO_MASK]
    gone = "where" not in autoamp.report(ours).graphs[0].code
    assert gone != written
    for one, other in zip(ours.parameters(), true.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert (one.grad - other.grad).norm() <= 0.03 * other.grad.norm()
