"""Recurrent layers: deep, both ways, and on packed sequences of any lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.table.rows import linear, numbers, row

LENGTHS, SAME = (lambda: torch.tensor([6, 4, 1])), (lambda: torch.tensor([6, 6, 6]))
UNEXPORTED = {"exported": "sizes that depend on the lengths are not exported"}
TRACED = not torch.__version__.startswith("2.11.")
"""Torch 2.11 captures no `pad_packed_sequence`, which Python runs then."""

NO_FP16 = {"fp16": "oneDNN has no LSTM in fp16, so that autocast fails"}


def reader(m: Any, words: Tensor, lengths: Tensor) -> Any:
    """Reads sentences; says something of each word, and returns its states."""
    given = m.table(words), lengths
    packed = pack_padded_sequence(*given, batch_first=True, enforce_sorted=False)
    found, states = m.layer(packed)
    seen, _ = pad_packed_sequence(found, batch_first=True)
    return m.head(seen), found.data, states, found.data.requires_grad


def add(
    name: str, kind: type[nn.Module], lengths: Any, wide: int, **given: Any
) -> None:
    program = type(reader)(reader.__code__, globals(), name)
    row(
        *(numbers(50, 3, 6), lengths),
        table=lambda: nn.Embedding(50, 16),
        layer=lambda: kind(16, 16, batch_first=True, **given),
        head=linear(wide, 4),
        strict=TRACED,
        without=UNEXPORTED | (NO_FP16 if kind is nn.LSTM else {}),
    )(program)


add("gru", nn.GRU, LENGTHS, 16)
add("gru_both_ways", nn.GRU, LENGTHS, 32, bidirectional=True)
add("gru_of_one_length", nn.GRU, SAME, 16)
add("lstm", nn.LSTM, LENGTHS, 16)
add("lstm_both_ways", nn.LSTM, SAME, 32, bidirectional=True)
add("rnn", nn.RNN, LENGTHS, 16)


# -- what a graph is told of the results of a layer, in place of which it has run none


def asked(m: Any, x: Tensor) -> Any:
    """Code of the model's own may look at strides and need of a gradient."""
    found, states = m.layer(x)
    several = states if isinstance(states, tuple) else (states,)
    if found.requires_grad:
        found = found * 2
    return found, states, [(t.stride(), t.requires_grad) for t in (found, *several)]


def ask(name: str, layer: Any) -> None:
    without = UNEXPORTED | (NO_FP16 if name.endswith("lstm") else {})
    program = type(asked)(asked.__code__, globals(), name)
    row((3, 6, 16), layer=layer, without=without)(program)


ask("deep_gru", lambda: nn.GRU(16, 8, 2, batch_first=True))
ask("deep_lstm", lambda: nn.LSTM(16, 8, 2, bidirectional=True))
ask("relu_rnn", lambda: nn.RNN(16, 8, bidirectional=True, nonlinearity="relu"))
