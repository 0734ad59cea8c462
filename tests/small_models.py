"""Small models, and the pass run on them without a conversion round it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from autoamp.dtypes import parse_low_dtype
from autoamp.options import Options
from autoamp.pipeline.run import rewrite_graph
from autoamp.rewrite.rewritten import Rewritten
from tests.strategies import capture

WIDTH = 8


def mlp() -> nn.Sequential:
    """8 features in, 4 out."""
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, 4))


class Of(nn.Module):
    """A model that calls one function with itself and its inputs.

    Its parts are what the function finds on it: layers, parameters, and buffers made of
    other tensors.

    Example:
        >>> Of(lambda m, x: m.fc(x).exp(), fc=nn.Linear(8, 8))
    """

    def __init__(
        self, function: Callable[..., Any], **parts: nn.Module | torch.Tensor
    ) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *given: Any) -> Any:
        return self.function(self, *given)


def rewritten(
    model: nn.Module,
    given: Sequence[Any],
    precision: str,
    *,
    free_weights: bool = False,
    **options: Any,
) -> Rewritten:
    """The pass's result for one call of `model`, with do-no-harm off by default."""
    low = parse_low_dtype(precision)
    assert low is not None
    chosen = Options(precision=precision, **{"do_no_harm": False, **options})
    gm = capture(model, len(given))
    return rewrite_graph(gm, given, chosen, low, free_weights=free_weights)
