"""`convert(model, lock=...)`: placements held to a committed report."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp.auto import environment
from tests.logs import warned
from tests.says import says
from tests.small_models import BF16, Of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).relu()


class Broken(Net):
    """Two graphs: Dynamo breaks between the layers."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.second(y).softmax(-1)


X = torch.ones(4, 8)
OTHER = torch.ones(2, 3, 8)
"""At another rank: a graph of its own."""


def lock_of(model: nn.Module, path: Path, *calls: Tensor, **options: Any) -> str:
    autoamp.convert(model, **{**BF16, **options})
    for x in calls or (X,):
        model(x)
    autoamp.report(model).to_json(path)
    return str(path)


def graphs_in(lock: str | Path) -> list[dict[str, Any]]:
    document: dict[str, Any] = json.loads(Path(lock).read_text())
    return document["graphs"]  # type: ignore[no-any-return]


@pytest.fixture
def lock(tmp_path: Path) -> str:
    return lock_of(Net(), tmp_path / "precision.json")


def run(model: nn.Module, lock: str, *calls: Tensor, **options: Any) -> nn.Module:
    autoamp.convert(model, lock=lock, **{**BF16, **options})
    for x in calls or (X,):
        model(x)
    return model


def dropping() -> Of:
    """Each mode has a graph of its own: dropout is an op in training only."""
    return Of(lambda m, x: m.drop(m.fc(x)), fc=nn.Linear(8, 8), drop=nn.Dropout(0.1))


def branching() -> Of:
    def forward(m: Of, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, m.fc, lambda y: m.fc(y).exp(), (x,))

    return Of(forward, fc=nn.Linear(8, 8), out=nn.Linear(8, 8))


# -- a lock that holds is silent, under strict too -----------------------------------


def test_the_same_placement_holds_in_any_mode(
    lock: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = run(Net(), lock, X, X, strict=True)
    model(X).sum().backward()
    with torch.no_grad():
        model(X)
    model.eval()(X)
    assert len(autoamp.report(model).graphs) > 1
    assert warned(caplog) == []


def test_what_explain_wrote_holds_a_conversion(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "precision.json"
    autoamp.explain(Broken(), X, **BF16).to_json(path)
    assert len(graphs_in(path)) == 2
    run(Broken(), str(path), strict=True)
    assert warned(caplog) == []


def test_the_order_of_capture_is_no_difference(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = dropping()
    path = lock_of(first, tmp_path / "precision.json")
    first.eval()(X)
    autoamp.report(first).to_json(path)
    assert len(graphs_in(path)) == 2
    other = run(dropping().eval(), path, strict=True)
    other.train()(X)
    assert warned(caplog) == []


def test_a_lock_of_other_versions_or_of_none_holds(
    lock: str, caplog: pytest.LogCaptureFixture
) -> None:
    document = json.loads(Path(lock).read_text())
    given = document.pop("versions")
    assert given["torch"] == torch.__version__.partition("+")[0]
    for versions in ({"versions": {"torch": "1.0", "autoamp": "0.0.1"}}, {}):
        Path(lock).write_text(json.dumps({**document, **versions}))
        run(Net(), lock, strict=True)
        with pytest.raises(autoamp.LockError):
            run(Net(), lock, strict=True, keep="first")
    assert warned(caplog) == []


# -- a lock that does not hold -------------------------------------------------------


def test_a_difference_is_told_once_and_refused_under_strict(
    lock: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = run(Net(), lock, X, X, keep="second")
    (text,) = warned(caplog)
    says(text, "graph 0", "Net", lock, "linear_1", "is fp32 and was bf16")
    says(text, module="second", op="aten::linear", line="test_lock.py:")
    says(text, option=f"`autoamp diff {lock} precision.new.json`")
    assert {op.precision for op in autoamp.report(model).ops} == {"bf16", "fp32"}
    with pytest.raises(autoamp.LockError) as raised:
        run(Net(), lock, keep="second", strict=True)
    says(raised, lock, "is fp32 and was bf16", module="second", op="aten::linear")
    given: dict[str, Any] = {"strict": True, "example_inputs": (X,), **BF16}
    model = Net()
    with pytest.raises(autoamp.LockError):
        autoamp.convert(model, lock=lock, keep="second", **given)
    assert not autoamp.is_converted(model)


def test_only_the_first_differences_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deep = [nn.Sequential(*(nn.Linear(8, 8) for _ in range(9))) for _ in range(2)]
    run(deep[1], lock_of(deep[0], tmp_path / "a.json"), keep="*")
    (text,) = warned(caplog)
    assert text.count(" is fp32 and was bf16") == 3
    says(text, "6 more")


def test_graphs_that_are_alike_are_held_in_order_of_capture(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same ops at two ranks: in the lock one op of the second graph is fp32."""
    lock = Path(lock_of(Net(), tmp_path / "a.json", X, OTHER))
    document = json.loads(lock.read_text())
    (op,) = [o for o in document["ops"] if o["graph"] == 1 and o["name"] == "linear_1"]
    op["precision"] = "fp32"
    lock.write_text(json.dumps(document))
    run(Net(), str(lock), X)
    assert warned(caplog) == []
    run(Net(), str(lock), X, OTHER, OTHER)
    (told,) = warned(caplog)
    says(told, "graph 1 of Net", "is bf16 and was fp32")
    model = run(Net(), str(lock), X, strict=True)
    for _ in range(2):
        with pytest.raises(autoamp.LockError) as raised:
            model(OTHER)
        says(raised, "graph 1 of Net")


def test_ops_that_came_and_went_are_differences(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def model(*functions: Callable[..., Any]) -> Of:
        def forward(m: Of, x: Tensor) -> Tensor:
            for function in functions:
                x = function(x)
            return m.fc(x)

        return Of(forward, fc=nn.Linear(8, 8))

    lock = lock_of(model(torch.tanh, torch.relu), tmp_path / "a.json")
    run(model(torch.tanh, torch.relu, torch.exp), lock)
    run(model(torch.tanh), lock)
    more, fewer = warned(caplog)
    says(more, "new", "fp32", op="aten::exp")
    says(fewer, "gone", op="aten::relu")


def test_bodies_are_held_as_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lock = lock_of(branching(), tmp_path / "a.json")
    assert any(graph["body"] for graph in graphs_in(lock))
    run(branching(), lock, strict=True)
    assert warned(caplog) == []
    run(branching(), lock, keep="fc")
    (text,) = warned(caplog)
    says(text, "is fp32 and was bf16")


# -- graphs and models that the lock does not know -----------------------------------


def test_a_graph_of_other_shapes_is_unknown_and_no_difference(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def one_more_at_three(m: Of, x: Tensor) -> Tensor:
        y = m.net(x)
        return y.exp() if x.dim() == 3 else y

    lock = lock_of(Of(one_more_at_three, net=Net()), tmp_path / "a.json")
    model = run(Of(one_more_at_three, net=Net()), lock, X, X[None], strict=True)
    assert len(autoamp.report(model).graphs) == 2
    (text,) = warned(caplog)
    says(text, "graph 1 of Of", lock, "1 graph")


def test_a_lock_of_another_class_is_said_as_such(
    lock: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = run(nn.Linear(8, 8), lock)
    (text,) = warned(caplog)
    says(text, "class Net", "class Linear")
    assert autoamp.is_converted(model)
    other = nn.Linear(8, 8)
    with pytest.raises(autoamp.LockError):
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
    says(text, lock, "graph 0 of Net", "no graph")


def test_a_model_that_stays_fp32_is_not_as_its_lock(
    lock: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"precision": "fp16", "do_no_harm": True}  # declined on CPUs
    model = run(Net(), lock, **options)
    assert not autoamp.is_converted(model)
    says(warned(caplog), lock, "bf16", "the model stays in fp32")
    with pytest.raises(autoamp.LockError) as raised:
        run(Net(), lock, strict=True, **options)
    says(raised, "the model stays in fp32")


# -- the option ----------------------------------------------------------------------


def test_a_missing_or_malformed_lock_is_refused_when_given(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    for given, problem in (
        (tmp_path / "missing.json", "No such file"),
        (tmp_path / "a.json", '"schema"'),
        (tmp_path, "directory"),
        (3, "path"),
    ):
        model: Any = Net()
        with pytest.raises(autoamp.OptionError) as raised:
            autoamp.convert(model, lock=given)  # type: ignore[arg-type]
        says(raised, problem, option="lock=")
        assert not autoamp.is_converted(model)
    with pytest.raises(autoamp.OptionError) as raised:
        environment.read({"AUTOAMP_LOCK": "/no/lock"})
    says(raised, "No such file", option="AUTOAMP_LOCK='/no/lock'")


def test_rewrite_has_no_lock(lock: str) -> None:
    graph = torch.fx.symbolic_trace(nn.Linear(8, 8))
    with pytest.raises(autoamp.OptionError) as raised:
        autoamp.rewrite(graph, (X,), lock=lock)
    says(raised, option="lock")


@pytest.mark.usefixtures("off_again")
@pytest.mark.parametrize("by_variable", [False, True])
def test_in_the_automatic_mode_a_lock_holds_models_of_its_class(
    by_variable: bool, lock: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "autoamp")
    held: Any = lock
    if by_variable:
        held = environment.read({"AUTOAMP_LOCK": lock}).options.lock
    autoamp.enable(lock=held, strict=True, keep="second", **BF16)
    nn.Sequential(nn.Linear(8, 8), nn.ReLU())(X)  # another class: passed by
    with pytest.raises(autoamp.LockError) as raised:
        Net()(X)
    says(raised, module="second", op="aten::linear")
    says(caplog.messages, "class Sequential")
    assert not any("no graph of the lock" in m for m in caplog.messages)
