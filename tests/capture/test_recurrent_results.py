"""Recurrent layers pass a capture without their steps, and give the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode

import autoamp
from autoamp.compat.layers import recurrent_results

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
            assert [row[:-1] for row in found] == [row[:-1] for row in expected]
            assert not any(row[-1] for row in found)


def test_a_layer_of_several_dtypes_is_refused() -> None:
    """As torch's kernels refuse it, so that `verify` sees what is wrong."""
    with FakeTensorMode(), enable_python_dispatcher(), recurrent_results():
        layer = nn.GRU(5, 4)
        state = torch.zeros(1, 2, 4)
        weights = [p.to(torch.bfloat16) for p in layer.parameters()]
        options = (True, 1, 0.0, True, False, False)
        with pytest.raises(RuntimeError, match="bfloat16"):
            torch.ops.aten.gru.input(torch.randn(3, 2, 5), state, weights, *options)


class Series(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(8, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


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
        model = autoamp.convert(Series(kind), precision="bf16", do_no_harm=False)
        model(torch.randn(2, steps, 8))
        assert autoamp.report(model).runs == 1
        counts.append(len(made))
    assert counts[1] == counts[2]


def test_kernels_are_put_back() -> None:
    before = dict(torch.ops.aten.gru.input.py_kernels)
    with recurrent_results():
        assert torch.ops.aten.gru.input.py_kernels != before
    assert torch.ops.aten.gru.input.py_kernels == before
