"""The changes that a pass may make to a graph, and the calls that it may add."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autoamp.graph_functions import (
    FOR_COMPILERS,
    laid_out,
    low_uses,
    low_weight,
    low_weight_unscaled,
    saturating_cast,
    scale_grad,
    scaled_result,
    traced_scale_grad_,
    traced_scale_grad_apart,
    unscale_grad,
    unscale_grad_,
    unscale_half,
    with_dtypes,
)

_ATEN = torch.ops.aten

CASTS = frozenset({_ATEN._to_copy.default, saturating_cast})
USES = frozenset({low_weight, low_uses})
EDGE = frozenset(
    {
        low_weight_unscaled,
        scale_grad,
        scaled_result,
        unscale_grad,
        unscale_grad_,
        unscale_half,
        traced_scale_grad_,
        traced_scale_grad_apart,
        *FOR_COMPILERS.values(),
    }
)
SCALED_CASTS = frozenset({scaled_result, FOR_COMPILERS[scaled_result]})
RESHAPES = frozenset({_ATEN.unsqueeze.default, _ATEN.squeeze.dim})
LAYOUTS = frozenset({laid_out})
COPIES = frozenset({_ATEN.clone.default})

OWN_MEMORY = CASTS | LAYOUTS | COPIES | {with_dtypes}
"""Added calls whose result does not follow later writes to the operand."""


@dataclass(frozen=True)
class May:
    """The changes that a pass may make.

    Attributes:
        add: targets of calls that stand for their first operand.
        copies: for each input that is added, the input that it is a copy of; None for
            an input that the added calls alone read.
        fold: whether casts of the graph's constants may be made once, as constants.
        replace: whether calls may be replaced by calls that give the same numbers.
        lay_out: whether values inside the graph may have other strides.
        rename: the functions that may be called in the place of a function, on the
            same operands; what they compute is checked elsewhere.
        redtyped: names of nodes that are recorded with other dtypes than before, and
            that a cast follows.
    """

    add: frozenset[Any] = frozenset()
    copies: Mapping[str, str | None] = field(default_factory=dict)
    fold: bool = False
    replace: bool = False
    lay_out: bool = False
    rename: Mapping[Any, Collection[Any]] = field(default_factory=dict)
    redtyped: Collection[str] = frozenset()
