"""A failed pass or check costs a region: not the model, and never a wrong number."""

from __future__ import annotations

import dataclasses
import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import autoamp
from autoamp.errors import AutoampError, PassError, VerificationError
from tests.logs import warned
from tests.metrics import relative_error
from tests.passes.texts import Options, Pass, Phase, Rewritten, Setting, passes, run
from tests.says import says
from tests.small_models import converted

WIDTH, LAYERS = 8, 6
REPORT = "please report"


class Net(nn.Module):
    """Layers in a row; the fault is planted in the one that takes a tanh."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            x = x.tanh() if i == 2 else x.relu()
        return x


INSIDE = {
    "normalise": ("autoamp.passes.see.lowering", "Lowering.call_method"),
    "classify": ("autoamp.passes.decide.classify", "_verdict"),
    "price": ("autoamp.passes.decide.cost", "_Model.op"),
    "casts": ("autoamp.passes.write.casts", "_Emitter._emit_op"),
    "hoist": ("autoamp.passes.list", "hoist_weight_casts"),
}
"""The function of each pass that looks at one node; of `hoist`, the whole of it."""


def broken(patch: pytest.MonkeyPatch, name: str, op: str = "tanh") -> None:
    """The pass has a bug that shows for the calls of one op, as long as it is low."""
    module, path = INSIDE[name]
    owner: Any = importlib.import_module(module)
    for part in path.split(".")[:-1]:
        owner = getattr(owner, part)
    function = path.split(".")[-1]
    real = getattr(owner, function)

    def failing(*given: Any) -> Any:
        placed = getattr(given[0], "assignment", None)
        is_low = placed is None or op in placed.low
        if name == "hoist" or (is_low and op in [getattr(g, "name", g) for g in given]):
            raise ValueError("planted")
        return real(*given)

    patch.setattr("autoamp.passes.see.normalise.op_cache_for", lambda *_: None)
    patch.setattr(owner, function, failing)


def low_products(report: autoamp.Report) -> int:
    return sum(row.is_low for row in report.ops if "linear" in row.op)


@pytest.mark.parametrize("name", INSIDE)
def test_a_bug_in_a_pass_costs_a_region(name: str, monkeypatch) -> None:
    x, plain = torch.randn(4, WIDTH), Net()
    broken(monkeypatch, name)
    model = converted(Net(), strict=False)
    for each in (plain, model):
        each(x).square().sum().backward()
    assert relative_error(model(x), plain(x)) < 0.05
    for found, true in zip(model.parameters(), plain.parameters(), strict=True):
        assert found.grad is not None
        assert true.grad is not None
        assert relative_error(found.grad, true.grad) < 0.1
    report = autoamp.report(model)
    assert low_products(report) >= LAYERS - 2, "the others are converted"
    says([why for _, why in report.skipped], "planted")
    if name != "normalise":  # which gives a call that it cannot trace as it is
        with pytest.raises(AutoampError):
            converted(Net())(x)


def test_a_write_that_the_facts_miss_costs_a_region(monkeypatch) -> None:
    class Writes(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x).exp()
            first = self.layers[0](h)
            h.view(-1)[0:3].zero_()
            return first + self.layers[1](h)

    real = passes.collect_facts

    def blind(gm: fx.GraphModule, *given: Any) -> Any:
        found = real(gm, *given)
        nodes = {}
        for name, fact in found.nodes.items():
            read = tuple(dataclasses.replace(o, epoch=0) for o in fact.operands)
            nodes[name] = dataclasses.replace(fact, operands=read)
        return dataclasses.replace(found, nodes=nodes)

    x = torch.randn(4, WIDTH)
    truth = Writes()(x)
    monkeypatch.setattr(passes, "collect_facts", blind)
    model = converted(Writes(), deny=["exp"], strict=False)
    with torch.no_grad():
        assert relative_error(model(x), truth) < 0.05
    report = autoamp.report(model)
    assert low_products(report) >= LAYERS
    says([why for _, why in report.skipped], REPORT)


def test_a_write_through_a_view_that_cannot_be_traced_is_not_lost(monkeypatch) -> None:
    """The facts know nothing of the view; the verifier sees what it shows."""

    class Views(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            h.transpose(0, 1).zero_()
            return h + self.layers[0](h)

    x = torch.randn(4, WIDTH)
    truth = Views()(x)
    broken(monkeypatch, "normalise", "transpose")
    model = converted(Views(), strict=False)
    assert relative_error(model(x), truth) < 0.05
    report = autoamp.report(model)
    assert low_products(report) >= LAYERS - 2
    says([why for _, why in report.skipped], "the write is lost")


def test_the_report_names_the_place_once(monkeypatch, caplog) -> None:
    broken(monkeypatch, "classify")
    model = converted(Net(), strict=False)
    with caplog.at_level(logging.WARNING):
        model(torch.randn(4, WIDTH))
    (said,) = [each for each in warned(caplog) if REPORT in each]
    says(said, "ValueError: planted", op="tanh", line="x.tanh()")
    says(autoamp.report(model).why("tanh"), REPORT)


# -- the way back by itself ------------------------------------------------------------


def tried(
    length: int, attempt: Callable[[Mapping[str, str]], None], strict: bool = False
) -> list[set[str]]:
    """The nodes that were given up at each try of a list of one pass, on a chain."""
    graph, found = fx.Graph(), []
    at = graph.placeholder("x")
    for i in range(length):
        at = graph.create_node("call_function", torch.relu, (at,), {}, f"op{i}")
    graph.output(at)
    gm = fx.GraphModule(nn.Module(), graph)

    def decide(work: Rewritten) -> Rewritten:
        found.append(set(work.given_up))
        attempt(work.given_up)
        return work

    options = Options(strict=strict)
    work = Rewritten(options, torch.bfloat16, Setting(), gm, before=gm)
    try:
        run._run(work, Phase.WRITE, [Pass(decide, Phase.DECIDE)])
    except Exception as error:
        error.args = (*error.args, found)
        raise
    return found


def test_the_region_grows_until_the_error_is_gone() -> None:
    def attempt(kept: Mapping[str, str]) -> None:
        if "op2" not in kept:
            raise VerificationError("no", nodes=["op5"])
        assert all(REPORT in why and why.endswith(": no") for why in kept.values())

    found = tried(12, attempt)
    reaches = [range(0), range(5, 6), range(3, 8), range(1, 10)]
    assert found == [{f"op{i}" for i in reach} for reach in reaches]


def test_each_error_takes_its_own_region() -> None:
    def attempt(kept: Mapping[str, str]) -> None:
        for name in ("op1", "op9"):
            if name not in kept:
                raise PassError.at(name, ValueError("no"))

    assert tried(12, attempt)[-1] == {"op1", "op9"}


@pytest.mark.parametrize(
    ("error", "strict", "tries"),
    [
        (VerificationError("whole"), False, 1),
        (ValueError("foreign"), False, 1),
        (VerificationError("strict", nodes=["op1"]), True, 1),
        (VerificationError("always", nodes=["op20"]), False, 5),
    ],
)
def test_an_error_is_raised_in_the_end(
    error: Exception, strict: bool, tries: int
) -> None:
    """At once where it names no node, or in strict mode."""

    def attempt(kept: Mapping[str, str]) -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        tried(60, attempt, strict)
    assert raised.value is error
    assert len(error.args[-1]) == tries
