"""Small models, and the pass run on them without a conversion round it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autoamp
from autoamp.dtypes import parse_low_dtype
from autoamp.passes import list as passes
from autoamp.passes.graph_record import Rewritten
from autoamp.passes.rules import Category, Rule, Rules
from autoamp.passes.run import rewrite_graph
from autoamp.training.options import Options
from tests.metrics import relative_error
from tests.strategies import capture

WIDTH = 8
CLOSE = 0.02
"""bf16 rounds a few layers by less; what is stale, or another's, is off by far more."""
BF16: dict[str, Any] = {"precision": "bf16", "do_no_harm": False}
"""Whatever may run in bf16 does, whether it pays or not."""


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


class Quiet(TorchDispatchMode):
    """Changes nothing; its presence makes Dynamo step aside."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


class Between(nn.Module):
    """Two layers, between which a sub-class plants its fault."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))


def converted(model: nn.Module, **options: Any) -> Any:
    """`model` converted to bf16, where nothing that fails is left in fp32 silently."""
    return autoamp.convert(model, **{**BF16, "strict": True, **options})


def is_rounded(found: Any, exact: Any, close: float = CLOSE) -> bool:
    """Close to the fp32 result and not equal to it: it went through 16 bits."""
    assert found.dtype is exact.dtype
    return 0 < relative_error([found], [exact]) < close


def runs(model: nn.Module) -> int:
    """How many rewritten graphs of a model have run."""
    return int(autoamp.report(model).runs)


def rewritten(
    model: nn.Module,
    given: Sequence[Any],
    precision: str,
    *,
    free_weights: bool = False,
    price: Any = None,
    **options: Any,
) -> Rewritten:
    """The pass's result for one call of `model`, with do-no-harm off by default.

    Args:
        price: gives the prices of ops and casts; by default those of the device.
    """
    low = parse_low_dtype(precision)
    assert low is not None
    chosen = Options(precision=precision, **{"do_no_harm": False, **options})
    gm = capture(model, len(given))
    with mock.patch.object(passes, "price_graph", price or passes.price_graph):
        return rewrite_graph(gm, given, chosen, low, free_weights=free_weights)


def rewriting(
    make: Callable[..., nn.Module],
    x: Callable[[], torch.Tensor],
    precision: str,
    *,
    grad: bool = True,
    **defaults: Any,
) -> Callable[..., Rewritten]:
    """`rewritten` for functions: `make` makes a model of one, and `x` its input.

    What it returns is called with the function, or with a model that is made already,
    with inputs if they are others than `x()`, and with other options.
    """

    def of_function(
        function: Callable[..., Any], *given: Any, grad: bool = grad, **options: Any
    ) -> Rewritten:
        model = function
        if not isinstance(model, nn.Module):
            model = make(function).requires_grad_(grad)
        asked = {"precision": precision, **defaults, **options}
        return rewritten(model, given or (x(),), **asked)

    return of_function


def node(found: Rewritten, name: str) -> fx.Node:
    return next(n for n in found.gm.graph.nodes if n.name == name)


def deny_everything(ops: Iterable[str]) -> Rules:
    """Rules that keep each of `ops`, by their base names, in fp32."""
    rules = {op: Rule(op, Category.DENY, "everything is denied", "test") for op in ops}
    return Rules("deny everything", rules)
