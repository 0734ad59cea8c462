"""Each layer of torch, and models that are odd to report on, have a whole report."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.logs import warned
from tests.quick import some_slow
from tests.says import says
from tests.small_models import BF16, Of

IMAGE, SIGNAL, VIDEO = (2, 4, 8, 8), (2, 4, 8), (2, 4, 4, 8, 8)
ROWS = (4, 8)
BY_RANK = {"1d": SIGNAL, "2d": IMAGE, "3d": VIDEO}

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "AdaptiveAvgPool": (4,),
    "AdaptiveMaxPool": (4,),
    "AvgPool": (2,),
    "BatchNorm": (4,),
    "Bilinear": (8, 8, 8),
    "ChannelShuffle": (2,),
    "CircularPad": (1,),
    "ConstantPad": (1, 0.5),
    "Conv": (4, 4, 3),
    "ConvTranspose": (4, 4, 3),
    "CrossMapLRN": (2,),
    "Embedding": (10, 8),
    "EmbeddingBag": (10, 8),
    "Fold": ((4, 4), 2),
    "FractionalMaxPool": (2, None, 0.5),
    "GRU": (8, 8),
    "GRUCell": (8, 8),
    "GroupNorm": (2, 4),
    "InstanceNorm": (4,),
    "LPPool": (2, 2),
    "LSTM": (8, 8),
    "LSTMCell": (8, 8),
    "LayerNorm": (8,),
    "Linear": (8, 8),
    "LocalResponseNorm": (2,),
    "MaxPool": (2,),
    "MultiheadAttention": (8, 2),
    "PixelShuffle": (2,),
    "PixelUnshuffle": (2,),
    "RMSNorm": (8,),
    "RNN": (8, 8),
    "RNNCell": (8, 8),
    "ReflectionPad": (1,),
    "ReplicationPad": (1,),
    "Softmax": (-1,),
    "LogSoftmax": (-1,),
    "Softmin": (-1,),
    "Threshold": (0.1, 0.0),
    "TransformerDecoderLayer": (8, 2, 16),
    "TransformerEncoderLayer": (8, 2, 16),
    "Unflatten": (1, (2, 4)),
    "Unfold": (2,),
    "Upsample": (None, 2),
    "UpsamplingBilinear": (None, 2),
    "UpsamplingNearest": (None, 2),
    "ZeroPad": (1,),
}
SHAPES = {
    "ChannelShuffle": IMAGE,
    "CrossMapLRN2d": IMAGE,
    "EmbeddingBag": (3, 4),
    "Fold": (2, 8, 9),
    "GLU": ROWS,
    "GroupNorm": IMAGE,
    "LayerNorm": ROWS,
    "LocalResponseNorm": IMAGE,
    "PixelShuffle": IMAGE,
    "PixelUnshuffle": IMAGE,
    "Unflatten": ROWS,
    "Unfold": IMAGE,
    "Upsample": IMAGE,
    **dict.fromkeys(
        ["GRU", "LSTM", "RNN", "MultiheadAttention", "TransformerEncoderLayer"],
        (2, 3, 8),
    ),
}
OTHERS = {"TransformerDecoderLayer": 2, "Bilinear": 2, "CosineSimilarity": 2}
OTHERS |= {"PairwiseDistance": 2, "MultiheadAttention": 3}
"""Layers that are called with more than one tensor, and with how many."""

ELSEWHERE = {
    **dict.fromkeys(
        ["Container", "Module", "ModuleDict", "ModuleList", "ParameterDict"],
        "computes nothing",
    ),
    **dict.fromkeys(["ParameterList", "Sequential"], "computes nothing"),
    **dict.fromkeys(["RNNBase", "RNNCellBase"], "is no layer by itself"),
    "AdaptiveLogSoftmaxWithLoss": "is a loss, below",
    "DataParallel": "needs GPUs",
    "SyncBatchNorm": "needs a process group",
    "LinearCrossEntropyLoss": "is a loss, below",
    "MaxUnpool": "reads the indices of a pooling, below",
    "Softmax2d": "is softmax",
    "Transformer": "is its layers",
    "TransformerDecoder": "is its layers",
    "TransformerEncoder": "is its layers",
}


def layers() -> list[str]:
    found = []
    for name in dir(nn):
        kind = getattr(nn, name)
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            continue
        stem = name[:-2] if name[-2:] in BY_RANK else name
        if name in ELSEWHERE or stem in ELSEWHERE or name.startswith("Lazy"):
            continue
        if not name.endswith(("Loss", "Loss2d")):
            found.append(name)
    return found


def between(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A layer between products, with a loss behind; the gradients flow through all."""
    stem = name[:-2] if name[-2:] in BY_RANK else name
    given = ARGUMENTS.get(name, ARGUMENTS.get(stem, ()))
    layer = getattr(nn, name)(*given)
    shape = SHAPES.get(name, BY_RANK.get(name[-2:], ROWS))
    if stem.startswith("Embedding"):
        return Of(lambda m, i: m.head(m.layer(i)).sum(), layer=layer, head=line(8)), (
            torch.randint(10, shape),
        )

    def call(m: Any, x: Tensor) -> Tensor:
        made = m.layer(*[m.stem(x)] * OTHERS.get(name, 1))
        first = made[0] if isinstance(made, tuple) else made
        return m.head(first.flatten().repeat(8)[:8]).square().mean()  # type: ignore[no-any-return]

    return Of(call, layer=layer, stem=line(shape[-1]), head=line(8)), (
        torch.randn(shape),
    )


def line(width: int) -> nn.Linear:
    return nn.Linear(width, width)


def look_at_all(report: autoamp.Report) -> None:
    """All that a report can be asked for."""
    assert str(report)
    assert report.full()
    assert json.loads(report.to_json())["failed"] == {}
    assert report.to_html().lower().startswith("<!doctype html>")
    assert report.to_dot().startswith("digraph")
    for section in report.sections:
        for row in section.ops:
            assert row.name in report.why(row.name, section.key)


def with_one_rank(names: list[str]) -> list[Any]:
    """The names, of which a layer of several ranks has one that is not slow."""
    stems = {name: name[:-2] if name[-2:] in BY_RANK else name for name in names}
    ranks = [[n for n in names if stems[n] == s] for s in dict.fromkeys(stems.values())]
    quick = {each[i % len(each)] for i, each in enumerate(ranks)}
    return some_slow(names, lambda name: name not in quick)


@pytest.mark.parametrize("name", with_one_rank(layers()))
def test_each_layer(name: str) -> None:
    """CI has each layer, in one of its ranks, in turn."""
    model, given = between(name)
    autoamp.convert(model, **BF16)
    model(*given).backward()
    assert len(autoamp.report(model).graphs) >= 1
    look_at_all(autoamp.report(model))


def with_bodies(m: Any, x: Tensor) -> Any:
    a, b = (lambda z: m.gru(z)[0].relu()), (lambda z: m.gru(z)[0].tanh())
    return m.head(torch.cond(x.sum() > 0, a, b, (x,)))


def with_a_break(m: Any, x: Tensor) -> Any:
    x = m.gru(x)[0]
    return m.head(x * (1 if x.sum().item() > 0 else 2))


def pooled(m: Any, x: Tensor) -> Any:
    values, at = nn.functional.max_pool1d(m.head(x), 2, return_indices=True)
    return m.head(nn.functional.max_unpool1d(values, at, 2))


def loss(m: Any, x: Tensor) -> Any:
    x = m.gru(m.head(x))[0].flatten(0, 1)
    return nn.functional.cross_entropy(m.head(x), torch.arange(len(x)) % 8)


@pytest.mark.parametrize("call", [with_bodies, with_a_break, pooled, loss])
def test_odd_models(call: Callable[..., Any]) -> None:
    model = Of(call, gru=nn.GRU(8, 8, bidirectional=False), head=line(8))
    x = torch.randn(3, 2, 8)
    look_at_all(autoamp.explain(model, x, **BF16))
    autoamp.convert(model, **BF16)
    model(x).sum().backward()
    look_at_all(autoamp.report(model))


@pytest.mark.parametrize("broken", ["_cast_rows", "_op_rows", "costs_of"])
def test_a_part_that_fails_costs_itself(broken: str, monkeypatch, caplog) -> None:
    monkeypatch.setattr("autoamp.messages.CAUGHT", (Exception,))
    model, given = between("Linear")
    device = "cpu:amx"  # a device whose times are predicted
    report = autoamp.explain(model, *given, **BF16, device=device)

    def fails(*_: object) -> None:
        raise KeyError("<planted>")

    monkeypatch.setattr(f"autoamp.passes.report_rows.{broken}", fails)
    says(report, "could not be made", "KeyError: '<planted>'")
    assert str(report).startswith("autoamp report: Of")
    says(report.full(), "could not be made")
    assert report.to_html().lower().startswith("<!doctype html>")
    found = json.loads(report.to_json())
    assert found["failed"]
    assert all("KeyError" in said for said in found["failed"].values())
    assert found["model"] == "Of"
    says(warned(caplog), "please report it")
