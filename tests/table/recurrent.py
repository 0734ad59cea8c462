"""Recurrent layers: deep, both ways, and on packed sequences of any lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.table.rows import linear, numbers, row

LENGTHS, SAME = (lambda: torch.tensor([6, 4, 1])), (lambda: torch.tensor([6, 6, 6]))
UNEXPORTED = {"exported": "sizes that depend on the lengths are not exported"}
NO_FP16 = {"fp16": "oneDNN has no LSTM in fp16, so that autocast fails"}


def reader(m: Any, words: Tensor, lengths: Tensor) -> Any:
    """Reads sentences; says something of each word, and returns its states."""
    given = m.table(words), lengths
    packed = pack_padded_sequence(*given, batch_first=True, enforce_sorted=False)
    found, states = m.layer(packed)
    seen, _ = pad_packed_sequence(found, batch_first=True)
    return m.head(seen), found.data, states


def add(
    name: str, kind: type[nn.Module], lengths: Any, wide: int, **given: Any
) -> None:
    program = type(reader)(reader.__code__, globals(), name)
    row(
        *(numbers(50, 3, 6), lengths),
        table=lambda: nn.Embedding(50, 16),
        layer=lambda: kind(16, 16, batch_first=True, **given),
        head=linear(wide, 4),
        without=UNEXPORTED | (NO_FP16 if kind is nn.LSTM else {}),
    )(program)


add("gru", nn.GRU, LENGTHS, 16)
add("gru_both_ways", nn.GRU, LENGTHS, 32, bidirectional=True)
add("gru_of_one_length", nn.GRU, SAME, 16)
add("lstm", nn.LSTM, LENGTHS, 16)
add("lstm_both_ways", nn.LSTM, SAME, 32, bidirectional=True)
add("rnn", nn.RNN, LENGTHS, 16)


@row((3, 6, 16), layer=lambda: nn.GRU(16, 8, 2, batch_first=True))
def deep_gru(m: Any, x: Tensor) -> Any:
    return m.layer(x)


@row((6, 3, 16), layer=lambda: nn.LSTM(16, 8, 2, bidirectional=True), without=NO_FP16)
def deep_lstm(m: Any, x: Tensor) -> Any:
    return m.layer(x)


@row((6, 3, 16), layer=lambda: nn.RNN(16, 8, bidirectional=True, nonlinearity="relu"))
def relu_rnn(m: Any, x: Tensor) -> Any:
    return m.layer(x)
