"""How far rounding can move a result, derived from the program that ran.

The ATen graph of a call, forward and backward together and decomposed as it runs,
shows every value that is rounded to a low dtype.  It is run again in float64, on the
decisions that the low run made (indices, masks, random numbers), and differentiated.
To first order an element of a result is off by no more than

    sum over low values v of |d element / d v| * (eps * |v| + least)

where `eps` is the spacing of the low dtype at 1 and `least` its smallest number.  One
rounding is off by half of that; the other half is for terms of second order, and for
what kernels round inside.  The same sum over fp32 values, with fp32's spacing times the
terms that a kernel adds up, is the share of the fp32 arithmetic.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

LOW = (torch.float16, torch.bfloat16)
FLOATS = (*LOW, torch.float32)
TERMS = 256
"""Terms that an fp32 kernel adds up in these small tests, at most, each one rounding.
All together they are a thirtieth of one rounding to fp16."""

_SAME = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("detach", "detach_copy", "alias", "alias_copy")
)
"""Ops that hand their operand on; values flow through them, if no gradient does."""

_DECIDES = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("threshold_backward", "leaky_relu_backward", "hardtanh_backward")
)
"""Ops that choose by comparing their second operand, and use it for nothing else."""


def traced(run: Callable[..., Any], given: Sequence[Any]) -> fx.GraphModule:
    """The functional ATen graph of `run(*given)`, autograd's part in it included."""
    once = make_fx(run)(*given)
    with torch.no_grad():
        pure = torch.func.functionalize(once, remove="mutations_and_views")
        return make_fx(pure)(*given)


class _LowRun(fx.Interpreter):
    """Runs a graph as it is, and keeps dtypes and decisions."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.kept: dict[fx.Node, Any] = {}
        self.decided: set[fx.Node] = set()
        self.dtypes: dict[fx.Node, list[torch.dtype]] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        self.dtypes[n] = [t.dtype for t in tensors]
        random = torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())
        if n.op == "call_function" and (random or not any(map(_floats, tensors))):
            self.decided.add(n)
        if n in self.decided or any(user.target in _DECIDES for user in n.users):
            self.kept[n] = pytree.tree_map(_exact, result)
        return result


class _ExactRun(fx.Interpreter):
    """Runs it in float64 on the decisions of `low`, an unknown added to each value.

    Attributes:
        unknowns: (zeros that a gradient is asked for, the value, its dtype in `low`).
    """

    def __init__(self, gm: fx.GraphModule, low: _LowRun) -> None:
        super().__init__(gm)
        self.low = low
        self.unknowns: list[tuple[Tensor, Tensor, torch.dtype]] = []

    def run_node(self, n: fx.Node) -> Any:
        if n in self.low.decided:
            return self.low.kept[n]
        if n.target in _SAME:
            return self.fetch_args_kwargs_from_env(n)[0][0]
        result = pytree.tree_map(_exact, super().run_node(n))
        if n.op == "placeholder" and _floats(result):
            return result.detach().requires_grad_()
        if n.op != "call_function" or n.target is operator.getitem:
            return result
        dtypes = iter(self.low.dtypes[n])
        several = not isinstance(result, Tensor)

        def unknown(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            dtype = next(dtypes)
            saved = several and not value.requires_grad  # statistics kept for backward
            if not _floats(value) or dtype not in FLOATS or saved:
                return value
            zeros = torch.zeros_like(value, requires_grad=True)
            self.unknowns.append((zeros, value.detach(), dtype))
            return value + zeros

        return pytree.tree_map(unknown, result)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map(_exact, (args, kwargs))
        return super().call_function(target, args, kwargs)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        if n.target in _DECIDES:
            args = (args[0], self.low.kept[n.args[1]], *args[2:])
        return args, kwargs


def _floats(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _exact(value: Any) -> Any:
    """Float tensors and dtypes as float64."""
    if isinstance(value, torch.dtype) and value in FLOATS:
        return torch.float64
    return value.double() if _floats(value) else value


@dataclass(frozen=True)
class Exact:
    """The results in float64, differentiable by what rounding adds to each value."""

    results: list[Any]
    unknowns: list[tuple[Tensor, Tensor, torch.dtype]]

    def bound(self, result: int, element: int) -> float:
        """How far `element` of result number `result` may be off."""
        at = self.results[result].flatten()[element]
        total = 2.0**-149
        if not at.requires_grad:
            return total
        zeros = [u for u, _, _ in self.unknowns]
        slopes = torch.autograd.grad(at, zeros, retain_graph=True, allow_unused=True)
        for slope, (_, value, dtype) in zip(slopes, self.unknowns, strict=True):
            if slope is not None:
                total += float((slope.abs() * spacing(value, dtype)).sum())
        return total


def spacing(value: Tensor, dtype: torch.dtype) -> Tensor:
    """What a value of `dtype` may be off by when it was made."""
    info = torch.finfo(dtype)
    eps = info.eps if dtype in LOW else info.eps * TERMS
    return eps * value.abs() + info.smallest_normal * info.eps


def exact(gm: fx.GraphModule, given: Sequence[Any]) -> tuple[list[Any], Exact]:
    """What graph `gm` computes, and the same in float64 on the same decisions."""
    low = _LowRun(gm)
    with torch.no_grad():
        found = pytree.tree_leaves(low.run(*given))
    run = _ExactRun(gm, low)
    results = pytree.tree_leaves(run.run(*pytree.tree_map(_exact, list(given))))
    return found, Exact(results, run.unknowns)


def worst(found: Sequence[Any], is_exact: Exact) -> float:
    """The largest error over its bound, one element of each result looked at."""
    ratio = 0.0
    for i, (ours, theirs) in enumerate(zip(found, is_exact.results, strict=True)):
        if not _floats(ours) or not ours.numel():
            continue
        error = (
            (ours.detach().double() - theirs.detach()).abs().flatten().nan_to_num(0.0)
        )
        element = int(error.argmax())
        if error[element] > 0:
            bound = is_exact.bound(i, element)
            ratio = max(ratio, float(error[element]) / bound)
    return ratio
