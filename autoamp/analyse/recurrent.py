"""Recurrent calls on a CPU: which of them run with a wide state, and what they cast.

Autocast casts inside of such a call, and keeps the low copies of leaves only.  All else
that it reads more than once it casts at each read, so that the gradients of the reads
are summed in fp32: an input that is read for two directions, and at each step the
weight of a projection, which is transposed first, and weights that are computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.nodes import argument
from autoamp.graph_functions import BOTH_WAYS, STATE, WITH_FP32_STATE
from autoamp.op_names import op_name


def keeps_state(node: fx.Node, low: torch.dtype) -> bool:
    """Whether a call on a CPU is a recurrent one that runs with its state in fp32.

    All are, but for two that read their input in one direction: an RNN, the state of
    which is a low product's result, and an LSTM that is one kernel of oneDNN's for each
    layer, in training too; that kernel has neither projections nor fp16.
    """
    if node.target not in WITH_FP32_STATE:
        return False
    if argument(node, BOTH_WAYS):
        return True
    if node.target is torch.ops.aten.lstm.input:
        return _is_projected(node) or not _onednn_runs(low)
    kind = op_name(node.target)
    return not kind.startswith("aten::rnn") or bool(read_wide(node, low))


def read_wide(node: fx.Node, low: torch.dtype) -> set[str]:
    """The values that a recurrent call with a wide state casts at each read.

    With an fp32 input torch chooses oneDNN for an LSTM without projections, which ends
    in an error where oneDNN has no such kernel for `low`, under autocast as well.
    """
    found: set[Any] = set()
    ends = node.target is torch.ops.aten.lstm.input and not _onednn_runs(low)
    if argument(node, BOTH_WAYS) and (_is_projected(node) or not ends):
        found.add(node.args[0])
    projected = _is_projected(node)
    params = argument(node, "params", ())
    # Of each layer and direction: w_ih, w_hh, b_ih, b_hh and the projection's weight.
    group = (4 if argument(node, "has_biases") else 2) + projected
    for at, weight in enumerate(params):
        of_projection = projected and (at + 1) % group == 0
        at_each_step = at % group % 2 == 1
        if of_projection or (at_each_step and weight.op == "call_function"):
            found.add(weight)
    return {value.name for value in found}


def _onednn_runs(low: torch.dtype) -> bool:
    """Whether oneDNN has kernels of LSTMs in `low`: it has them in one dtype."""
    return low == torch.bfloat16 and compat.onednn_has_bf16()


def _is_projected(node: fx.Node) -> bool:
    """Whether the hidden state of an LSTM is smaller than its cells."""
    state: Any = argument(node, STATE)
    if isinstance(state, fx.Node) or not argument(node, "params"):
        return False
    hidden, cell = (each.meta["val"].shape[-1] for each in state)
    return bool(hidden != cell)
