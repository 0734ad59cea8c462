"""Names autoamp's casts in what torch's profiler records.

The code of a graph has no ranges, which would cost time in every call.  While a
profiler records, a copy of the code runs, in which each inserted cast is a range.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.profiler import record_function

from autoamp import compat
from autoamp.dtypes import short_name
from autoamp.passes.functions import scaled_result
from autoamp.passes.graph_record import Prepared
from autoamp.passes.write.copied import copied
from autoamp.passes.write.emitted import Cast

_Run = Callable[..., Any]
_Fresh = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]

_named: weakref.WeakKeyDictionary[fx.GraphModule, fx.GraphModule] = (
    weakref.WeakKeyDictionary()
)
"""The code of graphs that were profiled, each to the same code with ranges."""


def with_ranges(prepared: Prepared) -> _Run:
    """`prepared.run` with a range round each cast: "autoamp: down cast of x to bf16".

    A graph that is compiled, or runs for the first time, has no code of ours to copy,
    and runs as it is.
    """
    code = getattr(prepared.run, "__self__", None)
    if prepared.rewritten is None or not isinstance(code, fx.GraphModule):
        return prepared.run
    if code not in _named:
        named, _ = copied(code)
        casts = prepared.rewritten.casts
        by_name = {each.name: each for each in casts}
        by_value = {each.value: each for each in casts if each.kind == "up"}
        for node in named.graph.nodes:
            cast = by_name.get(node.name)
            # A cast at the edge, which is one with the loss scale.
            if node.target is scaled_result:
                cast = by_value.get(node.args[0].name)
            if cast is not None and node.op == "call_function":
                node.target = _in_range(node.target, cast)
        compat.make_code(named)
        _named[code] = named
    return _named[code].forward


def refreshed_in_range(fresh: _Fresh, low: torch.dtype) -> _Fresh:
    """`fresh`, which gives the low copies of weights, in a range of its own."""

    def named(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with record_function(f"autoamp: weight copies in {short_name(low)}"):
            return fresh(weights)

    return named


def _in_range(target: _Run, cast: Cast) -> _Run:
    label = f"autoamp: {cast.kind} cast of {cast.value} to {short_name(cast.dtype)}"

    def named_cast(*args: Any, **kwargs: Any) -> Any:
        with record_function(label):
            return target(*args, **kwargs)

    return named_cast
