"""Recurrent layers pass a capture without their steps, and give the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode

import autoamp
from autoamp.compat.layers import recurrent_results
from tests.small_models import BF16, Of

LAYERS = {
    "gru": (nn.GRU, {}),
    "lstm": (nn.LSTM, {}),
    "projected": (nn.LSTM, {"proj_size": 3}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
    "tanh": (nn.RNN, {}),
}


def told(results: Any) -> list[Any]:
    """What a graph is told of the results of a layer."""
    out, states = results
    states = states if isinstance(states, tuple) else (states,)
    return [
        (t.shape, t.stride(), t.dtype, t.device, t.requires_grad)
        for t in (out, *states)
    ]


@pytest.mark.thorough(
    but=[
        "gru-1-False-False",
        "lstm-1-True-False",
        "projected-2-False-False",
        "relu-2-False-True",
        "tanh-2-True-True",
    ]
)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_results_are_those_of_torchs_own_kernels(
    name: str, depth: int, bidirectional: bool, batch_first: bool
) -> None:
    kind, more = LAYERS[name]
    before = dict(torch.ops.aten.gru.input.py_kernels)
    shape = {"batch_first": batch_first, "bidirectional": bidirectional}

    def layer(dtype: torch.dtype) -> nn.Module:
        return kind(5, 4, depth, **shape, **more, dtype=dtype)

    for dtype in (torch.float32, torch.float16):
        # Of the kernels that run: some of those for fake tensors are wrong.
        expected = told(layer(dtype)(torch.randn(2, 3, 5, dtype=dtype)))
        with FakeTensorMode(), enable_python_dispatcher():
            faked, x = layer(dtype), torch.randn(2, 3, 5, dtype=dtype)
            with recurrent_results():
                assert told(faked(x)) == expected
            with recurrent_results(), torch.no_grad():
                found = told(faked(x))
            assert dict(torch.ops.aten.gru.input.py_kernels) == before
            assert [row[:-1] for row in found] == [row[:-1] for row in expected]
            assert not any(row[-1] for row in found)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_a_capture_makes_no_operation_of_a_step(
    kind: type[nn.RNNBase], monkeypatch
) -> None:
    """As many for three hundred steps as for three."""
    made: list[int] = []
    inner = FakeTensorMode.dispatch

    def dispatch(self: FakeTensorMode, *args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return inner(self, *args, **kwargs)

    monkeypatch.setattr(FakeTensorMode, "dispatch", dispatch)
    counts = []
    for steps in (2, 3, 300):  # the first time more is to be done
        torch._dynamo.reset()
        made.clear()
        model = Of(
            lambda m, x: m.head(m.rnn(x)[0]),
            rnn=kind(8, 16, num_layers=2, batch_first=True),
            head=nn.Linear(16, 4),
        )
        autoamp.convert(model, **BF16)
        model(torch.randn(2, steps, 8))
        assert autoamp.report(model).runs == 1
        counts.append(len(made))
    assert counts[1] == counts[2]
