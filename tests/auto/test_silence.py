"""Nothing is off without a word, nothing is counted that did not happen."""

from __future__ import annotations

import functools
import json
import logging
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp.errors import VerificationError
from autoamp.messages import signs_of_life
from autoamp.pipeline import run as pipeline
from tests.small_models import BF16, Of

MANY = 12
"""More than torch._dynamo.config.recompile_limit, which is 8."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).relu()


def kind_of_block(number: int) -> type[Block]:
    """A class whose `forward` has a code object of its own."""
    names: dict[str, Any] = {}
    exec(f"def forward(self, x): return self.fc(x).relu() + {number}.0", names)
    return type(f"Block{number}", (Block,), {"forward": names["forward"]})


class Broken(nn.Module):
    """Blocks called in a loop that Dynamo leaves to Python."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            torch._dynamo.graph_break()
            x = block(nn.functional.pad(x, (0, block.fc.in_features - x.shape[1])))
        return x


def low_products(model: nn.Module) -> int:
    rows = autoamp.report(model).ops
    return sum(row.op == "aten::linear.default" and row.is_low for row in rows)


@pytest.mark.thorough
@pytest.mark.usefixtures("automatic")
def test_every_kind_of_block_is_converted_in_the_automatic_mode() -> None:
    model = Broken([kind_of_block(i)(8) for i in range(MANY)])
    model(torch.randn(2, 8))
    assert low_products(model) == MANY


@pytest.mark.thorough
def test_every_block_of_one_class_is_converted_whatever_its_size() -> None:
    model = autoamp.convert(Broken([Block(8 + i) for i in range(MANY)]), **BF16)
    model(torch.randn(2, 8))
    assert low_products(model) == MANY


def halves() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.first(x)
        torch._dynamo.graph_break()
        return m.second(x)  # type: ignore[no-any-return]

    return Of(forward, first=Block(8), second=Block(8))


@pytest.mark.thorough
def test_threads_that_race_at_a_new_size_all_run_rewritten_graphs() -> None:
    model = autoamp.convert(halves(), **BF16)
    model(torch.randn(3, 8))
    start = threading.Barrier(MANY)

    def work() -> None:
        start.wait()
        model(torch.randn(5, 8))

    threads = [threading.Thread(target=work) for _ in range(MANY)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert autoamp.report(model).runs == 2 * (MANY + 1)


def failing_on(graph: int) -> Callable[..., Any]:
    """The pass, of which one graph cannot be rewritten at all."""
    real, seen = pipeline.normalise, []

    def fail(*args: Any) -> Any:
        seen.append(args)
        if graph in (len(seen) - 1, -1):
            raise VerificationError("planted")
        return real(*args)

    return fail


@pytest.mark.thorough(but=["0-0-3", "-1-3-0"])
@pytest.mark.parametrize(
    ("graph", "aside", "in_part"), [(0, 0, 3), (1, 0, 3), (-1, 3, 0)]
)
def test_graphs_that_stayed_fp32_are_not_counted_as_rewritten(
    graph: int, aside: int, in_part: int, monkeypatch
) -> None:
    monkeypatch.setattr(pipeline, "normalise", failing_on(graph))
    model = autoamp.convert(halves(), **BF16)
    for _ in range(3):
        model(torch.randn(3, 8))
    coverage = autoamp.report(model).coverage
    counts = (coverage.calls, coverage.calls_aside, coverage.calls_in_part)
    assert counts == (3, aside, in_part)
    said = f"{3 - aside} of 3 calls ran rewritten graphs"
    beside = ", 3 of them graphs that stayed fp32 as well" if in_part else "."
    assert said + beside in str(autoamp.report(model))


@pytest.mark.parametrize("fails", [False, True])
def test_thirty_models_of_a_class_say_it_once(fails: bool, monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO, "autoamp")
    if fails:
        monkeypatch.setattr(pipeline, "normalise", failing_on(-1))
    alive = [autoamp.convert(Block(8), **BF16) for _ in range(30)]
    for model in alive:  # a graph that nobody has any more would be captured again
        model(torch.randn(2, 8))
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("autoamp")]
    (line,) = [line for line in lines if "first call" not in line]
    assert ("planted" in line) == fails
    assert ("is converted" in line) != fails


def error_of(model: nn.Module) -> str:
    try:
        model(torch.randn(1, 8))
    except ValueError as error:
        return "".join(traceback.format_exception(error))
    raise AssertionError("a batch-norm of one sample raises")


@pytest.mark.thorough(but=["convert"])
@pytest.mark.parametrize("mode", ["convert", "automatic"])
def test_an_error_of_the_users_is_told_once(mode: str, request, caplog) -> None:
    model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    if mode == "convert":
        autoamp.convert(model, **BF16)
    else:
        request.getfixturevalue("automatic")
    told = error_of(model)
    assert told.count("ValueError:") == 1
    assert "TorchRuntimeError" not in told
    assert "WON'T CONVERT" not in caplog.text
    model(torch.randn(4, 8))
    assert low_products(model) >= 1


def test_a_long_first_call_shows_signs_of_life(caplog, monkeypatch) -> None:
    caplog.set_level(logging.INFO, "autoamp")
    real = pipeline.normalise

    def slow(*args: Any) -> Any:
        time.sleep(0.3)
        return real(*args)

    monkeypatch.setattr(pipeline, "normalise", slow)
    quickly = functools.partial(signs_of_life, every=0.05)
    monkeypatch.setattr("autoamp.model.entry.signs_of_life", quickly)
    model = kind_of_block(-1)(8)  # none like it has been captured
    autoamp.convert(model, **BF16)(torch.randn(2, 8))
    assert caplog.text.count("the first call of Block-1 has taken 0 s") == 1


def neighbours(m: Any, x: Tensor) -> Tensor:
    return torch.sparse.mm(m.adjacent, torch.mm(x, m.weight))


def test_flops_that_nobody_counts_are_not_said_to_be_low(caplog) -> None:
    caplog.set_level(logging.INFO, "autoamp")
    layer = Of(neighbours, weight=nn.Parameter(torch.randn(8, 8)))
    layer.adjacent = torch.eye(4).to_sparse()  # an attribute, as in graph networks
    model = nn.Sequential(nn.Linear(8, 8), layer)
    autoamp.convert(model, **BF16)(torch.randn(4, 8))
    report = autoamp.report(model)
    said = " ".join(str(report).split())
    assert "100.0% of the flops in them ran in low precision (1 part was not" in said
    coverage = json.loads(report.to_json())["coverage"]
    assert coverage["parts_not_captured"] == 1
    (line,) = [said for said in caplog.messages if "is converted to" in said]
    assert "not captured, and in fp32: " in line
    assert line.endswith(": neighbours")
    assert Path(__file__).name in line
