"""A rewritten graph computes what the given graph computes, for every input it takes.

It gives the same containers, and refuses an input that it was not written for.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx, nn

import autoamp
from tests.metrics import relative_error
from tests.quick import each_with_one
from tests.says import says
from tests.small_models import BF16

FP16 = {**BF16, "precision": "fp16"}
CLOSE = 0.02  # bf16 rounding of three layers


class Pair(NamedTuple):
    """A named tuple, as a model may return."""

    low: Any
    more: Any


@dataclasses.dataclass
class Result:
    """A dataclass, as a model may return."""

    low: Any
    more: Any


class Net(nn.Module):
    """A linear layer, an optional second layer, and a body given as a function."""

    def __init__(self, layer: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(16, 16)
        self.layer = layer


def made(body: Callable[..., Any], layer: nn.Module | None = None) -> nn.Module:
    net = type("Net", (Net,), {"forward": body})(layer)
    assert isinstance(net, nn.Module)
    return net.eval()


def draw(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def mean(self: Any, x: Tensor) -> Any:
    return self.line(x).sum(0) / x.shape[0]


def summed(self: Any, x: Tensor) -> Any:
    return self.line(x).sum(0) + x.shape[0]


def scaled(self: Any, x: Tensor, k: Any = 2.0) -> Any:
    return self.line(x) * k


def viewed(self: Any, x: Tensor, k: int) -> Any:
    return self.line(x).view(k, -1, 16).sum(0)


def joined(self: Any, x: Tensor, y: Tensor) -> Any:
    return self.line(x) + y * y.shape[0]


def squeezed(self: Any, x: Tensor) -> Any:
    return self.line(x.squeeze(1)).sum(-1)


def pooled(self: Any, x: Tensor) -> Any:
    return self.layer(x).flatten(1) * x.size(0)


def layered(self: Any, x: Tensor) -> Any:
    return self.layer(x)


def attended(self: Any, x: Tensor) -> Any:
    return self.layer(x, x, x)[0]


def batched(self: Any, batch: dict[str, Any]) -> Any:
    return {"out": self.line(batch["x"]) * batch["k"], "rest": [batch["more"][1] + 1]}


def written(self: Any, x: Tensor) -> Any:
    y = self.line(x)
    y += x.shape[0]
    return y, y[0]


def cut(self: Any, x: Tensor, rows: Any) -> Any:
    return self.line(torch.ones(rows)[: x.shape[0]].unsqueeze(-1) * x)


def moded(self: Any, x: Tensor, how: Any) -> Any:
    return self.line(x).sum(0, keepdim=how)


def batch(rows: int, k: float) -> dict[str, Any]:
    return {"more": (draw(3), draw(rows)), "x": draw(rows, 16), "k": k}


Case = tuple[nn.Module, tuple[Any, ...], list[tuple[Any, ...]]]
ANY: dict[str, Case] = {
    "size": (made(mean), (draw(4, 16),), [(draw(8, 16),), (draw(1, 16),)]),
    "size 1 before": (made(mean), (draw(1, 16),), [(draw(8, 16),), (draw(2, 16),)]),
    "size 0 before": (made(summed), (draw(0, 16),), [(draw(8, 16),), (draw(1, 16),)]),
    "two sizes": (
        made(joined),
        (draw(4, 16), draw(4, 16)),
        [(draw(8, 16), draw(8, 16))],
    ),
    "stretched": (
        made(joined),
        (draw(4, 16), draw(1, 16)),
        [(draw(8, 16), draw(1, 16))],
    ),
    "squeezed": (
        made(squeezed),
        (draw(4, 1, 16),),
        [(draw(8, 1, 16),), (draw(1, 1, 16),)],
    ),
    "number": (made(scaled), (draw(4, 16), 3.0), [(draw(4, 16), 5.0), (draw(3, 16),)]),
    "whole number": (
        made(scaled),
        (draw(4, 16), 3),
        [(draw(4, 16), 1), (draw(4, 16), -2)],
    ),
    "number as size": (
        made(viewed),
        (draw(4, 16), 2),
        [(draw(9, 16), 3), (draw(9, 16), 1)],
    ),
    "smaller of two": (
        made(cut),
        (draw(4, 16), 6),
        [(draw(5, 16), 9), (draw(3, 16), 3)],
    ),
    "dictionary": (made(batched), (batch(4, 2.0),), [(batch(7, 3.0),)]),
    "written": (made(written), (draw(4, 16),), [(draw(8, 16),)]),
    "convolution": (
        made(pooled, nn.Conv2d(3, 8, 3, padding=1)),
        (draw(4, 3, 8, 8),),
        [(draw(32, 3, 8, 8),), (draw(1, 3, 9, 5),)],
    ),
    "recurrent": (
        made(layered, nn.LSTM(16, 8, batch_first=True)),
        (draw(4, 5, 16),),
        [(draw(2, 3, 16),), (draw(1, 1, 16),)],
    ),
    "attention": (
        made(attended, nn.MultiheadAttention(16, 4, batch_first=True)),
        (draw(4, 5, 16),),
        [(draw(2, 3, 16),), (draw(1, 5, 16),), (draw(4, 1, 16),)],
    ),
    "encoder": (
        made(layered, nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)),
        (draw(4, 5, 16),),
        [(draw(2, 3, 16),), (draw(1, 5, 16),)],
    ),
    "statistics": (
        made(layered, nn.BatchNorm1d(16)).train(),
        (draw(4, 16),),
        [(draw(8, 16),)],
    ),
}


def check_same(got: Any, right: Any) -> None:
    """Asserts that two results are alike in types and sizes, and close in numbers."""
    assert type(got) is type(right)
    if isinstance(right, Tensor):
        assert got.shape == right.shape
        assert got.dtype == right.dtype
        assert torch.equal(got, right) or relative_error([got], [right]) < CLOSE
    elif isinstance(right, dict):
        assert list(got) == list(right)
        check_same([*got.values()], [*right.values()])
    elif isinstance(right, list | tuple):
        assert len(got) == len(right)
        for each, wanted in zip(got, right, strict=True):
            check_same(each, wanted)
    elif dataclasses.is_dataclass(right):
        check_same(vars(got), vars(right))
    else:
        assert got == right


@pytest.mark.parametrize(
    ("name", "options"),
    each_with_one(ANY, [BF16, FP16]),
    ids=lambda each: None if isinstance(each, str) else each["precision"],
)
def test_a_traced_graph_at_other_inputs(name: str, options: dict[str, Any]) -> None:
    """CI has each model in one precision, in turn."""
    model, example, others = ANY[name]
    given = fx.symbolic_trace(copy.deepcopy(model))
    low = autoamp.rewrite(given, copy.deepcopy(example), **options)
    for inputs in (example, *others):
        with torch.no_grad():
            right = given(*copy.deepcopy(inputs))
            check_same(low(*copy.deepcopy(inputs)), right)


def test_an_exported_program_at_the_sizes_of_its_own_range() -> None:
    rows = torch.export.Dim("rows", min=2, max=9)
    program = torch.export.export(
        made(mean), (draw(4, 16),), dynamic_shapes=({0: rows},)
    )
    low = autoamp.rewrite(program, (draw(4, 16),), **BF16)
    for count in (2, 8):
        check_same(low(draw(count, 16)), program.module()(draw(count, 16)))
    fixed = torch.export.export(made(mean), (draw(4, 16),))
    refuses = autoamp.rewrite(fixed, (draw(4, 16),), **BF16)
    with pytest.raises(autoamp.CaptureError) as raised:
        refuses(draw(8, 16))
    says(raised, "input x", "(8, 16)", "(4, 16)", "autoamp.rewrite")


REFUSED: dict[str, tuple[Case, list[str]]] = {
    "flag": (
        (made(moded), (draw(4, 16), True), [(draw(4, 16), False)]),
        ["input how", "False", "True"],
    ),
    "stretched later": (
        (made(joined), (draw(4, 16), draw(4, 16)), [(draw(4, 16), draw(1, 16))]),
        ["x.shape[0]", "y.shape[0]"],
    ),
    "stretched before": (
        (made(joined), (draw(4, 16), draw(1, 16)), [(draw(4, 16), draw(4, 16))]),
        ["input y", "(4, 16)", "(1, 16)"],
    ),
    "dtype": (
        (made(layered, nn.ReLU()), (draw(4, 16),), [(draw(4, 16).double(),)]),
        ["input x", "float64", "float32"],
    ),
    "structure": (
        (made(batched), (batch(4, 2.0),), [({**batch(4, 2.0), "k": (2.0,)},)]),
        ["input batch", "tuple"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_input_that_is_fixed_is_refused(name: str) -> None:
    (model, example, others), told = REFUSED[name]
    low = autoamp.rewrite(fx.symbolic_trace(model), example, **BF16)
    for inputs in others:
        with pytest.raises(autoamp.CaptureError) as raised:
            low(*inputs)
        says(raised, *told, "autoamp.rewrite")


KINDS: dict[str, Callable[[Any, Any], Any]] = {
    "named tuple": Pair,
    "dataclass": Result,
    "ordered": lambda low, more: OrderedDict(low=low, more=more),
    "nested": lambda low, more: {"a": [low, (more, None)], "b": 3},
    "torch's": lambda low, more: (torch.max(low, 0), more.shape),
}


def saved(gm: fx.GraphModule) -> Any:
    file = io.BytesIO()
    torch.save(gm, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


AGAIN: dict[str, Callable[[fx.GraphModule], Any]] = {
    "saved": saved,
    "pickled": lambda gm: pickle.loads(pickle.dumps(gm)),
    "copied": copy.deepcopy,
    "traced": fx.symbolic_trace,
    "rewritten": lambda gm: autoamp.rewrite(gm, (draw(4, 16),), **BF16),
}


@pytest.mark.parametrize(("kind", "again"), each_with_one(KINDS, [*AGAIN]))
def test_containers_of_results_last(kind: str, again: str) -> None:
    """CI has each container, made again in one way, in turn."""
    build = KINDS[kind]
    model = made(lambda self, x: build(self.line(x), x + x.shape[0]))
    given = fx.symbolic_trace(model)
    low = AGAIN[again](autoamp.rewrite(given, (draw(4, 16),), **BF16))
    exact = given(draw(8, 16))
    if kind == "torch's":  # which element is the largest depends on rounding
        (values, _), shape = low(draw(8, 16))
        assert (type(shape), type(low(draw(8, 16))[0])) == (
            torch.Size,
            torch.return_types.max,
        )
        check_same(values, exact[0].values)
    else:
        check_same(low(draw(8, 16)), exact)


@pytest.mark.parametrize(
    ("name", "again"),
    each_with_one(["size", "recurrent", "dictionary", "encoder"], [*AGAIN]),
)
def test_saved_graphs_compute_and_refuse_alike(name: str, again: str) -> None:
    """CI has each way to make a graph again, with one model, in turn."""
    model, example, others = ANY[name]
    low = autoamp.rewrite(fx.symbolic_trace(model), example, **BF16)
    if again == "rewritten":
        gm = autoamp.rewrite(low, example, **BF16)
    else:
        gm = AGAIN[again](low)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
    gm.print_readable(print_output=False)
    for inputs in others:
        check_same(gm(*inputs), low(*inputs))
    with pytest.raises(autoamp.CaptureError):
        gm(*[7 for _ in example])
    compiled = torch.compile(low, backend="eager", fullgraph=True)
    for inputs in others:
        check_same(compiled(*inputs), low(*inputs))


@pytest.mark.parametrize("training", [True, False])
def test_another_mode_is_refused_where_it_would_compute_otherwise(
    training: bool,
) -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)).train(training)
    low = autoamp.rewrite(torch.fx.symbolic_trace(net), (draw(4, 16),), **BF16)
    assert low.train(training) is low
    with pytest.raises(autoamp.AutoampError) as raised:
        low.train(not training)
    says(raised, "training" if training else "eval", option="autoamp.rewrite")
    assert low.training is training
    plain = autoamp.rewrite(torch.fx.symbolic_trace(net[:1]), (draw(4, 16),), **BF16)
    plain.train(not training)
