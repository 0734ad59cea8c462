"""Finds masks that are the causal one, or hide no key, so that no mask is needed.

Captured, a model of transformers makes its masks from index numbers, and the attention
reads the mask, widens it and keeps it for the backward.  A kernel that is told
`is_causal=True` needs no mask, and skips the products that the mask hides.  A mask of
an encoder that hides no key says nothing; on GPUs it may lead to the attention
that torch computes by products in fp32, where there is none such without a mask.

A mask is causal, or shows all keys, if a statement about its positions says so, as it
is broadcast to all queries and keys, for every size that the graph may run with
(`shared/positions/`).  Where the sizes are known numbers, the mask is computed besides,
by torch, and has to agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from autoamp.kernels.shared.constants import constant
from autoamp.kernels.shared.positions.reading import Positions
from autoamp.kernels.shared.positions.sizes import shape_of
from autoamp.kernels.shared.positions.statements import (
    HOLDS,
    AtMostZero,
    Choice,
    Every,
    Some,
    Statement,
    Whole,
    opposite,
    simplified,
)

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
MASK, DROPOUT, CAUSAL = 3, 4, 5
"""The positions of `attn_mask`, `dropout_p` and `is_causal` among the arguments."""

_CAUSAL = AtMostZero(Whole(((-2, -1), (-1, 1)), 0))
"""The key's position less the query's is at most 0, counted from the first of each."""

LOWEST = torch.finfo(torch.float32).min
"""A number that hides a key where it is added: the sum with any score below 1e31 is
this number again, in fp32, and has no weight beside a score that is shown."""

_LARGEST = 2**22
"""The most elements of a mask that is computed to check a statement."""


def needless_masks(
    graph: fx.Graph, positions: Positions
) -> Iterator[tuple[fx.Node, bool]]:
    """The calls of torch's attention that need no mask, each with whether it is causal.

    The mask of such a call hides just the later keys, or no key.
    """
    for node in graph.find_nodes(op="call_function", target=ATTENTION):
        mask = node.args[MASK] if len(node.args) > MASK else None
        says_causal = len(node.args) > CAUSAL and node.args[CAUSAL]
        if not isinstance(mask, fx.Node) or says_causal:
            continue
        scores = [shape_of(node.args[at])[-2] for at in (0, 1)]
        if shows_no_later_keys(mask, positions, scores):
            yield node, True
        elif _shows_all_keys(mask, positions):
            yield node, False


def needless_choices(
    graph: fx.Graph, positions: Positions
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The attention whose mask is a bias wherever a mask that hides no key says so.

    Captured, encoders with a bias by distance make `where(shown, bias, lowest)` for
    each layer, as large as the scores of all texts; the bias is one for all of them.

    Yields:
        A call of torch's attention, and the bias.
    """
    for node in graph.find_nodes(op="call_function", target=ATTENTION):
        mask = node.args[MASK] if len(node.args) > MASK else None
        if not isinstance(mask, fx.Node) or mask.target not in _CHOICES:
            continue
        shown, bias = mask.args[:2]
        if isinstance(shown, fx.Node) and isinstance(bias, fx.Node):
            stays = positions.is_never_written(bias) and _broadcasts(bias, mask)
            if stays and _shows_all_keys(shown, positions):
                yield node, bias


_CHOICES = (torch.ops.aten.where.self, torch.ops.aten.where.ScalarOther)


def _broadcasts(bias: fx.Node, mask: fx.Node) -> bool:
    """Whether attention reads a bias as the mask, which is as wide or wider."""
    one, other = shape_of(bias), shape_of(mask)
    same = bias.meta["val"].dtype == mask.meta["val"].dtype
    return same and len(one) == len(other) and one[-2:] == other[-2:]


def shows_no_later_keys(mask: Any, positions: Positions, sizes: list[Any]) -> bool:
    """Whether a mask shows a query the keys up to its own position, and only these.

    Args:
        mask: a node: bools, True where a key is shown, or numbers that are added.
        sizes: the numbers of queries and keys.
    """
    shown = _shown(positions.of(mask))
    return shown is not None and _is_causal(mask, shown, sizes, shows=True)


def hides_later_keys(mask: Any, positions: Positions, sizes: list[Any]) -> bool:
    """As `shows_no_later_keys`, of bools that are True where a key is hidden."""
    hidden = positions.of(mask)
    if not isinstance(hidden, (AtMostZero, Every, Some)):
        return False
    return _is_causal(mask, opposite(hidden), sizes, shows=False)


def _shows_all_keys(mask: fx.Node, positions: Positions) -> bool:
    found = positions.of(mask)
    shown = HOLDS if found == 0 else _shown(found)
    if shown is None or simplified(shown, shape_of(mask)) != HOLDS:
        return False
    return _agrees(
        mask, lambda shape: torch.ones(shape, dtype=torch.bool, device="cpu")
    )


def _shown(found: Any) -> Statement | None:
    """Where a mask shows a key, of bools or of numbers that are added."""
    if isinstance(found, (AtMostZero, Every, Some)):
        return found
    if not isinstance(found, Choice):
        return None
    if found.number == 0 and found.otherwise <= LOWEST:
        return found.where
    if found.otherwise == 0 and found.number <= LOWEST:
        return opposite(found.where)
    return None


def _is_causal(
    mask: fx.Node, shown: Statement, sizes: list[Any], *, shows: bool
) -> bool:
    shape = shape_of(mask)
    if len(shape) < 2 or simplified(shown, shape) != _CAUSAL or shape[-2:] != sizes:
        return False
    return _agrees(mask, _lower if shows else lambda shape: ~_lower(shape))


def _lower(shape: tuple[int, ...]) -> Tensor:
    return torch.ones(shape[-2:], dtype=torch.bool, device="cpu").tril()


def _agrees(mask: fx.Node, expected: Callable[[tuple[int, ...]], Tensor]) -> bool:
    """Whether the mask that torch computes is the one expected, where it is computed.

    Args:
        expected: makes bools of a shape; numbers are 0 where these bools are True.
    """
    sizes = mask.meta["val"].shape
    if not all(isinstance(s, int) for s in sizes) or math.prod(sizes) > _LARGEST:
        return True
    found = constant(mask)
    if found is None:
        return False  # the mask is made by ops that are not read here
    seen = expected(tuple(sizes))
    if found.dtype == torch.bool:
        return bool((found == seen).all())
    hidden = found <= LOWEST
    return bool(((found == 0) & seen | hidden & ~seen).all())
