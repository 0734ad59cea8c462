"""How far a bf16 program may be from the truth: float64 runs with roundings put in.

An op that is computed low is the exact op on rounded operands, rounded once: its result
is off by a factor of 1 + d with |d| <= u, half the dtype's eps.  To first order the
error of a result is a sum over all such d, each times how much the result depends on
it.  Monte Carlo arithmetic (Parker 1997) finds the size of such a sum without knowing
the dependences: run the program in float64 with every d drawn as +u or -u at random,
forward and backward, and see how far it moves.  By Hoeffding's inequality a sum of
independent errors of at most these sizes exceeds LIMIT times that root mean square with
a probability of at most 2 exp(-LIMIT**2 / 2).  Ill-conditioned programs move further,
and are allowed to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

LIMIT = 5.0
"""2 exp(-12.5) is 7e-6: about one tensor in the hundred thousand a run might compare,
were every rounding as large as it can be; they are 0.4 of that on average."""

DRAWS = 6

Tensors = Mapping[str, Tensor]


_ATEN = torch.ops.aten
_SELECT = {_ATEN.amax.default, _ATEN.amin.default, _ATEN.where.self}
"""Ops that pass on what they are given: nothing to round (and the backward of `amax`
asks where its result was found)."""


class Roundings(TorchDispatchMode):
    """Multiplies every float64 result by 1 + u or 1 - u, element by element."""

    def __init__(self, unit: float, generator: torch.Generator) -> None:
        super().__init__()
        self.unit, self.generator = unit, generator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _SELECT or any(
            r.alias_info is not None for r in func._schema.returns
        ):
            return result  # a choice, a view or a write
        return pytree.tree_map_only(Tensor, self.perturbed, result)

    def perturbed(self, value: Tensor) -> Tensor:
        if value.dtype != torch.float64:
            return value
        signs = torch.randint(0, 2, value.shape, generator=self.generator)
        return value * (1 + self.unit * (2 * signs - 1))


def deviation(
    run: Callable[[nn.Module], Tensors], make: Callable[[], nn.Module], unit: float
) -> tuple[Tensors, dict[str, float]]:
    """The true results, and by how much roundings of `unit` move each of them.

    Args:
        run: calls the model forward and backward on float64 inputs; gives results.
        make: a float64 model, the same each time.
    """
    truth = run(make())
    squares = dict.fromkeys(truth, 0.0)
    for draw in range(DRAWS):
        generator = torch.Generator().manual_seed(draw)
        mode = Roundings(unit, generator)
        model = make()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(mode.perturbed(parameter))
        with mode:
            moved = run(model)
        for name, value in truth.items():
            squares[name] += relative(moved[name], value) ** 2
    return truth, {name: (s / DRAWS) ** 0.5 for name, s in squares.items()}


def relative(found: Tensor, true: Tensor) -> float:
    """The norm of the difference over the norm of the truth."""
    difference = torch.linalg.vector_norm(found.double() - true)
    return float(difference / torch.linalg.vector_norm(true).clamp(min=1e-30))
