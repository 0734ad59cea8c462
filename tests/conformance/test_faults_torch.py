"""Another torch: what 2.11 does in another way, and ops that a torch does not have."""

from __future__ import annotations

import copy
import gc
from typing import Any

import torch
from torch import Tensor, nn

import autoamp
from autoamp import compat
from autoamp.compat import entry, frames, inductor, layers, tracing
from tests.capture.test_layers import Looping
from tests.capture.test_traces_of_threads import Trace
from tests.conformance.table import Figures
from tests.training.steps import BF16, FP16, mlp

# -- torch 2.11 ------------------------------------------------------------------------


def looped() -> tuple[Tensor, list[str], list[str]]:
    """The model's result, its low ops, and why something is in no graph."""
    gc.collect()  # models alike are captured once while one of them lives
    torch._dynamo.reset()  # code left to Python once would not be told again
    torch.manual_seed(0)
    model = autoamp.convert(Looping(), precision="bf16", do_no_harm=False)
    y = model(torch.randn(2, 4, 16))
    report = autoamp.report(model)
    low = [row.op for row in report.ops if row.is_low]
    return y.detach(), low, [why for _, why in report.skipped]


def test_layers_are_captured_where_dynamo_gives_no_reason(monkeypatch) -> None:
    """Dynamo's rules and its counters tell the same, and so does the report."""
    y, low, why = looped()
    assert low
    assert why

    def without(owner: Any, name: str) -> bool:
        return name != "skip_reason" and hasattr(owner, name)

    for module in (frames, layers):
        monkeypatch.setattr(module, "hasattr", without, raising=False)
    again, *same = looped()
    assert torch.equal(again, y)
    assert same == [low, why]


def test_the_name_of_a_source_may_be_a_method() -> None:
    graph = torch.fx.Graph()
    first, second = graph.placeholder("a"), graph.placeholder("b")
    graph.output((first, second))

    class Source:
        def name(self) -> str:
            return "L['x']"

    first._dynamo_source = Source()
    gm = torch.fx.GraphModule(nn.Module(), graph)
    assert tracing.placeholder_sources(gm) == ["L['x']", ""]


# -- words and answers of another torch ------------------------------------------------


def test_a_report_says_where_inductor_does_not_tell_of_casts(monkeypatch) -> None:
    def other_nodes(*_: Any) -> Any:
        raise AttributeError("a node of another torch")

    monkeypatch.setattr(inductor, "_fates", other_nodes)
    torch._dynamo.reset()
    model = autoamp.convert(mlp(), backend="inductor", **BF16)
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch.no_grad(),
    ):
        assert model(torch.ones(4, 8)).isfinite().all()
    said = " ".join(str(autoamp.report(model)).split())
    assert "inductor does not tell which casts it keeps inside a kernel" in said


def test_settings_of_inductor_that_are_hidden_are_the_users_own() -> None:
    wrapper: Any = torch._TorchCompileInductorWrapper("default", {}, None)
    asked: dict[str, Any] = {"exact_casts": True, "reading": compat.CastReading(())}
    assert inductor.inductor_backend(wrapper, **asked) is not wrapper
    del wrapper.config
    assert inductor.inductor_backend(wrapper, **asked) is wrapper


def test_an_unknown_refusal_during_a_trace_of_another_thread(monkeypatch) -> None:
    """The call runs in fp32, and says so; the next one is converted."""
    torch._dynamo.reset()
    monkeypatch.setattr(entry, "_FORBIDDEN", "in the words of another torch")
    model, x = autoamp.convert(mlp().eval(), **BF16), torch.randn(4, 8)
    wanted = model(x)
    trace = Trace()
    trace.start()
    assert trace.is_under_way.wait(60)
    exact = model(x)
    trace.may_end.set()
    trace.join(60)
    assert not torch.equal(exact, wanted)
    assert "torch.fx has traced it" in autoamp.report(model).skipped[0][1]
    assert torch.equal(model(x), wanted)


# -- ops that are missing --------------------------------------------------------------


def test_ops_this_torch_lacks_are_left_out_of_the_lists(
    monkeypatch, figures: Figures
) -> None:
    """The built-in rules name them; the model runs, and says what has no rule."""
    from autoamp.rules import parse, table

    gone = ("aten::linear", "aten::tanh", "aten::scaled_dot_product_attention")
    model, x = mlp(), torch.randn(4, 8)
    exact = model(x)
    exists = parse.exists
    monkeypatch.setattr(parse, "exists", lambda op: op not in gone and exists(op))
    table._load_builtin.cache_clear()
    try:
        autoamp.convert(model, **FP16)
        y = model(x)
        y.sum().backward()
        report = autoamp.report(model)
        unlisted = {row.op for row in report.ops if not row.listed}
        assert unlisted == {f"{op}.default" for op in gone[:2]}
        assert not any(row.is_low for row in report.ops if "linear" in row.op)
        assert "Ops in no list" in report.full()
        assert torch.allclose(y, exact)
        figures.count("ops taken away", len(gone))
    finally:
        monkeypatch.undo()
        table._load_builtin.cache_clear()
    again = autoamp.convert(copy.deepcopy(model), **BF16)
    again(x)
    assert any(row.is_low for row in autoamp.report(again).ops)
