"""`convert(model, lock=...)`: placements held to a committed report."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoamp
from autoamp.auto import environment
from autoamp.errors import LockError, OptionError
from autoamp.saved.load import load
from tests.logs import warned
from tests.small_models import BF16, Of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))).softmax(-1)


class Broken(Net):
    """Two graphs: Dynamo breaks between the layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.second(y).softmax(-1)


X = torch.ones(4, 8)


def lock_of(model: nn.Module, path: Path, *calls: torch.Tensor, **options: Any) -> str:
    autoamp.convert(model, **{**BF16, **options})
    for x in calls or (X,):
        model(x)
    autoamp.report(model).to_json(path)
    return str(path)


@pytest.fixture
def lock(tmp_path: Path) -> str:
    return lock_of(Net(), tmp_path / "precision.json")


def run(model: nn.Module, lock: str, *calls: torch.Tensor, **options: Any) -> nn.Module:
    autoamp.convert(model, lock=lock, **{**BF16, **options})
    for x in calls or (X,):
        model(x)
    return model


# -- a lock that holds -----------------------------------------------------------------


def test_the_same_placement_is_silent(
    lock: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = run(Net(), lock, X, X, strict=True)
    model(X).sum().backward()
    assert warned(caplog) == []


def test_what_explain_wrote_holds_a_conversion(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "precision.json"
    autoamp.explain(Broken(), X, options=BF16).to_json(path)
    assert len(load(path).graphs) == 2
    run(Broken(), str(path), strict=True)
    assert warned(caplog) == []


def test_the_order_of_capture_is_no_difference(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each mode has a graph of its own: dropout is an op in training only."""

    def make() -> Of:
        return Of(
            lambda m, x: m.drop(m.fc(x)), fc=nn.Linear(8, 8), drop=nn.Dropout(0.1)
        )

    first = make()
    path = lock_of(first, tmp_path / "precision.json")
    first.eval()(X)
    autoamp.report(first).to_json(path)
    assert len(load(path).graphs) == 2
    other = make().eval()
    run(other, path, strict=True)
    other.train()(X)
    assert warned(caplog) == []


# -- a lock that does not hold ---------------------------------------------------------


def test_a_lock_of_other_versions_or_of_none_holds(
    lock: str, caplog: pytest.LogCaptureFixture
) -> None:
    document = json.loads(Path(lock).read_text())
    assert document["versions"]["torch"] == torch.__version__.partition("+")[0]
    for versions in ({"torch": "1.0", "autoamp": "0.0.1"}, None):
        document["versions"] = versions
        if versions is None:
            del document["versions"]
        Path(lock).write_text(json.dumps(document))
        run(Net(), lock, strict=True)
        with pytest.raises(LockError, match="first: aten::linear"):
            run(Net(), lock, strict=True, keep="first")
    assert warned(caplog) == []


def test_a_difference_is_warned_about_once(
    lock: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = run(Net(), lock, X, X, keep="second")
    (text,) = warned(caplog)
    assert text.startswith(f"autoamp: graph 0 of Net is not placed as the lock {lock} ")
    assert "second: aten::linear" in text
    assert "(linear_1) at " in text
    assert " is fp32 and was bf16 (" in text
    assert f"`autoamp diff {lock} precision.new.json`" in text
    assert autoamp.is_converted(model)
    assert {op.precision for op in autoamp.report(model).ops} == {"bf16", "fp32"}


def test_a_difference_is_refused_under_strict(lock: str) -> None:
    with pytest.raises(LockError, match=r"second: aten::linear.* is fp32 and was bf16"):
        run(Net(), lock, keep="second", strict=True)
    model = Net()
    with pytest.raises(LockError, match="is not placed as the lock"):
        autoamp.convert(
            model,
            lock=lock,
            keep="second",
            strict=True,
            example_inputs=(X,),
            **BF16,
        )
    assert not autoamp.is_converted(model)


def test_only_the_first_differences_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deep = nn.Sequential(*(nn.Linear(8, 8) for _ in range(9)))
    lock = lock_of(deep, tmp_path / "a.json")
    run(nn.Sequential(*(nn.Linear(8, 8) for _ in range(9))), lock, keep="*")
    (text,) = warned(caplog)
    assert text.count(" is fp32 and was bf16") == 3
    assert "; and 6 more." in text


@pytest.mark.thorough
def test_graphs_that_are_alike_are_held_in_order_of_capture(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same ops at two ranks: in the lock one op of the second graph is fp32."""
    other = torch.ones(2, 3, 8)
    lock = Path(lock_of(Net(), tmp_path / "a.json", X, other))
    document = json.loads(lock.read_text())
    (op,) = [o for o in document["ops"] if o["graph"] == 1 and o["name"] == "linear_1"]
    op["precision"] = "fp32"
    lock.write_text(json.dumps(document))
    run(Net(), str(lock), X)
    assert warned(caplog) == []
    run(Net(), str(lock), X, other, other)
    (told,) = warned(caplog)
    assert "graph 1 of Net is not placed as the lock" in told
    assert "is bf16 and was fp32" in told
    model = run(Net(), str(lock), X, strict=True)
    for _ in range(2):
        with pytest.raises(LockError, match="graph 1 of Net is not placed"):
            model(other)


def test_ops_that_came_and_went_are_differences(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def model(*functions: Callable[..., Any]) -> Of:
        def forward(m: Of, x: torch.Tensor) -> torch.Tensor:
            for function in functions:
                x = function(x)
            return m.fc(x)

        return Of(forward, fc=nn.Linear(8, 8))

    lock = lock_of(model(torch.tanh, torch.relu), tmp_path / "a.json")
    run(model(torch.tanh, torch.relu, torch.exp), lock)
    run(model(torch.tanh), lock)
    more, fewer = warned(caplog)
    assert "aten::exp" in more
    assert "is new, in fp32" in more
    assert "aten::relu" in fewer
    assert "is gone, which was" in fewer


@pytest.mark.thorough
def test_bodies_are_held_as_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> Of:
        def forward(m: Of, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, m.fc, lambda y: m.fc(y).exp(), (x,))

        return Of(forward, fc=nn.Linear(8, 8), out=nn.Linear(8, 8))

    lock = lock_of(make(), tmp_path / "a.json")
    assert any(graph.body and graph.ops for graph in load(lock).graphs)
    run(make(), lock, strict=True)
    assert warned(caplog) == []
    run(make(), lock, keep="fc")
    (text,) = warned(caplog)
    assert "is fp32 and was bf16" in text


# -- graphs and models that the lock does not know -------------------------------------


def test_a_graph_of_other_shapes_is_unknown_and_no_difference(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # At three dimensions the model calls another op as well, which is fp32.
    lock = lock_of(Of(_one_more_at_three, net=Net()), tmp_path / "a.json")
    model = run(Of(_one_more_at_three, net=Net()), lock, X, X[None], strict=True)
    assert len(autoamp.report(model).graphs) == 2
    (text,) = warned(caplog)
    assert f"graph 1 of Of is not in the lock {lock}, which has 1 graph: " in text


def _one_more_at_three(m: Of, x: torch.Tensor) -> torch.Tensor:
    y = m.net(x)
    return y.exp() if x.dim() == 3 else y


def test_the_same_placement_in_another_mode_needs_no_word(
    lock: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = run(Net(), lock, strict=True)
    with torch.no_grad():
        model(X)
    model.eval()(X)
    assert len(autoamp.report(model).graphs) > 1
    assert warned(caplog) == []


def test_a_lock_of_another_class_is_said_as_such(
    lock: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = run(nn.Linear(8, 8), lock)
    (text,) = warned(caplog)
    assert (
        "is the report of a model of class Net, and this model is of class Li" in text
    )
    assert autoamp.is_converted(model)
    other = nn.Linear(8, 8)
    with pytest.raises(LockError, match="of a model of class Net"):
        autoamp.convert(other, lock=lock, strict=True, **BF16)
    assert not autoamp.is_converted(other)


def test_a_lock_of_another_model_of_that_name(
    lock: str, caplog: pytest.LogCaptureFixture
) -> None:
    other = type("Net", (Of,), {})(
        lambda m, x: m.conv(x[:, None]).exp().cumsum(-1), conv=nn.Conv1d(1, 4, 3)
    )
    run(other, lock)
    (text,) = warned(caplog)
    assert f"no graph of the lock {lock} is like graph 0 of Net" in text


def test_a_model_that_stays_fp32_is_not_as_its_lock(
    lock: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"precision": "fp16", "do_no_harm": True}  # declined on CPUs
    model = run(Net(), lock, **options)
    assert not autoamp.is_converted(model)
    assert any("ops in bf16: the model stays in fp32" in t for t in warned(caplog))
    with pytest.raises(LockError, match="the model stays in fp32, because"):
        run(Net(), lock, strict=True, **options)


# -- the option ------------------------------------------------------------------------


def test_a_missing_or_malformed_lock_is_refused_when_given(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    for given, problem in (
        (tmp_path / "missing.json", "No such file"),
        (tmp_path / "a.json", 'it has no key "schema"'),
        (tmp_path, "it is a directory"),
        (3, "is not the path of a saved report"),
    ):
        model: Any = Net()
        with pytest.raises(OptionError, match=problem) as caught:
            autoamp.convert(model, lock=given)  # type: ignore[arg-type]
        assert "lock=" in str(caught.value)
        assert not autoamp.is_converted(model)


def test_rewrite_has_no_lock(lock: str) -> None:
    graph = torch.fx.symbolic_trace(nn.Linear(8, 8))
    with pytest.raises(OptionError, match="has no option lock"):
        autoamp.rewrite(graph, (X,), lock=lock)


def test_the_variable(lock: str) -> None:
    options = environment.read({"AUTOAMP_LOCK": lock}).options
    assert options.locked == load(lock)
    with pytest.raises(OptionError, match=r"^AUTOAMP_LOCK='/no/lock': .*No such file"):
        environment.read({"AUTOAMP_LOCK": "/no/lock"})


def test_in_the_automatic_mode_a_lock_holds_models_of_its_class(
    lock: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "autoamp")
    autoamp.enable(lock=lock, strict=True, keep="second", **BF16)
    try:
        nn.Sequential(nn.Linear(8, 8), nn.ReLU())(X)  # another class: passed by
        with pytest.raises(LockError, match="second: aten::linear"):
            Net()(X)
    finally:
        autoamp.disable()
    assert any("this model is of class Sequential" in m for m in caplog.messages)
    assert not any("no graph of the lock" in m for m in caplog.messages)
