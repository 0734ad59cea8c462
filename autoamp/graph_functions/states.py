"""Recurrent ops that a CPU runs in low precision with their state in fp32.

`torch.autocast` has no rule for these ops on CPUs: under autocast their composite
kernels run op by op, with low products and a sum, for the next state, that is as wide
as the state.  Without autocast the kernels want all operands in one dtype, and would
round the state at every step.

An LSTM that one kernel of oneDNN's runs has a low state under autocast too.  Autocast
casts the input for each direction by itself, so that the gradients of both directions
are summed in fp32: a bidirectional layer reads its input as wide as the input is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autoamp import compat

_ATEN = torch.ops.aten
_LAYERS = ("gru", "lstm", "rnn_tanh", "rnn_relu")
_CELLS = ("gru_cell", "lstm_cell")


def _with_fp32_state(op: compat.OpOverload) -> Callable[..., Any]:
    """A function for `op`, of a low input and low weights, `hx` and results fp32."""
    names = [argument.name for argument in compat.schema(op).arguments]
    at = names.index("params" if "params" in names else "w_ih")

    def run(*args: Any) -> Any:
        low = args[at] if isinstance(args[at], Tensor) else args[at][0]
        with torch.autocast(low.device.type, low.dtype, cache_enabled=False):
            results = op(*args)
        # What autocast gives is not one dtype: a projection (`proj_size`) is a product,
        # and kernels for sequences of equal lengths give low results.  All code after
        # the op was captured for fp32 results.
        if isinstance(results, Tensor):
            return _as_fp32(results)
        return tuple(map(_as_fp32, results))

    name = compat.schema(op).name.removeprefix("aten::")
    name += "_data" if "batch_sizes" in names else ""
    run.__name__ = run.__qualname__ = f"{name}_fp32_state"
    return run


def _as_fp32(result: Tensor) -> Tensor:
    """A result in fp32; in an export by a cast whatever dtype the fake result has.

    Which kernel runs, and so the dtype of its results, is known when it runs.
    """
    if compat.is_exporting():
        return _ATEN._to_copy.default(result, dtype=torch.float32)  # type: ignore[no-any-return]
    return result.float()


WITH_FP32_STATE: Mapping[compat.OpOverload, Callable[..., Any]] = {
    op: _with_fp32_state(op)
    for op in (
        *(getattr(_ATEN, name).input for name in _LAYERS),
        *(getattr(_ATEN, name).data for name in _LAYERS),
        *(getattr(_ATEN, name).default for name in _CELLS),
    )
}
"""ATen op to the function that runs the op on a CPU with its state in fp32.

CUDA kernels take all operands in one dtype, under autocast too."""

STATE, BOTH_WAYS = "hx", "bidirectional"
"""The arguments that hold the state, in each of the ops, and whether a layer reads its
input, the first argument, for two directions."""

globals().update({run.__name__: run for run in WITH_FP32_STATE.values()})
"""Graphs, printed or pickled, call each function by its name in this file."""

_OPS = {function: op for op, function in WITH_FP32_STATE.items()}


def op_with_its_state(target: Any) -> Any:
    """The op that `target` runs with its state in fp32, or else `target` itself."""
    return _OPS.get(target, target)
