"""Makes fake tensors whose sizes are all free, and tells what a trace took for granted.

A trace with `FreeSizes` writes down a condition wherever the code that is traced asks
for the value of a size or a number.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config, proxy_tensor, sym_node, symbolic_shapes
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

sympy: Any = symbolic_shapes.sympy  # type: ignore[attr-defined]
"""Torch requires it, in the version that its expressions are made with."""

FREE, FIXED = DimDynamic.DYNAMIC, DimDynamic.STATIC
_SHAPES_ITS_RANK = ("aten::squeeze", "aten::squeeze_", "aten::squeeze_copy")
"""Ops whose result has fewer dimensions where a size is 1."""


def _code(function: Any) -> CodeType:
    code = function.__code__
    assert isinstance(code, CodeType)
    return code


_OPS = {_code(proxy_tensor.proxy_call), _code(FakeTensorMode.dispatch)}
_PARTS = _code(proxy_tensor.maybe_handle_decomp)
_ASKED = _code(sym_node.SymNode.guard_bool)
_PYTHON_ASKS = {module.__file__ for module in (torch, sym_node, symbolic_shapes)}


def _within_one_op() -> bool:
    """Whether an op that is one node of the trace asks, and no code around that op."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        caller = frame.f_back
        # Code in C++ outside an op asks for layouts: `contiguous` records no op if it
        # has nothing to do.  Python asks by way of other functions of torch's.
        by = "" if caller is None else caller.f_code.co_filename
        if frame.f_code is _ASKED and by not in _PYTHON_ASKS:
            return True
        if frame.f_code is _PARTS:
            return False
        if frame.f_code in _OPS:
            op = frame.f_locals.get("func")
            return not str(getattr(op, "name", str)()).startswith(_SHAPES_ITS_RANK)
        frame = caller
    return False


class FreeSizes(ShapeEnv):
    """The symbols of a trace, in which two equal sizes, 0 and 1 are nothing special.

    An op that asks for a difference (for "fewer than 16", "not 1") asks again at each
    run, so that a graph with that op is right for all sizes.  An equality between sizes
    is kept, because the trace writes one of them in the place of the other.
    """

    def __init__(self) -> None:
        super().__init__(specialize_zero_one=False, duck_shape=False)

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(orig_expr, sympy.logic.boolalg.Boolean) and _within_one_op():
            known = dict(self.backed_var_to_val)
            value = orig_expr.xreplace(known)
            asked = orig_expr.atoms(sympy.Eq, sympy.Ne)
            equal = any(e.lhs.xreplace(known) == e.rhs.xreplace(known) for e in asked)
            if not equal and value in (sympy.true, sympy.false):
                return value
        return super().evaluate_expr(orig_expr, *args, **kwargs)

    def fixed(self) -> dict[Any, Any]:
        """The symbols that can have one value alone, with their values."""
        every = {s: self.replace(s) for s in self.backed_var_to_val}
        found = {s: value for s, value in every.items() if value.is_number}
        known = -1
        while known < len(found):  # a symbol found may leave one in another equation
            known = len(found)
            for asked in (guard.expr.xreplace(found) for guard in self.guards):
                # A linear equation in one symbol has the value at hand alone.
                if isinstance(asked, sympy.Eq) and len(asked.free_symbols) == 1:
                    (symbol,) = asked.free_symbols
                    difference = asked.lhs - asked.rhs
                    linear = difference.is_polynomial(symbol)
                    if linear and sympy.degree(difference, symbol) == 1:
                        found[symbol] = self.backed_var_to_val[symbol]
        return found

    def conditions(self) -> list[Any]:
        """All else that holds for the symbols, as expressions of `sympy`."""
        fixed = self.fixed()
        found = [guard.expr.xreplace(fixed) for guard in self.guards]
        return [each for each in dict.fromkeys(found) if each is not sympy.true]


def free_inputs(
    values: Sequence[Any], is_free: Callable[[Any], bool]
) -> tuple[list[Any], FreeSizes]:
    """`values` as fake tensors and symbolic numbers of a new mode.

    Args:
        is_free: whether a size, or a number among the inputs, is to be a symbol.
    """
    sizes = FreeSizes()
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes)

    def made(at: int, value: Any) -> Any:
        source: Any = ConstantSource(f"input_{at}")
        if isinstance(value, torch.Tensor):
            free = [FREE if is_free(size) else FIXED for size in value.shape]
            symbolic: Any = StatelessSymbolicContext(
                dynamic_sizes=free, constraint_sizes=[None] * value.dim()
            )
            return mode.from_tensor(
                value, static_shapes=False, symbolic_context=symbolic, source=source
            )
        if type(value) not in (int, float) or not is_free(value):
            return value
        symbol = sizes.create_unspecified_symbol(value, source, FREE)
        if type(value) is int:
            return sizes.create_symintnode(symbol, hint=value, source=source)
        return sizes.create_symfloatnode(symbol, hint=value, source=source)

    return [made(i, value) for i, value in enumerate(values)], sizes


def oblivious() -> contextlib.AbstractContextManager[Any]:
    """A region in which no trace asks whether a free size is 1 where it need not."""
    region: contextlib.AbstractContextManager[Any]
    region = _config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    return region


def symbol_of(value: Any) -> Any:
    """The symbol of a free size or number; None for a number or another expression."""
    expression = getattr(getattr(value, "node", None), "_expr", None)
    return expression if isinstance(expression, sympy.Symbol) else None


def recorded_condition(
    condition: Any, values: Mapping[Any, fx.Node]
) -> tuple[fx.Node, bool]:
    """A node added to the graph of `values`, and its value if the condition holds."""
    # A function of two proxies, such as `min`, asks that they have one tracer.
    tracer = fx.proxy.GraphAppendingTracer(next(iter(values.values())).graph)
    proxies = {symbol: fx.Proxy(node, tracer) for symbol, node in values.items()}
    # Dynamo does not follow the function by which torch negates an equality.
    differ = isinstance(condition, sympy.Ne)
    asked = sympy.Eq(condition.lhs, condition.rhs) if differ else condition
    result: fx.Proxy = sympy_interp(PythonReferenceAnalysis, proxies, asked)
    return result.node, not differ


def condition_text(condition: Any, names: Mapping[Any, str]) -> str:
    """A condition as a reader of the model's code would write it."""
    return str(condition.xreplace({s: sympy.Symbol(n) for s, n in names.items()}))
