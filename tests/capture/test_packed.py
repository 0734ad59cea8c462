"""Recurrent layers on packed sequences are captured and rewritten like any other."""

from __future__ import annotations

import contextlib
import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import autoamp
from tests.quick import each_with_one
from tests.truth import MARGIN, relative

WIDTH = 16
LAYERS = {"gru": nn.GRU, "lstm": nn.LSTM, "rnn": nn.RNN}
OP = {"gru": "gru", "lstm": "lstm", "rnn": "rnn_tanh"}
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Reader(nn.Module):
    """Reads sentences of several lengths; says something of each word."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(50, WIDTH)
        self.layer = kind(WIDTH, WIDTH, batch_first=True, **options)
        sides = 2 if self.layer.bidirectional else 1
        self.head = nn.Linear(sides * WIDTH, 4)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.table(words), lengths, batch_first=True, enforce_sorted=False
        )
        seen, _ = pad_packed_sequence(self.layer(packed)[0], batch_first=True)
        return self.head(seen)


def batch(seed: int, most: int = 20, count: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, most, (count,), generator=generator)
    lengths[0] = most
    return torch.randint(0, 50, (count, most), generator=generator), lengths


def step(model: nn.Module, given: tuple[Tensor, Tensor], context: Any = None) -> Any:
    """Outputs and gradients in float64."""
    model.zero_grad()
    with context or contextlib.nullcontext():
        out = model(*given)
    generator = torch.Generator().manual_seed(5)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    (out.double() * weights).sum().backward()
    return [out.detach().double(), *(p.grad.double() for p in model.parameters())]


def low_ops(model: nn.Module) -> set[str]:
    return {row.op for row in autoamp.report(model).ops if row.is_low}


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "precision"), each_with_one(LAYERS, [*LOW]))
def test_no_less_true_than_autocast(name: str, precision: str) -> None:
    torch.manual_seed(0)
    model = Reader(LAYERS[name])
    given = batch(0)
    ours = autoamp.convert(
        copy.deepcopy(model), precision=precision, do_no_harm=False, loss_scale=1.0
    )
    truth = step(copy.deepcopy(model).double(), given)
    low = torch.autocast("cpu", LOW[precision])
    amp = step(copy.deepcopy(model), given, low)
    for found, theirs, true in zip(step(ours, given), amp, truth, strict=True):
        assert relative(found, true) <= MARGIN * max(relative(theirs, true), 1e-6)
    assert f"aten::{OP[name]}.data" in low_ops(ours)


@pytest.mark.thorough
def test_batches_of_other_lengths_share_the_graphs() -> None:
    torch.manual_seed(0)
    model = Reader(nn.GRU, bidirectional=True)
    ours = autoamp.convert(copy.deepcopy(model), precision="bf16", do_no_harm=False)
    for seed in range(3):
        ours(*batch(seed, most=10 + seed, count=4 + seed))
    captured = len(autoamp.report(ours).graphs)
    for seed in range(3, 5):
        given = batch(seed, most=10 + seed, count=4 + seed)
        torch.testing.assert_close(ours(*given), model(*given), rtol=0.05, atol=0.05)
    assert len(autoamp.report(ours).graphs) == captured


@pytest.mark.thorough
def test_a_state_given_by_the_caller_is_used() -> None:
    torch.manual_seed(0)
    layer = nn.GRU(WIDTH, WIDTH)
    ours = autoamp.convert(copy.deepcopy(layer), precision="bf16", do_no_harm=False)
    packed = pack_padded_sequence(torch.randn(5, 3, WIDTH), torch.tensor([5, 4, 2]))
    state = torch.randn(1, 3, WIDTH)
    for pair in zip(ours(packed, state), layer(packed, state), strict=True):
        found, true = (getattr(value, "data", value) for value in pair)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, true, rtol=0.05, atol=0.05)
    assert "aten::gru.data" in low_ops(ours)


PACKED = itertools.product(
    ["gru", "lstm"],
    [(6, 6, 6), (6, 4, 1)],
    [{}, {"proj_size": 5}, {"bidirectional": True}],
)


@pytest.mark.thorough(but=["case3-False"])
@pytest.mark.parametrize(("case", "training"), each_with_one(PACKED, [True, False]))
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_results_have_the_dtypes_that_the_next_graph_was_told(
    case: tuple[str, tuple[int, ...], dict[str, Any]], training: bool
) -> None:
    """Some results were low, those of equal lengths say, and the next graph failed."""
    name, lengths, options = case
    if "proj_size" in options and name != "lstm":
        pytest.skip("only an LSTM has projections")
    layer = LAYERS[name](WIDTH, WIDTH, batch_first=True, **options).train(training)
    autoamp.convert(layer, precision="bf16", do_no_harm=False, strict=True)
    words = torch.randn(3, 6, WIDTH, requires_grad=training)
    packed = pack_padded_sequence(words, torch.tensor(lengths), batch_first=True)
    with torch.set_grad_enabled(training):
        out, states = layer(packed)
    states = states if isinstance(states, tuple) else (states,)
    assert {each.dtype for each in (out.data, *states)} == {torch.float32}
    assert low_ops(layer)
