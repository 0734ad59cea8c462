"""Finds masks that are the causal one, so that a kernel can be told instead.

Captured, a model of transformers makes its causal mask from index numbers, and the
attention reads the mask, widens it and keeps it for the backward.  A kernel that is
told `is_causal=True` needs no mask, and skips the products that the mask hides.

A mask is causal if a statement about its positions says so, as it is broadcast to all
queries and keys, for every size that the graph may run with (`shared/positions/`).
Where the sizes are known numbers, the mask is computed besides, by torch, and has to
agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from autoamp.kernels.shared.constants import constant
from autoamp.kernels.shared.positions.reading import Positions
from autoamp.kernels.shared.positions.sizes import shape_of
from autoamp.kernels.shared.positions.statements import (
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


def causal_attention(graph: fx.Graph) -> Iterator[fx.Node]:
    """The calls of torch's attention with a mask that hides just the later keys."""
    positions = Positions(graph)
    for node in graph.find_nodes(op="call_function", target=ATTENTION):
        mask = node.args[MASK] if len(node.args) > MASK else None
        says_causal = len(node.args) > CAUSAL and node.args[CAUSAL]
        if not isinstance(mask, fx.Node) or says_causal:
            continue
        scores = [shape_of(node.args[at])[-2] for at in (0, 1)]
        if shows_no_later_keys(mask, positions, scores):
            yield node


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
    if len(shape) < 2 or simplified(shown, shape) != _CAUSAL:
        return False
    return shape[-2:] == sizes and _agrees(mask, shows=shows)


def _agrees(mask: fx.Node, *, shows: bool) -> bool:
    """Whether the mask that torch computes is the causal one, where one is computed."""
    sizes = mask.meta["val"].shape
    if not all(isinstance(s, int) for s in sizes) or math.prod(sizes) > _LARGEST:
        return True
    found = constant(mask)
    if found is None:
        return False  # the mask is made by ops that are not read here
    seen = torch.ones(sizes[-2:], dtype=torch.bool, device="cpu").tril()
    if found.dtype == torch.bool:
        return bool((found == (seen if shows else ~seen)).all())
    hidden = found <= LOWEST
    return bool(((found == 0) & seen | hidden & ~seen).all())
