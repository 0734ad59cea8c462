"""Recurrent layers are captured without their steps; lengths share the graphs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import pack_padded_sequence

import autoamp
from tests.small_models import Of, converted, runs
from tests.table.recurrent import reader


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 16), nn.Linear(32, 4)
        self.layer = nn.GRU(16, 16, batch_first=True, bidirectional=True)

    def forward(self, words: Tensor, lengths: Tensor) -> Any:
        return reader(self, words, lengths)[0]


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator, most = torch.Generator().manual_seed(seed), 10 + seed
    lengths = torch.randint(1, most, (4 + seed,), generator=generator)
    lengths[0] = most
    return torch.randint(0, 50, (4 + seed, most), generator=generator), lengths


def test_batches_of_other_lengths_share_the_graphs() -> None:
    model = Reader()
    ours = converted(copy.deepcopy(model), strict=False)
    for seed in range(3):
        ours(*batch(seed))
    captured = len(autoamp.report(ours).graphs)
    for seed in range(3, 5):
        found, exact = ours(*batch(seed)), model(*batch(seed))
        torch.testing.assert_close(found, exact, rtol=0.05, atol=0.05)
    assert len(autoamp.report(ours).graphs) == captured


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_the_layer_is_low_and_uses_the_state_that_it_is_given(kind: Any) -> None:
    layer = kind(16, 16)
    ours = converted(copy.deepcopy(layer))
    packed = pack_padded_sequence(torch.randn(5, 3, 16), torch.tensor([5, 4, 2]))
    state: Any = torch.randn(1, 3, 16)
    state = (state, state) if kind is nn.LSTM else state
    for pair in zip(ours(packed, state), layer(packed, state), strict=True):
        found, true = (getattr(value, "data", value) for value in pair)
        torch.testing.assert_close(found, true, rtol=0.05, atol=0.05)
    (op,) = {row.op for row in autoamp.report(ours).ops if row.is_low}
    assert op.endswith(".data")


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("packed", [False, True])
def test_a_projected_lstm_gives_what_it_gave(packed: bool) -> None:
    layer, x = nn.LSTM(16, 8, 2, proj_size=3), torch.randn(5, 3, 16)
    given = pack_padded_sequence(x, torch.tensor([5, 4, 2])) if packed else x
    ours = converted(copy.deepcopy(layer))
    (found, states), (wide, expected) = ours(given), layer(given)
    for pair in zip((found, *states), (wide, *expected), strict=True):
        one, other = (getattr(value, "data", value) for value in pair)
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)
        assert one.stride() == other.stride()


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_a_capture_makes_no_operation_of_a_step(
    kind: type[nn.RNNBase], monkeypatch
) -> None:
    """About as many for three hundred steps as for three."""
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
        converted(model)(torch.randn(2, steps, 8))
        assert runs(model) == 1
        counts.append(len(made))
    # A step made of operations would add hundreds; memory freed between adds a few.
    assert abs(counts[2] - counts[1]) < 100
