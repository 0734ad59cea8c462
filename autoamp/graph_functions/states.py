"""Recurrent ops that a CPU runs in low precision with their state in fp32.

`torch.autocast` has no rule for these ops on CPUs: under autocast their composite
kernels run op by op, with low products and a sum, for the next state, that is as wide
as the state.  Without autocast the kernels want all operands in one dtype, and would
round the state at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autoamp import compat

_ATEN = torch.ops.aten


def gru_fp32_state(*args: Any) -> Any:
    """`aten.gru.input` of a low input and low weights, `hx` and the results fp32."""
    return _stepwise(_ATEN.gru.input, args)


def gru_data_fp32_state(*args: Any) -> Any:
    """`aten.gru.data` (a packed sequence) of low data and weights, `hx` in fp32."""
    return _stepwise(_ATEN.gru.data, args)


def lstm_data_fp32_state(*args: Any) -> Any:
    """`aten.lstm.data` (a packed sequence) of low data and weights, `hx` in fp32."""
    return _stepwise(_ATEN.lstm.data, args)


def gru_cell_fp32_state(*args: Any) -> Any:
    """`aten.gru_cell` of a low input and low weights, `hx` and the result fp32."""
    return _stepwise(_ATEN.gru_cell.default, args)


def lstm_cell_fp32_state(*args: Any) -> Any:
    """`aten.lstm_cell` of a low input and low weights, `hx` and the results fp32."""
    return _stepwise(_ATEN.lstm_cell.default, args)


def _stepwise(op: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    first = args[0]
    with torch.autocast(first.device.type, first.dtype, cache_enabled=False):
        results = op(*args)
    # What autocast gives is not one dtype: a projection (`proj_size`) is a product, and
    # an LSTM over packed sequences of equal lengths runs as one kernel, whose results
    # are low.  All code after the op was captured for fp32 results.
    if isinstance(results, torch.Tensor):
        return results.float()
    return tuple(each.float() for each in results)


WITH_FP32_STATE: Mapping[compat.OpOverload, Callable[..., Any]] = {
    _ATEN.gru.input: gru_fp32_state,
    _ATEN.gru.data: gru_data_fp32_state,
    _ATEN.lstm.data: lstm_data_fp32_state,
    _ATEN.gru_cell.default: gru_cell_fp32_state,
    _ATEN.lstm_cell.default: lstm_cell_fp32_state,
}
"""ATen op to the function that runs the op on a CPU with its state in fp32.

CUDA kernels take all operands in one dtype, under autocast too."""

STATE = "hx"
"""The argument that holds the state, in each of the ops."""

_OPS = {function: op for op, function in WITH_FP32_STATE.items()}


def op_with_its_state(target: Any) -> Any:
    """The op that `target` runs with its state in fp32, or else `target` itself."""
    return _OPS.get(target, target)
