"""A failed check costs a region: not the model, and never a wrong number."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

import autoamp
from autoamp.analyse import classify as classify_module
from autoamp.errors import AutoampError, PassError, VerificationError
from autoamp.options import Options
from autoamp.pipeline import passes
from autoamp.pipeline import run as pipeline
from autoamp.pipeline.passes import Pass, Phase
from autoamp.pipeline.retreat import REPORT
from autoamp.place import cost
from autoamp.rewrite import casts
from autoamp.rewrite.emitted import Emitted
from autoamp.rewrite.rewritten import Rewritten, Setting
from autoamp.trace import normalise as normalise_module
from autoamp.trace.lowering import Lowering
from tests.metrics import relative_error
from tests.small_models import converted

WIDTH = 8
LAYERS = 6


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


def in_facts(patch: pytest.MonkeyPatch) -> None:
    """No write is seen: what is cast before it is read after it."""
    real = passes.collect_facts

    def blind(gm: fx.GraphModule, *given: Any) -> Any:
        found = real(gm, *given)
        nodes = {
            name: dataclasses.replace(
                fact,
                operands=tuple(dataclasses.replace(o, epoch=0) for o in fact.operands),
            )
            for name, fact in found.nodes.items()
        }
        return dataclasses.replace(found, nodes=nodes)

    patch.setattr(passes, "collect_facts", blind)


def in_normalise(patch: pytest.MonkeyPatch) -> None:
    real = Lowering.call_method

    def failing(self: Any, target: str, args: Any, kwargs: Any) -> Any:
        if target == "tanh":
            args[0] + 1  # recorded, and to be forgotten
            raise ValueError("planted")
        return real(self, target, args, kwargs)

    patch.setattr(normalise_module, "op_cache_for", lambda *_: None)  # all is traced
    patch.setattr(Lowering, "call_method", failing)


def in_classify(patch: pytest.MonkeyPatch) -> None:
    real = classify_module._verdict

    def failing(node: fx.Node, *rest: Any) -> Any:
        if node.name == "tanh":
            raise ValueError("planted")
        return real(node, *rest)

    patch.setattr(classify_module, "_verdict", failing)


def in_price(patch: pytest.MonkeyPatch) -> None:
    real = cost._Model.op

    def failing(self: Any, node: fx.Node, fact: Any) -> Any:
        if node.name == "tanh":
            raise ValueError("planted")
        return real(self, node, fact)

    patch.setattr(cost._Model, "op", failing)


def in_place(patch: pytest.MonkeyPatch) -> None:
    """The assignment says that an op is low, and is carried out otherwise."""
    real = passes.assign

    def lying(*given: Any) -> Any:
        found = real(*given)
        return dataclasses.replace(found, low=found.low - {"tanh"})

    patch.setattr(passes, "assign", lying)


def in_rewrite(patch: pytest.MonkeyPatch) -> None:
    """One operand is another value, of the same dtype."""
    real_emit = casts._Emitter._in_dtype

    def forgetful(self: Any, value: str, dtype: Any, reader: Any, epoch: int) -> Any:
        if reader.name == "linear_3" and value == "tanh":
            return self.new["linear_2"]
        return real_emit(self, value, dtype, reader, epoch)

    patch.setattr(casts._Emitter, "_in_dtype", forgetful)


def in_rewrite_raising(patch: pytest.MonkeyPatch) -> None:
    real = casts._Emitter._emit_op

    def failing(self: Any, node: fx.Node) -> Any:
        if node.name == "tanh" and node.name in self.assignment.low:
            raise KeyError("planted")
        return real(self, node)

    patch.setattr(casts._Emitter, "_emit_op", failing)


def in_casts(patch: pytest.MonkeyPatch) -> None:
    """A cast says one dtype and makes another."""
    real = Emitted.cast

    def lying(self: Any, value: str, dtype: torch.dtype) -> fx.Node:
        new = real(self, value, dtype)
        if value == "layers_2_weight":
            new.kwargs = {"dtype": torch.float16}
        return new

    patch.setattr(Emitted, "cast", lying)


def in_clean_up(patch: pytest.MonkeyPatch) -> None:
    real = passes.clean_up

    def greedy(gm: fx.GraphModule) -> fx.GraphModule:
        for node in list(gm.graph.nodes):
            if node.name == "tanh" and node.meta["val"].dtype is torch.bfloat16:
                node.replace_all_uses_with(node.args[0])
                gm.graph.erase_node(node)
        return real(gm)

    patch.setattr(passes, "clean_up", greedy)


def in_hoist(patch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise ValueError("planted")

    patch.setattr(passes, "hoist_weight_casts", failing)


FAULTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    in_normalise,
    in_classify,
    in_price,
    in_place,
    in_rewrite,
    in_rewrite_raising,
    in_casts,
    in_clean_up,
    in_hoist,
]


def step(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    result = model(x)
    result.square().sum().backward()
    return result, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.thorough(but=["in_normalise", "in_hoist"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_planted_fault_costs_a_region(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch
) -> None:
    x = torch.randn(4, WIDTH)
    truth, gradients = step(Net(), x)
    fault(monkeypatch)
    model = converted(Net(), strict=False)
    result, ours = step(model, x)
    report = autoamp.report(model)
    products = [row for row in report.ops if "linear" in row.op]
    assert len(products) == LAYERS
    low = sum(row.is_low for row in products)
    assert low >= LAYERS - 2, "the others are converted"
    assert any("planted" in why or REPORT in why for _, why in report.skipped)
    assert relative_error(result, truth) < 0.05
    for found, true in zip(ours, gradients, strict=True):
        assert relative_error(found, true) < 0.1


@pytest.mark.thorough(but=["in_classify", "in_hoist"])
@pytest.mark.parametrize("fault", FAULTS[1:], ids=lambda f: f.__name__)
def test_strict_raises_at_once(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AutoampError):
        converted(Net())(torch.randn(4, WIDTH))


def test_a_write_that_the_facts_miss_costs_a_region(monkeypatch) -> None:
    class Writes(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x).exp()
            first = self.layers[0](h)
            h.view(-1)[0:3].zero_()
            return first + self.layers[1](h)

    x = torch.randn(4, WIDTH)
    truth = Writes()(x)
    in_facts(monkeypatch)
    model = converted(Writes(), deny=["exp"], strict=False)
    with torch.no_grad():
        assert relative_error(model(x), truth) < 0.05
    report = autoamp.report(model)
    assert sum(row.is_low for row in report.ops if "linear" in row.op) >= LAYERS
    assert any(REPORT in why for _, why in report.skipped)


def test_a_write_through_a_view_that_cannot_be_traced_is_not_lost(monkeypatch) -> None:
    """The facts know nothing of the view; the verifier sees what it shows."""

    class Views(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            h.transpose(0, 1).zero_()
            return h + self.layers[0](h)

    real = Lowering.call_method

    def failing(self: Any, target: str, args: Any, kwargs: Any) -> Any:
        if target == "transpose":
            raise ValueError("planted")
        return real(self, target, args, kwargs)

    x = torch.randn(4, WIDTH)
    truth = Views()(x)
    monkeypatch.setattr(normalise_module, "op_cache_for", lambda *_: None)
    monkeypatch.setattr(Lowering, "call_method", failing)
    model = converted(Views(), strict=False)
    assert relative_error(model(x), truth) < 0.05
    report = autoamp.report(model)
    assert sum(row.is_low for row in report.ops if "linear" in row.op) >= LAYERS - 2
    assert any("the write is lost" in why for _, why in report.skipped)


def test_attention_as_nano_gpt_writes_it_is_converted() -> None:
    """Its kernel's layout made `contiguous` do nothing while the model was traced."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c_attn, self.c_proj = nn.Linear(32, 96), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            b, t, c = x.shape
            q, k, v = (
                y.view(b, t, 4, 8).transpose(1, 2)
                for y in self.c_attn(x).split(c, dim=2)
            )
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))

    model = Attention()
    x = torch.randn(2, 6, 32)
    truth = model(x)
    converted(model)
    assert relative_error(model(x), truth) < 0.02
    rows = {row.op: row for row in autoamp.report(model).ops}
    assert rows["aten::scaled_dot_product_attention.default"].is_low


@pytest.mark.thorough(but=["optimal-bf16", "forced-fp16"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("placement", ["optimal", "tensorflow", "promote", "forced"])
def test_floats_made_of_integers_are_fp32(precision: str, placement: str) -> None:
    class Counts(Net):
        def forward(self, x: Tensor, i: Tensor) -> Tensor:
            factors = i / 3 + i.sqrt() + torch.log(i) + torch.true_divide(i, 7)
            factors = factors + i.float().mean() + torch.where(i > 2, 1.0, 0.5)
            return super().forward(x) * factors.unsqueeze(-1)

    model, x, i = Counts(), torch.randn(4, WIDTH), torch.arange(1, 5)
    truth = model(x, i)
    converted(model, precision=precision, placement=placement)
    assert relative_error(model(x, i), truth) < 0.02
    assert sum(row.is_low for row in autoamp.report(model).ops) >= LAYERS


# -- the way back by itself ------------------------------------------------------------


def chain(length: int) -> Rewritten:
    graph = fx.Graph()
    at = graph.placeholder("x")
    for i in range(length):
        at = graph.create_node("call_function", torch.relu, (at,), {}, f"op{i}")
    graph.output(at)
    gm = fx.GraphModule(nn.Module(), graph)
    options = Options(strict=False)
    return Rewritten(options, torch.bfloat16, Setting(), gm, before=gm)


def run(work: Rewritten, attempt: Callable[[Mapping[str, str]], None]) -> None:
    """A list of one pass that decides, which is `attempt`."""

    def decide(work: Rewritten) -> Rewritten:
        attempt(work.given_up)
        return work

    pipeline._run(work, Phase.WRITE, [Pass(decide, Phase.DECIDE)])


def test_the_region_grows_until_the_error_is_gone() -> None:
    tried: list[set[str]] = []

    def attempt(kept: Mapping[str, str]) -> None:
        tried.append(set(kept))
        if "op2" not in kept:
            raise VerificationError("no", nodes=["op5"])
        assert all(why == f"{REPORT}: no" for why in kept.values())

    run(chain(12), attempt)
    assert tried[:2] == [set(), {"op5"}]
    assert tried[2] == {f"op{i}" for i in range(3, 8)}
    assert tried[3] == {f"op{i}" for i in range(1, 10)}


def test_each_error_takes_its_own_region() -> None:
    found: set[str] = set()

    def attempt(kept: Mapping[str, str]) -> None:
        for name in ("op1", "op9"):
            if name not in kept:
                raise PassError.at(name, ValueError("no"))
        found.update(kept)

    run(chain(12), attempt)
    assert found == {"op1", "op9"}


@pytest.mark.parametrize(
    ("error", "strict"),
    [
        (VerificationError("whole"), False),
        (ValueError("foreign"), False),
        (VerificationError("strict", nodes=["op1"]), True),
    ],
)
def test_what_names_nothing_is_raised(error: Exception, strict: bool) -> None:
    tries = 0

    def attempt(kept: Mapping[str, str]) -> None:
        nonlocal tries
        tries += 1
        raise error

    work = chain(3)
    with pytest.raises(type(error), match=str(error)):
        run(dataclasses.replace(work, options=Options(strict=strict)), attempt)
    assert tries == 1


def test_it_ends() -> None:
    tries = 0

    def attempt(kept: Mapping[str, str]) -> None:
        nonlocal tries
        tries += 1
        raise VerificationError("always", nodes=["op20"])

    with pytest.raises(VerificationError, match="always"):
        run(chain(60), attempt)
    assert tries == 5


def test_the_report_names_the_place_once(monkeypatch, caplog) -> None:
    in_classify(monkeypatch)
    model = converted(Net(), strict=False)
    with caplog.at_level(logging.WARNING):
        model(torch.randn(4, WIDTH))
    (line,) = [r.getMessage() for r in caplog.records if REPORT in r.getMessage()]
    assert "at tanh: ValueError: planted" in line
    assert "x.tanh()" in line
    assert REPORT in autoamp.report(model).why("tanh")
